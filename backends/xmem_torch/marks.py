"""What each operation of a plan took, and the step around it; see `xmem.playing`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from xmem.playing import Script
from xmem.records import HEAD, REST, TAIL, Mark
from xmem_torch.masters import master_of
from xmem_torch.measure import Measure
from xmem_torch.tensors import size_bytes


class Watched:
    """A step under way whose bytes are counted.

    Peaks start again inside a step that is traced, so the step's own is put together here.

    Args:
        measure: counts.
        parameters: have no gradients when the step begins.

    Attributes:
        before_bytes: allocated when it began.
        started: the time when it began.
        marks: those of the runs in it.
    """

    def __init__(self, measure: Measure, parameters: list[torch.Tensor]) -> None:
        self._measure = measure
        self._parameters = parameters
        self._peak_bytes = 0
        self.marks: list[Marks] = []
        measure.synchronize()
        measure.reset_peak()
        self.before_bytes = measure.counters().allocated_bytes
        self.started = time.perf_counter()

    def count(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count the gradients of more parameters."""
        known = set(map(id, self._parameters))
        self._parameters += [p for p in parameters if id(p) not in known]

    def read(self) -> tuple[int, int]:
        """Wait; return what is allocated, and the most since peaks started again."""
        self._measure.synchronize()
        counters = self._measure.counters()
        now = counters.allocated_bytes
        peak_bytes = max(counters.peak_allocated_bytes or 0, now)
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        return now, peak_bytes

    def finish(self) -> None:
        """Wait for the end of the step; what is marked ends with it."""
        self._measure.synchronize()
        for marks in self.marks:
            marks.end()
        self.marks.clear()

    def restart(self) -> None:
        """Let peaks start again."""
        self._measure.reset_peak()

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated in the step so far."""
        self.read()
        return self._peak_bytes

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that the step has made so far."""
        found = {id(g): g for p in self._parameters if (g := master_of(p).grad) is not None}
        return sum(map(size_bytes, found.values()))


_state = threading.local()


def step_under_way() -> Watched | None:
    """Return the step that runs in this thread."""
    return getattr(_state, "step", None)


@contextmanager
def under_way(step: Watched) -> Iterator[None]:
    """Let runs that begin in the block know of the step."""
    before = step_under_way()
    _state.step = step
    try:
        yield
    finally:
        _state.step = before


class NoMarks:
    """Stands in for marks where none are noted."""

    def around(self, _: int) -> AbstractContextManager[None]:
        """Mark nothing."""
        return nullcontext()

    def nothing(self, _: int = 0) -> None:
        """Do nothing."""

    head = end = begin = chain_ended = nothing

    def complete(self) -> list[Mark]:
        """Return no marks."""
        return []


class Marks:
    """Notes what operations take; each mark begins where the one before has ended, or later.

    Args:
        measure: counts.
        script: whose operations they are.
    """

    def __init__(self, measure: Measure, script: Script) -> None:
        self._in_step = step_under_way()
        self._step = self._in_step or Watched(measure, [])
        self._script = script
        self._open: tuple[int, int, int, float] | None = None
        self._taken: dict[int, Mark] = {}
        self._gradient_bytes: dict[int, int] = {}  # when each mark ended
        if self._in_step is not None:
            self._in_step.marks.append(self)

    def head(self) -> None:
        """Note what came before the first operation."""
        now, peak_bytes = self._step.read()
        before = 0 if self._in_step is None else self._step.before_bytes
        seconds = time.perf_counter() - self._step.started
        self._take(Mark(HEAD, before, peak_bytes, now, 0, seconds))

    def begin(self, op: int) -> None:
        """Begin a mark."""
        before, _ = self._step.read()
        self._step.restart()
        self._open = op, before, self._step.gradient_bytes, time.perf_counter()

    def end(self) -> None:
        """End the mark that has begun, if one has."""
        if self._open is None:
            return
        after, peak_bytes = self._step.read()
        op, before, gradient_bytes, started = self._open
        seconds = time.perf_counter() - started
        self._open = None
        self._take(Mark(op, before, peak_bytes, after, gradient_bytes, seconds))

    def chain_ended(self) -> None:
        """End the backward that has begun: the rest of the step follows."""
        if self._open is not None and self._open[0] in self._script.backward:
            self.end()
            self.begin(REST)

    @contextmanager
    def around(self, op: int) -> Iterator[None]:
        """Mark a block."""
        self.begin(op)
        try:
            yield
        finally:
            self.end()

    def complete(self) -> list[Mark]:
        """Return a mark for each forward and backward; an empty one where it did not run."""
        worked = [k for k, op in enumerate(self._script.ops) if op.code in ("N", "G", "B")]
        before = [k for k in worked if k < self._script.loss]
        expected = (*before, TAIL, *worked[len(before) :], REST)
        last = self._taken.get(HEAD)
        if last is None:
            return []
        found = [last]
        gradient_bytes = self._gradient_bytes[HEAD]
        for op in expected:
            now = last.after_bytes
            last = self._taken.get(op, Mark(op, now, now, now, gradient_bytes, 0.0))
            gradient_bytes = self._gradient_bytes.get(op, gradient_bytes)
            found.append(last)
        return found

    def _take(self, mark: Mark) -> None:
        self._taken[mark.op] = mark
        self._gradient_bytes[mark.op] = self._step.gradient_bytes
