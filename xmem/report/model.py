"""Results and reports as data: recorded first, rendered later.

The JSON schema is generated from these classes (`xmem schema`). A reader takes older versions,
whose files say less, and refuses newer ones.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from xmem.errors import ReportError, SchemaError

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""1: before results of several ranks (`Case.world`, `Result.engine`, `Result.ranks`)."""

Status = Literal["ok", "unsupported", "unavailable", "out_of_memory", "timeout", "error"]
STATUSES: tuple[Status, ...] = (
    "ok",
    "unsupported",
    "unavailable",
    "out_of_memory",
    "timeout",
    "error",
)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the matrix.

    Attributes:
        workload: what is trained, see `xmem.workloads`.
        technique: how, see `xmem.conformance.techniques`.
        backend: on which backend.
        preset: how large.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads; peaks depend on them.
        limit_bytes: allocations beyond it are refused, or None.
        save_gradients: also write the first step's gradients, as an .npz file.
        steps: train for so many steps in all; None for those that are measured only.
        world: how many ranks train together; 1 for one process alone.
    """

    workload: str
    technique: str
    backend: str
    preset: str = "quick"
    device: str = "auto"
    threads: int = 2
    limit_bytes: int | None = None
    save_gradients: bool = False
    steps: int | None = None
    world: int = 1

    @property
    def name(self) -> str:
        """A name for files and tests."""
        name = f"{self.backend}-{self.workload}-{self.technique}-{self.preset}-{self.device}"
        if self.world != 1:
            name += f"-{self.world}-ranks"
        return name if self.steps is None else f"{name}-{self.steps}-steps"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a case ran."""

    system: str
    processor_count: int
    memory_bytes: int | None
    python: str

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine."""
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            memory = None
        return cls(
            system=f"{platform.system()} {platform.machine()}",
            processor_count=os.cpu_count() or 1,
            memory_bytes=memory,
            python=platform.python_version(),
        )


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A boundary that the measured step passed, see `xmem.meter.Phase`."""

    name: str
    seconds: float
    allocated_bytes: int
    peak_allocated_bytes: int


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of a case gave. Bytes as in `Result`; unknown is null.

    Attributes:
        rank: its number, from 0.
        static_bytes: allocated before a measured step.
        peak_allocated_bytes: the highest inside a measured step.
        peaks_bytes: that of each measured step.
        peak_process_bytes: the process's resident high-water mark, import and all.
        by_category: bytes by category at the instant of the peak.
        step_seconds: median wall time of the measured steps.
        calls: communications in one step, by kind.
        sent_bytes: bytes that this rank sends in one step, by kind of communication.
        communication_seconds: the part of the median step that it spent in communications, or
            waited for them.
        buffer_bytes: the most that buckets and packed copies took at once: what aggregation itself
            costs in memory.
    """

    rank: int
    static_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peaks_bytes: tuple[int, ...] = ()
    peak_process_bytes: int | None = None
    by_category: dict[str, int] | None = None
    step_seconds: float | None = None
    calls: dict[str, int] = {}
    sent_bytes: dict[str, int] = {}
    communication_seconds: float | None = None
    buffer_bytes: int | None = None

    @property
    def peak_above_static_bytes(self) -> int | None:
        """What a step adds to static bytes."""
        if self.peak_allocated_bytes is None or self.static_bytes is None:
            return None
        return self.peak_allocated_bytes - self.static_bytes


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one case gave. Bytes as in DESIGN; unknown is null.

    Of several ranks, bytes are those of the rank with the highest peak, which runs out of memory
    first; times are the slowest rank's, and losses are of the whole batch.

    Attributes:
        case: what ran.
        status: how it ended; every status stays in the table.
        reason: why it did not end well, with the remedy where there is one.
        device: the device that was used, "cpu" or "cuda"; the case may say "auto".
        losses: the loss of every step, warm-up included; null where it is not finite.
        step_seconds: median wall time of the measured steps.
        step_seconds_spread: slowest less fastest of them.
        static_bytes: allocated before a measured step.
        peak_allocated_bytes: the highest inside a measured step.
        peak_above_static_bytes: the difference of the two.
        peaks_bytes: `peak_allocated_bytes` of each measured step: equal, if all is well.
        peak_reserved_bytes: the highest that the framework's pool held.
        peak_process_bytes: the process's resident high-water mark, import and all.
        gpu_process_bytes: the driver's count for the process.
        allocation_count: allocations in one measured step.
        by_category: bytes by category at the instant of the peak.
        timeline: boundaries inside the last measured step.
        applied_to: what the technique was applied to, from its receipt.
        dtype: the half type that autocast chose.
        block_forward_calls: calls of block forwards in one step; recomputation doubles them.
        block_count: how many blocks the workload has.
        source: how bytes were counted.
        framework_version: the framework's own version.
        distribution: the backend's distribution and version.
        settings: the framework's flags that change memory or time.
        warnings: what was warned about during the run.
        machine: where it ran.
        started: when, ISO 8601 in UTC.
        seconds: wall time of the whole process.
        engine: what carried the bytes between ranks: "gloo", "nccl", "mpi"; null for one process.
        ranks: what each rank gave, in order; empty for one process.
    """

    case: Case
    status: Status
    reason: str = ""
    device: str | None = None
    losses: tuple[float | None, ...] = ()
    step_seconds: float | None = None
    step_seconds_spread: float | None = None
    static_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_above_static_bytes: int | None = None
    peaks_bytes: tuple[int, ...] = ()
    peak_reserved_bytes: int | None = None
    peak_process_bytes: int | None = None
    gpu_process_bytes: int | None = None
    allocation_count: int | None = None
    by_category: dict[str, int] | None = None
    timeline: tuple[TimelinePoint, ...] = ()
    applied_to: int | None = None
    dtype: str | None = None
    block_forward_calls: int | None = None
    block_count: int | None = None
    source: str | None = None
    framework_version: str | None = None
    distribution: str | None = None
    settings: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    machine: Machine | None = None
    started: str = ""
    seconds: float | None = None
    engine: str | None = None
    ranks: tuple[RankResult, ...] = ()
    schema_version: int = SCHEMA_VERSION


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a run."""

    results: tuple[Result, ...]
    created: str
    xmem_version: str
    machine: Machine
    schema_version: int = SCHEMA_VERSION


T = TypeVar("T", Result, Report)


def write_json(value: Result | Report, path: Path) -> None:
    """Write a result or report in one step; see `write_whole`."""
    write_whole(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n", path)


def write_whole(content: bytes, path: Path) -> None:
    """Write a file in one step: a reader sees all of it or what was there before.

    Raises:
        ReportError: it cannot be written, e.g. for want of space; nothing is left behind.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ReportError(
            f"cannot write {path}: {error.strerror}. Make room, or name another folder; what was"
            " written before is kept."
        ) from error


def read_json(path: Path, kind: type[T]) -> T:
    """Read a result or report.

    Raises:
        SchemaError: the file is no such thing, or of another version.
    """
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise SchemaError(f"{path} is not JSON: {error}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version not in READABLE_VERSIONS:
        readable = " and ".join(map(str, READABLE_VERSIONS))
        raise SchemaError(
            f"{path} has schema version {version!r}; this xmem reads {readable}. Run the"
            " comparison again, or read it with the xmem that wrote it."
        )
    _raise_version(raw)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"{path} is no {kind.__name__}: {error}") from error


def _raise_version(raw: dict[str, Any]) -> None:
    """Make an older file one of this version: what it does not say has a default."""
    results = raw.get("results")
    for record in (raw, *(results if isinstance(results, list) else ())):
        if isinstance(record, dict):
            record["schema_version"] = SCHEMA_VERSION


def schema() -> dict[str, Any]:
    """Return the JSON schema of a report."""
    generated = msgspec.json.schema(Report)
    generated["$id"] = f"https://xmem-train.example/schema/report-{SCHEMA_VERSION}.json"
    return generated
