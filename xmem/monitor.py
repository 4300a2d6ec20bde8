"""Watch a training run: `with xmem.Monitor("run.jsonl") as monitor: ... monitor.step(loss=...)`.

A line costs some microseconds: the allocator's counters are read, and nothing else. No tensor is
read and nothing is synchronised, so what is attached has to be a number already. On Jittor, which
runs operations when their values are asked for, the counters are of what has been executed.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xmem
from xmem import meter
from xmem.api import active
from xmem.errors import CapabilityError, MeasurementError, UsageError, XmemWarning

if TYPE_CHECKING:
    from types import TracebackType

    from xmem.monitor_log import EndRecord, RunRecord, StepRecord, Value
    from xmem.monitor_sinks import LineFile, Sink

_PLAIN = frozenset({int, float, str, bool, type(None)})
_running: list[Monitor] = []


class Monitor:
    """Write the pool's figures after every step to a file of JSON lines, and to dashboards.

    What is monitored is the backend that is active when it is made. There is one peak in a
    process: each line restarts it, so `peak_allocated_bytes` is that since the line before.
    Inside an open `xmem.measure`, which has the peak to itself, it is unknown. Several monitors
    share the peak rightly.

    Args:
        path: a file of JSON lines. What is in it stays, and the new run comes behind it.
        every: a line for so many steps; its peak is that of all of them.
        tensorboard: a folder for TensorBoard's event files.
        wandb: the name of a Weights & Biases project, or a run of yours.
        model: to tell what its parameters, buffers and gradients take.
        optimizer: to tell what its states take.
        resume: go on with the number after the last step in the file. Else steps begin at 1.

    Raises:
        UsageError: nowhere to write to, a package is missing, or a value is wrong.
        ReportError: the file cannot be opened; SchemaError: it is something else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        tensorboard: str | os.PathLike[str] | None = None,
        wandb: Any = None,
        model: Any = None,
        optimizer: Any = None,
        resume: bool = False,
    ) -> None:
        from xmem.monitor_log import last_step

        _check(path, every, tensorboard, wandb, resume=resume)
        self._backend = active()
        self._every = every
        self._owners = (model, optimizer)
        before = last_step(Path(path)) if path is not None else None
        self._step = self._line_step = before if resume and before is not None else 0
        self._lines = 0
        self._values: dict[str, Value] = {}
        self._peak_bytes = 0
        self._resident = _Resident()
        self._peak_is_older = False
        self._process = os.getpid()
        self._closed = False
        self._file: LineFile | None = None
        self._sinks: list[Sink] = []
        self._warned: list[str] = []
        self._open(path, tensorboard, wandb)
        if "peak" in self._backend.measure.gaps:
            warnings.warn(
                f"this monitor cannot tell peaks, and a line takes long:"
                f" {self._backend.measure.gaps['peak']}",
                XmemWarning,
                stacklevel=2,
            )
        else:
            self._peak(self._backend.measure.counters().peak_allocated_bytes)
        self._line_time = time.perf_counter()
        _running.append(self)
        atexit.register(self.close)

    def step(self, /, **values: Any) -> StepRecord | None:
        """Note that a step is over; call it once after each.

        Args:
            **values: what to attach by name: numbers, text, NumPy's scalars.

        Returns:
            The line that was written, if one was due.

        Raises:
            UsageError: a value is none of these, a tensor above all: reading it would wait for
                it. Attach `xmem.log_value(loss)` where you want to wait.
        """
        for name, value in values.items():
            if type(value) not in _PLAIN:
                values[name] = _plain(name, value)
        if self._closed:
            raise UsageError("this Monitor is closed; make a new one, with resume=True to go on")
        self._step += 1
        self._values = values
        return self._line() if self._step % self._every == 0 else None

    def close(self, *, error: str = "") -> None:
        """Write what is still to be written and close everything; again is harmless."""
        from xmem.monitor_log import EndRecord

        if self._closed or os.getpid() != self._process:  # a forked child leaves the file alone
            return
        if self._step > self._line_step:
            with suppress(MeasurementError):  # do not stand before what ended the training
                self._line()
        self._closed = True
        self._write(EndRecord(step=self._step, time=time.time(), error=error))
        self._close_sinks()
        self._resident.close()
        self._owners = (None, None)
        _running.remove(self)
        atexit.unregister(self.close)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error="" if kind is None else kind.__name__)

    def _open(self, path: Any, tensorboard: Any, wandb: Any) -> None:
        from xmem import monitor_sinks

        try:
            if tensorboard is not None:
                self._sinks.append(monitor_sinks.tensorboard(os.fspath(tensorboard)))
            if wandb is not None:
                self._sinks.append(monitor_sinks.WeightsAndBiases(wandb))
            if path is not None:
                self._file = monitor_sinks.LineFile(Path(path), self._begin())
        except BaseException:
            self._close_sinks()
            raise

    def _begin(self) -> RunRecord:
        from xmem.monitor_log import RunRecord
        from xmem.report.model import Machine

        return RunRecord(
            time=time.time(),
            xmem_version=xmem.__version__,
            backend=self._backend.name,
            device=self._backend.device,
            framework_version=self._backend.framework_version,
            source=self._backend.measure.source,
            machine=Machine.here(),
            every=self._every,
            first_step=self._step + 1,
        )

    def _line(self) -> StepRecord:
        from xmem.monitor_log import StepRecord

        counters = self._backend.measure.counters()
        now = time.perf_counter()
        allocated, reserved = counters.allocated_bytes, counters.reserved_bytes
        self._lines += 1
        record = StepRecord(
            step=self._step,
            time=time.time(),
            step_seconds=(now - self._line_time) / (self._step - self._line_step),
            allocated_bytes=allocated,
            peak_allocated_bytes=self._peak(counters.peak_allocated_bytes),
            reserved_bytes=reserved,
            process_bytes=self._resident.read(),
            fragmentation=None if reserved is None else _fragmentation(allocated, reserved),
            out_of_memory_count=counters.out_of_memory_count,
            owned_bytes=self._owned() if self._lines & (self._lines - 1) == 0 else None,
            values=self._values,
        )
        self._line_step, self._line_time = self._step, now
        self._write(record)
        for sink in self._sinks:
            try:
                sink.write(record)
            except Exception as error:  # noqa: BLE001  a dashboard's trouble must not end training
                self._trouble(sink.name, error, "The file of the monitor is not concerned.")
        return record

    def _peak(self, peak_bytes: int | None) -> int | None:
        """Return the peak since the line before, and let it start again for all monitors."""
        if peak_bytes is None:
            return None
        if meter._open is not None:
            self._peak_is_older = True
            return None
        for monitor in _running:
            if monitor._backend is self._backend:
                monitor._peak_bytes = max(monitor._peak_bytes, peak_bytes)
        found = None if self._peak_is_older else max(self._peak_bytes, peak_bytes)
        self._peak_bytes, self._peak_is_older = 0, False
        self._backend.measure.reset_peak()
        return found

    def _owned(self) -> dict[str, int] | None:
        """Say what model and optimizer own. Walks them, so it is for some of the lines."""
        if self._owners == (None, None):
            return None
        measure, pool = self._backend.measure, self._backend.pool
        owned = measure.owned(*self._owners, None)
        if "by_category" not in measure.gaps:
            sizes = {c: measure.tag(c, tensors).size_bytes for c, tensors in owned.items()}
        else:  # tied parameters come twice
            try:
                sizes = {
                    c: sum({id(t): pool.tensor_bytes(t) for t in tensors}.values())
                    for c, tensors in owned.items()
                }
            except CapabilityError:
                return None
        return {category: size for category, size in sizes.items() if owned[category]}

    def _write(self, record: StepRecord | EndRecord) -> None:
        if self._file is not None:
            try:
                self._file.write(record)
            except OSError as error:
                self._trouble(self._file.name, error, "Lines are lost until there is room.")

    def _trouble(self, name: str, error: Exception, then: str) -> None:
        if name not in self._warned:
            self._warned.append(name)
            warnings.warn(
                f"the monitor cannot write to {name}: {error}. Training goes on. {then}",
                XmemWarning,
                stacklevel=5,
            )

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  as in _write
                self._trouble(sink.name, error, "What it had not sent is lost.")
        if self._file is not None:
            self._file.close()


