"""`xmem.find_batch_size`: the largest batch that fits, found in few steps and tried for real.

After Hugging Face accelerate's `find_executable_batch_size` and Lightning's batch size finder,
which go by halves or tenths until nothing fails. Here exact peaks tell where to look
(`batch_search.py`), and each size is run under a real limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from xmem.batch_records import BatchSize, LimitedBy, Try
from xmem.batch_search import Search, Space
from xmem.batch_trials import Asked, MakeStep, Outcome, OwnTrials, Trials, available_bytes
from xmem.errors import CapabilityError, InfeasibleBudgetError, MeasurementError, UsageError
from xmem.sizes import parse_size

if TYPE_CHECKING:
    from xmem.backend import Backend

_log = logging.getLogger("xmem")


def find_batch_size(
    make_step: MakeStep,
    *,
    budget: int | str | None,
    minimum: int = 1,
    maximum: int | None = None,
    margin: float = 0.02,
    multiple_of: int = 1,
    for_inference: bool = False,
    isolate: bool = True,
    time_limit: float | None = None,
    steps: int = 1,
    on_try: Callable[[Try], None] | None = None,
) -> BatchSize:
    """Return the largest batch size whose training step stays within a budget.

    That size has been run under a limit, and the next one has been refused. A try builds a step and
    runs it until it leaves as many bytes as it found, so that optimizer states are there: two steps
    where they are made by the first one, one step where they exist.

    The tries are run in a process of their own, which uses the same backend, device, number of
    threads and settings of the pool: a crash is a size that does not fit, and nothing of it stays
    here. So is a hang: 10 minutes, or 20 times the longest step so far if that is more, in which
    no step begins or ends. `make_step` is sent there by cloudpickle, so let it build model,
    optimizer and data itself. Started from a script, that process does not run the script again.

    An error of `make_step` or the step that is not for want of memory ends the search. It is raised
    as it is, with the size in its notes and in the log.

    Args:
        make_step: `make_step(batch_size)` returns a function that runs one training step of that
            size: forward, backward, update. It forgets gradients as the real loop does. What it
            returns is dropped after the step.
        budget: what allocated bytes may reach at most, all included: parameters, states,
            activations, the batch; an int or text such as "8GiB". None on a GPU: what is free, or
            the limit in force. No more than that limit (`xmem.pool.limit`).
        minimum: the smallest size that is of use.
        maximum: no larger one is tried.
        margin: the share of the budget that is held back for what a step does not show
            (fragmentation, longer sequences, an evaluation). The largest size is the one under
            budget * (1 - margin).
        multiple_of: sizes are multiples of it.
        for_inference: `make_step` returns a forward pass; it is run without gradients. A size for
            inference is no size for training.
        isolate: False runs the tries in this process, where what is allocated already counts, and
            a crash is a crash.
        time_limit: seconds; when they are over, the best size so far is returned, and says so. A
            try that hangs is ended, if it is in a process of its own.
        steps: how many steps a try runs at least; more than the loss scaler skips, if there is one.
        on_try: is given each try; they are also logged, to the logger "xmem".

    Raises:
        InfeasibleBudgetError: the minimum does not fit; it has the peak of the minimum, or None
            where that could not be measured.
        UsageError: an argument makes no sense, or `make_step` cannot be sent.
        CapabilityError: the backend cannot enforce a limit.
        MeasurementError: a block of `xmem.measure` is open; the peak does not depend on the size;
            the step of the minimum crashes; or time was up before any size was verified.
    """
    from xmem.api import active

    backend = active()
    space = Space.of(minimum, maximum, multiple_of)
    budget_bytes = _check(backend, make_step, budget, margin, time_limit, steps)
    trials: Trials
    begun = time.monotonic()
    if isolate:
        from xmem.batch_process import ChildTrials

        trials = ChildTrials(backend, make_step)
    else:
        trials = OwnTrials(backend, make_step)
    try:
        if budget_bytes is None:
            found = (trials.free_bytes(), _limit_in_force(backend))
            budget_bytes = min((n for n in found if n is not None), default=None)
        if budget_bytes is None:
            raise UsageError(
                "the driver does not say how much of the GPU's memory is free; give budget="
            )
        finder = Finder(
            trials=trials,
            space=space,
            budget_bytes=budget_bytes,
            limit_bytes=int(budget_bytes * (1 - margin)),
            for_inference=for_inference,
            steps=steps,
            deadline=None if time_limit is None else begun + time_limit,
            available_bytes=available_bytes(backend),
            on_try=on_try,
        )
        return finder.find()
    finally:
        trials.close()


def _check(
    backend: Backend,
    make_step: Any,
    budget: int | str | None,
    margin: float,
    time_limit: float | None,
    steps: int,
) -> int | None:
    """Refuse what makes no sense before anything runs; returns the budget, None for all."""
    from xmem.meter import refuse_open_block

    refuse_open_block("xmem.find_batch_size")
    if not callable(make_step):
        raise UsageError(f"make_step={make_step!r} is no function; give make_step(batch_size)")
    if not (_is_number(margin) and 0 <= margin < 1):
        raise UsageError(f"margin={margin!r} is a share of the budget: 0 or more, less than 1")
    if time_limit is not None and not (_is_number(time_limit) and time_limit > 0):
        raise UsageError(f"time_limit={time_limit!r}: seconds, more than 0")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps={steps!r}: an int of at least 1 is needed")
    for gap in ("limit", "peak"):
        if gap in backend.measure.gaps:
            raise CapabilityError(
                f"xmem.find_batch_size tries sizes under a limit, and on {backend.name!r}"
                f" {backend.measure.gaps[gap]}. Install a C++ compiler (g++) for xmem's allocator."
            )
    if budget is not None:
        found = parse_size(budget)
        if found < 1:
            raise UsageError(f"budget={budget!r}: no step fits into that")
        held = _limit_in_force(backend)
        if held is not None and held < found:
            raise UsageError(
                f"budget={budget!r} is more than the limit in force, {held} bytes, under which a"
                " size found would not train. Give budget=xmem.pool.limit, or lift the limit:"
                " xmem.pool.configure(limit=None)."
            )
        return found
    if backend.device == "cpu":
        raise UsageError(
            "on a CPU nothing says how much of the memory is yours: give budget=, what training may"
            ' take, e.g. budget="8GiB"'
        )
    return None


def _limit_in_force(backend: Backend) -> int | None:
    return backend.pool.stats().limit_bytes if backend.offers("pool") else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass
class Finder:
    """A search that is under way; see `find_batch_size` for what the fields mean.

    Attributes:
        available_bytes: what the machine has for tensors, or None where the framework itself is
            refused more than there is.
    """

    trials: Trials
    space: Space
    budget_bytes: int
    limit_bytes: int
    for_inference: bool = False
    steps: int = 1
    deadline: float | None = None
    available_bytes: int | None = None
    on_try: Callable[[Try], None] | None = None
    clock: Callable[[], float] = time.monotonic

    def find(self) -> BatchSize:
        """Run the search."""
        search = Search(self.space, self.limit_bytes)
        tries: list[Try] = []
        limited_by: LimitedBy = "budget"
        while (size := search.next_size()) is not None:
            if self.deadline is not None and self.clock() >= self.deadline:
                limited_by = "time"
                break
            predicted = search.predicted_bytes(size)
            outcome = self._attempt(size, self.limit_bytes)
            self._note(tries, _as_try(size, predicted, outcome))
            if outcome.ended == "late":
                limited_by = "time"
                break
            if outcome.ended == "completed":
                assert outcome.peak_bytes is not None
                assert outcome.static_bytes is not None
                search.fits(size, outcome.peak_bytes, outcome.static_bytes)
            else:
                search.does_not_fit(size)
        if search.best is None:
            raise self._nothing_fits(tries, late=limited_by == "time")
        if limited_by == "budget" and search.best == self.space.maximum:
            limited_by = "maximum"
        found = BatchSize(
            search.best,
            budget_bytes=self.budget_bytes,
            limit_bytes=self.limit_bytes,
            tries=tuple(tries),
            predicted=search.expected,
            limited_by=limited_by,
        )
        _log.info("find_batch_size: %r", found)
        return found

    def _attempt(self, size: int, limit_bytes: int | None) -> Outcome:
        seconds = None if self.deadline is None else max(self.deadline - self.clock(), 0.0)
        return self.trials.attempt(
            Asked(
                size=size,
                steps=self.steps,
                limit_bytes=limit_bytes,
                for_inference=self.for_inference,
                seconds=seconds,
            )
        )

    def _note(self, tries: list[Try], made: Try) -> None:
        tries.append(made)
        _log.info("find_batch_size: %s", made)
        if self.on_try is not None:
            self.on_try(made)

    def _nothing_fits(self, tries: list[Try], *, late: bool) -> Exception:
        """Return the error, after a step of the minimum without a limit, to say what it takes."""
        if late:
            return MeasurementError(
                "time was up before any batch size was verified; tried: "
                + ("; ".join(map(str, tries)) or "none")
                + ". Give more time_limit=."
            )
        first = tries[0]
        # What the machine has is the last limit: beyond it the system ends this very process.
        outcome = self._attempt(self.space.minimum, self.available_bytes)
        if outcome.ended == "died":
            return MeasurementError(
                f"the step crashes at the minimum, batch size {first.size}, without a limit too:"
                f" {outcome.reason}. With isolate=False it can be debugged in this process."
            )
        self._note(tries, _as_try(self.space.minimum, None, outcome, how="measured"))
        took = f"{outcome.peak_bytes} bytes"
        if outcome.peak_bytes is None:
            late = outcome.ended == "late"
            took = "an unknown number, as time was up" if late else "more than there is"
        held = self.budget_bytes - self.limit_bytes
        kept = f", of which {held} are held back by the margin" if held else ""
        # Unknown is None; see `find_batch_size`.
        minimum_bytes: Any = outcome.peak_bytes
        return InfeasibleBudgetError(
            f"batch size {first.size}, the minimum, does not fit into {self.budget_bytes} bytes"
            f"{kept}: it takes {took}. {self._advice(outcome)}",
            budget_bytes=self.budget_bytes,
            minimum_bytes=minimum_bytes,
        )

    def _advice(self, outcome: Outcome) -> str:
        smaller = " a smaller minimum=," if self.space.minimum > 1 else ""
        if self.for_inference:
            return f"Try{smaller} xmem.quantize_weights or a half type (xmem.cast_model)."
        if outcome.static_bytes is not None and outcome.static_bytes >= self.limit_bytes:
            return (
                f"Of these {outcome.static_bytes} are there before the step begins: parameters and"
                " optimizer states. Try xmem.quantize_optimizer or xmem.cast_model."
            )
        return (
            f"Try{smaller} xmem.apply_checkpointing, xmem.autocast, xmem.compress_activations or"
            " xmem.quantize_optimizer."
        )


def _as_try(
    size: int,
    predicted_bytes: int | None,
    outcome: Outcome,
    *,
    how: Literal["measured"] | None = None,
) -> Try:
    hows: dict[str, Literal["verified", "refused", "stopped"]] = {
        "completed": "verified",
        "refused": "refused",
        "died": "refused",
        "late": "stopped",
    }
    return Try(
        size=size,
        how=how or hows[outcome.ended],
        fits=how is None and outcome.ended == "completed",
        peak_bytes=outcome.peak_bytes,
        predicted_bytes=predicted_bytes,
        steps=outcome.steps,
        seconds=outcome.seconds,
        reason=outcome.reason,
    )
