"""Profiling a model: its stages become a chain of measured seconds and exact bytes.

Everything is read off real steps in which every stage is recomputed just before its backward, so no
more is held than the stages' inputs and one stage's inside, and every gradient is made by the
framework's own backward. What follows the stages, the loss included, becomes a last stage that runs
once; what comes before them is held all step, as the batch is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.codec import check_bits
from xmem.errors import UsageError
from xmem.offload.opening import warn_of_host
from xmem.offload.stages import Depots
from xmem.planned import refuse_recomputed
from xmem.planner.chain import LOSS_STAGE, OPTION_NAMES, Chain, Option, Skip, Stage
from xmem.planner.schedule import Op
from xmem.playing import REMADE
from xmem.records import HEAD, REST, TAIL, Mark
from xmem.stage_options import offload_option, packed_option
from xmem.staging import Stages, find_stages, forget_number, named_stages
from xmem.steps import LossFunction, Played, Source, check_step, every, play

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.offload.depot import To


@dataclass(frozen=True)
class Profile(Chain):
    """A chain that was measured on a model, and can be planned and run.

    Attributes:
        backend: the name of the backend that measured it.
        traced: the stages are those of a traced forward, not modules.
        batch_bytes: of the batch, which is part of a_0.
        around_bytes: the most held outside of the stages, in what comes before them: no plan
            changes it.
        step_seconds: of a step in which every stage is recomputed.
        keeps: whether stages may be kept without their inputs, see `xmem.planner.solve`.
        source: how to run the model again; None where the profile was read from a file.
    """

    backend: str = ""
    traced: bool = False
    batch_bytes: int = 0
    around_bytes: int = 0
    step_seconds: float = 0.0
    keeps: bool = True
    source: Source | None = field(default=None, repr=False, compare=False)


def profile(
    backend: Backend,
    model: Any,
    batch: Any,
    loss_fn: LossFunction,
    *,
    stages: str | Sequence[str] = "auto",
    compress: Sequence[int] = (),
    offload: To | None = None,
    directory: str | Path | None = None,
    repeats: int = 3,
    name: str = "",
) -> Profile:
    """Measure a model as a chain; see `xmem.profile`."""
    for bits in compress:
        check_bits(bits)
    depots = _depots(offload, directory)
    check_step(backend, model, loss_fn, "xmem.profile")
    refuse_recomputed(backend, model)
    if not isinstance(repeats, int) or repeats < 1:
        raise UsageError(f"repeats={repeats!r}; give a whole number, 1 or more")
    try:
        found = _stages(backend, model, batch, loss_fn, stages)
    finally:
        for tensor in backend.plans.tensors(batch):
            forget_number(tensor)
    source = Source(model, batch, loss_fn, found, depots=depots)
    # Warms up, too: kernels are compiled, it is known which buffers are written.
    sizes = play(backend, source, every(len(found.names))).value_bytes
    if isinstance(stages, str) and len(sizes) > 2 and sizes[-1] > sizes[-2]:
        # A stage holds its output to its backward, which the loss need not: logits, mostly.
        source = Source(model, batch, loss_fn, found.without_last(), depots=depots)
        play(backend, source, every(len(source.stages.names)))
    played, untraced = [], []
    for _ in range(repeats):
        played.append(play(backend, source, every(len(source.stages.names))))
        ops = every(len(source.stages.names))
        untraced.append(play(backend, source, ops, traced=False).step.seconds)
    names = [packed_option(bits) for bits in dict.fromkeys(compress)]
    names += [] if offload is None else [offload_option(offload)]
    others = {option: _kept_by(backend, source, option, repeats) for option in names}
    batch_bytes = backend.plans.bytes_of(backend.plans.tensors(batch))
    kind = name or type(model).__name__
    return _profile(backend, source, played, others, min(untraced), batch_bytes, kind)


def _depots(offload: To | None, directory: str | Path | None) -> Depots:
    """Return where stages offload to; it is known then that something can be stored there."""
    depots = Depots(directory)
    if offload is not None:
        depots.away(offload)
        warn_of_host(offload, "xmem.profile")
    elif directory is not None:
        raise UsageError(f"directory={str(directory)!r} is for offload='disk'; offload is None")
    return depots


def _kept_by(backend: Backend, source: Source, option: str, repeats: int) -> list[Played]:
    """Return steps in which every stage is kept by an option."""
    count = len(source.stages.names)
    options = [(OPTION_NAMES[0], option)] * count
    runs = [play(backend, source, every(count, 1), options=options) for _ in range(repeats + 1)]
    return runs[1:]  # the first warms up


def _stages(
    backend: Backend, model: Any, batch: Any, loss_fn: LossFunction, stages: str | Sequence[str]
) -> Stages:
    if not isinstance(stages, str):
        if not stages:
            raise UsageError("stages=[] names none; give their paths, or leave it out")
        return named_stages(backend, model, list(stages), traced=False)
    return find_stages(
        backend, model, lambda: backend.plans.forward_aside(model, batch, loss_fn), stages
    )


def _profile(
    backend: Backend,
    source: Source,
    played: Sequence[Played],
    kept_by: Mapping[str, Sequence[Played]],
    step_seconds: float,
    batch_bytes: int,
    name: str,
) -> Profile:
    """Make the chain of what was measured.

    What disturbs a time makes it longer, so the least of several is taken. What a step takes beyond
    its operations is the cost of recomputing, in Python; each stage that is run without being kept
    has its share.
    """
    first = played[0]
    ops = every(len(source.stages.names))
    marks, times = _of(played)
    others = {option: _of(runs) for option, runs in kept_by.items()}
    by_stage: dict[int, dict[str, int]] = {}
    for number, op in enumerate(ops):
        if op.code in ("N", "G", "B"):
            by_stage.setdefault(op.index, {})[op.code] = number
    numbers = _script_numbers(ops, len(source.stages.names))
    beyond = max(step_seconds - sum(times.values()), 0.0) / len(source.stages.names)
    measured = [
        _stage(
            stage_name,
            {code: marks[numbers[at]] for code, at in by_stage[i].items()},
            {c: times[numbers[at]] + beyond * (c == "N") for c, at in by_stage[i].items()},
            first.value_bytes[i + 1],
            [
                _option(
                    option,
                    {code: found[numbers[by_stage[i][code]]] for code in "GB"},
                    {code: spent[numbers[by_stage[i][code]]] for code in "GB"},
                )
                for option, (found, spent) in others.items()
            ],
            differentiated=first.differentiated[i],
        )
        for i, stage_name in enumerate(source.stages.names)
    ]
    order = [m.op for m in first.marks]
    tail, after = (first.marks[order.index(TAIL) + more] for more in (0, 1))
    # What the last stage leaves beside its gradients, the loss itself and outputs that are held.
    stays = tail.after_bytes - tail.before_bytes - after.gradient_bytes - first.value_bytes[-1]
    above = max(tail.peak_bytes - tail.before_bytes - max(stays, 0), 0)
    loss = Option(OPTION_NAMES[0], times[TAIL], 0.0, 0, above, above)
    head = first.marks[0]
    held = head.after_bytes - head.before_bytes + max(stays, 0)
    around = max(m.peak_bytes - m.gradient_bytes for m in first.marks if m.op in (HEAD, REST))
    return Profile(
        name=name,
        stages=(*_alike(measured), Stage(LOSS_STAGE, times[TAIL], above, (loss,))),
        value_bytes=(batch_bytes + max(held, 0), *first.value_bytes[1:], 0),
        skips=tuple(Skip(j - 1, i, first.value_bytes[j]) for j, i in first.reads),
        backend=backend.name,
        traced=source.stages.traced is not None,
        batch_bytes=batch_bytes,
        around_bytes=max(around - first.before_bytes, 0) + batch_bytes,
        step_seconds=step_seconds,
        keeps=REMADE not in backend.plans.gaps,
        source=source,
    )


def _of(played: Sequence[Played]) -> tuple[dict[int, Mark], dict[int, float]]:
    """Return the marks of a step by operation, and the least time of each in several."""
    marks = {m.op: m for m in played[0].marks}
    times = {op: min(m.seconds for p in played for m in p.marks if m.op == op) for op in marks}
    return marks, times


def _script_numbers(ops: Sequence[Op], stages: int) -> dict[int, int]:
    """Return the numbers that operations have in the script, which leaves the loss's own out."""
    kept = [
        n for n, op in enumerate(ops) if op.code == "L" or op.index < stages + (op.code == "Da")
    ]
    return {number: place for place, number in enumerate(kept)}