def _fragmentation(allocated_bytes: int, reserved_bytes: int) -> float:
    return 1 - allocated_bytes / reserved_bytes if reserved_bytes else 0.0


def _check(path: Any, every: Any, tensorboard: Any, wandb: Any, *, resume: bool) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"every={every!r}: a line is written every 1 or more whole steps")
    if path is None and tensorboard is None and wandb is None:
        raise UsageError(
            'a Monitor needs somewhere to write to: xmem.Monitor("run.jsonl"), or tensorboard='
            " a folder, or wandb= a project"
        )
    if resume and path is None:
        raise UsageError("resume=True goes on after the last step of a file; give its path")


class _Resident:
    """What is resident of this process: /proc/self/statm, kept open, as opening it takes longer."""

    def __init__(self) -> None:
        self._descriptor = -1
        if hasattr(os, "pread"):
            with suppress(OSError):
                self._descriptor = os.open("/proc/self/statm", os.O_RDONLY)
                self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> int | None:
        """Return bytes, or None where the system does not tell."""
        if self._descriptor < 0:
            return None
        return int(os.pread(self._descriptor, 64, 0).split()[1]) * self._page_bytes

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _plain(name: str, value: Any) -> Value:
    """Return a number or text as Python has it."""
    import numpy as np

    found = value.item() if isinstance(value, np.generic) else value
    for kind in (bool, int, float, str):
        if isinstance(found, kind):
            return kind(found)
    raise UsageError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, and a monitor takes"
        " numbers and text. It does not read tensors, since that waits for them: attach"
        f" {name}=xmem.log_value(...) where you want to wait, every tenth step say."
    )
