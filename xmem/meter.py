"""Measure between two points: `with xmem.measure(model=..., optimizer=...) as m`.

The backend's allocator counts; the meter brackets a piece of training with it, tells the allocator
who owns what, and keeps the answers. Nothing is sampled and no tensor is read.
"""

from __future__ import annotations

import gc
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem import process
from xmem.errors import MeasurementError, XmemWarning

if TYPE_CHECKING:
    from types import TracebackType

    from xmem.backend import Backend
    from xmem.protocols import Category, Counters


@dataclass(frozen=True)
class Phase:
    """A boundary that training passed.

    Attributes:
        name: "backward" (forward is over), "backward_end", "optimizer_end" or a name given to
            `Measurement.mark`.
        seconds: since the block was entered.
        allocated_bytes: at the boundary.
        peak_allocated_bytes: the highest so far in the block.
    """

    name: str
    seconds: float
    allocated_bytes: int
    peak_allocated_bytes: int


_last_model: int | None = None
_open: Measurement | None = None


def refuse_open_block(what: str) -> None:
    """Refuse what would take the peak away from an open block of `xmem.measure`.

    Raises:
        MeasurementError: a block is open.
    """
    if _open is not None:
        raise MeasurementError(
            f"a block of xmem.measure is open, and {what} would reset its peak; there is one peak"
            " to be had. Call it before or after the block."
        )


def _known(peak_bytes: int | None) -> int:
    if peak_bytes is None:
        raise MeasurementError("the backend knows no peak inside a measured block: a bug in it")
    return peak_bytes


def collect_garbage(model: Any) -> None:
    """Free cyclic garbage, which would count as static.

    A full collection visits every object of the framework (0.1 s with PyTorch), more than a small
    model's step. So it is for the first measurement of a model; in a loop only the young go.
    """
    global _last_model
    gc.collect(1 if model is not None and id(model) == _last_model else 2)
    _last_model = id(model)


class Measurement:
    """One measured block. Bytes as in DESIGN: counted by the framework's allocator.

    Attributes:
        static_bytes: allocated at entry.
        peak_allocated_bytes: the highest allocated bytes inside the block.
        peak_reserved_bytes: the highest that the framework's pool held, or None.
        end_bytes: allocated at the end.
        peak_process_bytes: the process's resident high-water mark (its whole life), or None.
        gpu_process_bytes: the driver's count for this process, or None.
        by_category: bytes by category at the instant of the peak, or None where the backend
            cannot tell. The values sum to `peak_allocated_bytes`.
        allocation_count: allocations inside the block, or None.
        untracked_bytes: bytes of the given model, optimizer and inputs that the meter cannot
            see, since they were made before `xmem.use()` or outside the framework's allocator.
        seconds: wall time of the block.
        timeline: the boundaries that training passed, in order.
        source: how bytes were counted.
    """

    def __init__(self, backend: Backend, model: Any, optimizer: Any, inputs: Any) -> None:
        self._backend = backend
        self._model = model
        self._optimizer = optimizer
        self._inputs = inputs
        self._stack = ExitStack()
        self._started = 0.0
        self._start: Counters | None = None
        self._end: Counters | None = None
        self._categories: dict[Category, int] | None = None
        self._timeline: list[Phase] = []
        self.source = backend.measure.source
        self.untracked_bytes = 0
        self.seconds = 0.0
        self.peak_process_bytes: int | None = None
        self.gpu_process_bytes: int | None = None

    def __enter__(self) -> Measurement:
        global _open
        if self._start is not None:
            raise MeasurementError("a Measurement measures one block; make a new one")
        if _open is not None:
            raise MeasurementError(
                "a measured block is open already, and there is one peak to be had. Measure one"
                " after the other, or note a boundary inside the block with mark(name)."
            )
        meter = self._backend.measure
        meter.synchronize()
        collect_garbage(self._model)
        owned = meter.owned(self._model, self._optimizer, self._inputs)
        for category, tensors in owned.items():
            self.untracked_bytes += meter.tag(category, tensors).untracked_bytes
        meter.tag_untagged("other")
        if self._model is not None and owned and not (owned["parameter"] or owned["buffer"]):
            warnings.warn(
                f"model={type(self._model).__name__} has no parameters that xmem can find; pass a"
                " module, or a list of modules.",
                XmemWarning,
                stacklevel=2,
            )
        if self.untracked_bytes:
            warnings.warn(
                f"{self.untracked_bytes} bytes of what is measured were not allocated through"
                f" xmem's meter and are not in its figures. Call xmem.use({self._backend.name!r})"
                " before building the model.",
                XmemWarning,
                stacklevel=2,
            )
        with self._stack:
            self._stack.enter_context(meter.watch(self._model, self._optimizer, self.mark))
            meter.reset_peak()
            self._start = meter.counters()
            self._stack = self._stack.pop_all()
        _open = self
        self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _open
        _open = None
        meter = self._backend.measure
        with self._stack:
            if kind is None:
                meter.synchronize()
            self.seconds = time.perf_counter() - self._started
            self._end = meter.counters()
        try:
            if kind is None:
                owners = meter.owned(self._model, self._optimizer, self._inputs)
                for category, tensors in owners.items():
                    meter.tag(category, tensors)
            self._categories = meter.peak_by_category()
            self.peak_process_bytes = process.peak_process_bytes()
            if self._backend.device != "cpu":
                self.gpu_process_bytes = process.gpu_process_bytes()
        finally:
            # A measurement outlives its block; the model must not outlive it for that.
            self._model = self._optimizer = self._inputs = None

    def mark(self, name: str) -> None:
        """Note a boundary in the timeline, with the bytes at it.

        On a lazy framework what was asked for may not have run yet; the bytes are those that the
        allocator sees now.
        """
        counters = self._backend.measure.counters()
        self._timeline.append(
            Phase(
                name=name,
                seconds=time.perf_counter() - self._started,
                allocated_bytes=counters.allocated_bytes,
                peak_allocated_bytes=_known(counters.peak_allocated_bytes),
            )
        )

    def _counters(self, which: Counters | None, name: str) -> Counters:
        if which is None:
            raise MeasurementError(f"{name} is known only after the measured block has ended")
        return which

    @property
    def static_bytes(self) -> int:
        """Bytes allocated at entry."""
        if self._start is None:
            raise MeasurementError("static_bytes is known only inside a `with` block")
        return self._start.allocated_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest allocated bytes inside the block."""
        end = self._counters(self._end, "peak_allocated_bytes")
        return _known(end.peak_allocated_bytes)

    @property
    def peak_above_static_bytes(self) -> int:
        """How far the peak rose above `static_bytes`."""
        return self.peak_allocated_bytes - self.static_bytes

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The highest bytes that the framework's pool held, or None."""
        return self._counters(self._end, "peak_reserved_bytes").peak_reserved_bytes

    @property
    def end_bytes(self) -> int:
        """Bytes allocated at the end of the block."""
        return self._counters(self._end, "end_bytes").allocated_bytes

    @property
    def allocation_count(self) -> int | None:
        """Allocations made inside the block, or None."""
        end = self._counters(self._end, "allocation_count")
        if self._start is None or self._start.allocation_count is None:
            return None
        return (
            None
            if end.allocation_count is None
            else (end.allocation_count - self._start.allocation_count)
        )

    @property
    def by_category(self) -> dict[Category, int] | None:
        """Bytes by category at the instant of the peak; they sum to the peak."""
        self._counters(self._end, "by_category")
        return self._categories

    @property
    def timeline(self) -> tuple[Phase, ...]:
        """The boundaries that training passed, in order."""
        return tuple(self._timeline)