def _stage(
    name: str,
    marks: Mapping[str, Mark],
    seconds: Mapping[str, float],
    made_bytes: int,
    others: Sequence[Option],
    *,
    differentiated: bool,
) -> Stage:
    forward = marks["N"]
    temporary = max(forward.peak_bytes - forward.before_bytes - made_bytes, 0)
    if not differentiated:  # it is never run again, and keeps its output like any other
        option = Option(OPTION_NAMES[0], seconds["N"], 0.0, made_bytes, temporary, 0)
        return Stage(name, seconds["N"], temporary, (option,))
    whole = _option(OPTION_NAMES[0], marks, seconds)
    less = [o for o in others if o.kept_bytes < whole.kept_bytes]
    return Stage(name, seconds["N"], temporary, (whole, *less))


def _option(name: str, marks: Mapping[str, Mark], seconds: Mapping[str, float]) -> Option:
    kept, backward = marks["G"], marks["B"]
    return Option(
        name=name,
        forward_seconds=seconds["G"],
        backward_seconds=seconds["B"],
        kept_bytes=max(kept.after_bytes - kept.before_bytes, 0),
        forward_extra_bytes=max(kept.peak_bytes - kept.after_bytes, 0),
        backward_extra_bytes=max(backward.peak_bytes - backward.before_bytes, 0),
    )


def _alike(stages: Sequence[Stage]) -> list[Stage]:
    """Give stages of the same bytes the median of their times: they are one kind."""
    kinds: dict[Any, list[Stage]] = {}
    for stage in stages:
        kinds.setdefault(_bytes_of(stage), []).append(stage)
    return [_mean(stage, kinds[_bytes_of(stage)]) for stage in stages]


def _bytes_of(stage: Stage) -> tuple[int | tuple[int, ...], ...]:
    sizes = [(o.kept_bytes, o.forward_extra_bytes, o.backward_extra_bytes) for o in stage.options]
    return (stage.temporary_bytes, *sizes)


def _mean(stage: Stage, kind: Sequence[Stage]) -> Stage:
    options = tuple(
        replace(
            option,
            forward_seconds=statistics.median(s.options[k].forward_seconds for s in kind),
            backward_seconds=statistics.median(s.options[k].backward_seconds for s in kind),
        )
        for k, option in enumerate(stage.options)
    )
    alone = statistics.median(s.forward_seconds for s in kind)
    return Stage(stage.name, alone, stage.temporary_bytes, options)
