"""In which order the stages of a pipeline work, so that none waits for ever and little is alive.

"gpipe": all micro-batches forward, then all backward (Yanping Huang et al., "GPipe: Efficient
Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019). "1f1b": a stage begins
with as many as there are stages from it to the end, then goes one backward, one forward (Deepak
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019; here
all micro-batches of a step see the same weights, as in "Memory-Efficient Pipeline-Parallel DNN
Training", ICML 2021).

What a stage sends stays in its memory until the other stage has it. So the order says too when to
wait for that: where it must have arrived anyway, or where the receiver needs nothing more of the
sender before it takes it. No order waits in a circle, even if a message is only taken when the
receiver asks for it; `tests/test_distributed_schedules.py` runs all small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from xmem.distributing import Schedule
from xmem.errors import UsageError, unknown

Kind = Literal["forward", "backward", "output_sent", "gradient_sent"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Work:
    """One thing that a stage does.

    Attributes:
        kind: "forward": receive what the stage before sent (if there is one), compute, begin to
            send the output (if a stage follows). "backward": receive the gradient of the output,
            compute, begin to send the gradient of the input. "output_sent", "gradient_sent": wait
            until that has arrived, and let go of it.
        micro_batch: of which micro-batch, from 0.
    """

    kind: Kind
    micro_batch: int


def order(schedule: str, stage: int, *, stages: int, micro_batches: int) -> tuple[Work, ...]:
    """Return what a stage does, in order.

    Args:
        schedule: "gpipe" or "1f1b".
        stage: its number, from 0.
        stages: how many there are.
        micro_batches: how many parts a batch is cut into.

    Raises:
        UsageError: an unknown schedule, or numbers that make no pipeline.
    """
    check(schedule, stages=stages, micro_batches=micro_batches)
    if not 0 <= stage < stages:
        raise UsageError(
            f"stage={stage}: the stages of {stages} have the numbers 0 to {stages - 1}"
        )
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
    done = [Work("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        done += _backward(number, first=stage == 0, last=stage == stages - 1)
        if number + ahead < micro_batches:
            done.append(Work("forward", number + ahead))
    if stage > 0:
        done.append(Work("gradient_sent", micro_batches - 1))
    return tuple(done)


def _backward(number: int, *, first: bool, last: bool) -> list[Work]:
    """Return a backward pass with the waits around it.

    The stage before takes gradient n without anything that follows it here; and a gradient that
    has come says that the stage after has had the output.
    """
    done = [] if first or number == 0 else [Work("gradient_sent", number - 1)]
    done.append(Work("backward", number))
    return done if last else [*done, Work("output_sent", number)]


def most_alive(works: tuple[Work, ...]) -> int:
    """Return how many micro-batches a stage keeps at most between their forward and backward."""
    alive = most = 0
    for work in works:
        alive += {"forward": 1, "backward": -1}.get(work.kind, 0)
        most = max(most, alive)
    return most


def check(schedule: str, *, stages: int, micro_batches: int) -> None:
    """Refuse what makes no pipeline.

    Raises:
        UsageError: an unknown schedule, no stage, no micro-batch, or "1f1b" with fewer
            micro-batches than stages, some of which would have nothing to do.
    """
    if schedule not in SCHEDULES:
        raise UsageError(unknown("schedule", schedule, SCHEDULES))
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value!r}: give a whole number above 0")
    if schedule == "1f1b" and micro_batches < stages:
        raise UsageError(
            f"micro_batches={micro_batches} is less than the {stages} stages, so that '1f1b' never"
            f" has one for each. Give at least {stages}, or schedule='gpipe'"
        )
