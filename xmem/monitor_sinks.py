"""Where a monitor's figures go: its file, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from xmem.errors import ReportError, UsageError, XmemWarning
from xmem.monitor_log import Record, StepRecord, Value

if sys.platform != "win32":
    import fcntl

_FIGURES = (
    "allocated_bytes",
    "peak_allocated_bytes",
    "reserved_bytes",
    "process_bytes",
    "fragmentation",
    "out_of_memory_count",
    "step_seconds",
)


class Sink(Protocol):
    """Takes the figures of a step."""

    name: str

    def write(self, record: StepRecord) -> None:
        """Take a step; whatever it raises is told once and ends no training."""

    def close(self) -> None:
        """Bring everything to its place."""


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by the name they are shown under; unknown is left out."""
    found = {f"memory/{name}": getattr(record, name) for name in _FIGURES}
    found |= {f"owned/{name}": size for name, size in (record.owned_bytes or {}).items()}
    found |= record.values
    numbers = {n: _as_float(v) for n, v in found.items() if isinstance(v, (int, float))}
    return {n: v for n, v in numbers.items() if v is not None}


def _as_float(value: float) -> float | None:
    try:
        return float(value)
    except OverflowError:  # an int beyond what dashboards can show
        return None


class LineFile:
    """A file that lines are put behind, each in one call of the system and with no buffer of ours.

    Raises:
        ReportError: it cannot be opened.
    """

    def __init__(self, path: Path, begin: Record) -> None:
        self.name = str(path)
        self._encode = msgspec.json.Encoder().encode
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            size = os.fstat(self._descriptor).st_size
            self._whole = not size or os.pread(self._descriptor, 1, size - 1) == b"\n"
            self._claim()
            self._write_begin(begin, size)
        except OSError as error:
            if self._descriptor >= 0:
                self.close()
            raise ReportError(
                f"cannot write {path}: {error.strerror or error}. Name a file in a folder that"
                " exists and has room."
            ) from error

    def _write_begin(self, begin: Record, size: int) -> None:
        try:
            self.write(begin)
        except OSError:
            with suppress(OSError):  # devices
                os.ftruncate(self._descriptor, size)  # a part of it would be no monitor's file
            raise

    def _claim(self) -> None:
        """Warn where another monitor has the file: lines of two runs could not be told apart."""
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warnings.warn(
                f"another monitor writes to {self.name} already, and the lines of both will be"
                " mixed. Give each process, and each monitor, a file of its own",
                XmemWarning,
                stacklevel=5,
            )
        except OSError:  # a file system without locks
            pass

    def write(self, record: Record) -> None:
        """Write a line; what was left of one that did not fit is ended first.

        Raises:
            OSError: there is no room.
        """
        try:
            line = self._encode(record) + b"\n"
        except ValueError:
            line = self._encode(_writable(record)) + b"\n"
        if not self._whole:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._whole = written == len(line)
        if not self._whole:
            raise OSError(f"{written} of {len(line)} bytes were written")

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


_MOST_BITS = 14_000
"""Python writes ints of up to 4300 digits."""


def _writable(record: Record) -> Record:
    """Return a record whose values can be written.

    Text that is no Unicode (names of files, say) gets backslashes; an int of thousands of digits
    is null.
    """
    if not isinstance(record, StepRecord):
        return record

    def writable(value: Value) -> Any:
        if isinstance(value, str):
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        return None if isinstance(value, int) and value.bit_length() > _MOST_BITS else value

    values = {writable(name): writable(value) for name, value in record.values.items()}
    return msgspec.structs.replace(record, values=values)


def tensorboard(folder: str | Path) -> Sink:
    """Return a writer of TensorBoard's event files.

    The `tensorboard` package's own writer comes first, not `torch.utils.tensorboard`, which is a
    layer on it: so no framework is imported that is not in use. Else tensorboardX.

    Raises:
        UsageError: neither is installed.
    """
    for kind in (_EventFile, _TensorBoardX):
        try:
            return kind(str(folder))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("tensorboard", "tensorboardX"):
                raise
    raise UsageError(
        f"tensorboard={str(folder)!r} needs a writer of TensorBoard's files, and none is installed:"
        " pip install tensorboard (or tensorboardX)"
    )


class _EventFile:
    name = "TensorBoard"

    def __init__(self, folder: str) -> None:
        files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = files.EventFileWriter(folder)

    def write(self, record: StepRecord) -> None:
        value = self._summaries.Summary.Value
        found = [value(tag=n, simple_value=v) for n, v in scalars(record).items()]
        summary = self._summaries.Summary(value=found)
        self._writer.add_event(
            self._events.Event(wall_time=record.time, step=record.step, summary=summary)
        )

    def close(self) -> None:
        self._writer.close()


class _TensorBoardX:
    name = "TensorBoard"

    def __init__(self, folder: str) -> None:
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(folder)

    def write(self, record: StepRecord) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step, record.time)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B: one that is given, or a new one of a project.

    In a run that is given others log too, and W&B drops what comes with an earlier step than
    theirs. So there the figures come with no step of W&B's, and are drawn over `memory/step`.

    Raises:
        UsageError: a project is named, and `wandb` is not installed; or it is neither.
    """

    name = "Weights & Biases"

    def __init__(self, run: Any) -> None:
        self._own = isinstance(run, str)
        if not self._own and not callable(getattr(run, "log", None)):
            raise UsageError(f"wandb={run!r} is neither a project's name nor a run (wandb.init())")
        self._run = _start(run) if self._own else run
        if not self._own and callable(getattr(run, "define_metric", None)):
            for names in ("memory/*", "owned/*"):
                run.define_metric(names, step_metric="memory/step")

    def write(self, record: StepRecord) -> None:
        """Log the figures."""
        texts = {n: v for n, v in record.values.items() if isinstance(v, str)}
        found: dict[str, Any] = {**scalars(record), **texts}
        if self._own:
            self._run.log(found, step=record.step)
        else:
            self._run.log({**found, "memory/step": record.step})

    def close(self) -> None:
        """Finish the run if it was begun here."""
        if self._own:
            self._run.finish()


def _start(project: str) -> Any:
    try:
        module = importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise UsageError(
            f"wandb={project!r} needs Weights & Biases, which is not installed: pip install wandb"
        ) from error
    return module.init(project=project)
