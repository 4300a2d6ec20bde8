"""The file that a monitor writes: one JSON object a line, and how it is read again.

A run begins with a line of its own; a file may hold several. Whatever was cut off by a crash or a
full disk costs its line and nothing else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from xmem.errors import ReportError, SchemaError
from xmem.report.model import Machine

SCHEMA_VERSION = 1
Value = bool | int | float | str | None


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """The beginning of a run.

    Attributes:
        time: when, in seconds since 1970.
        xmem_version: which xmem wrote it.
        backend: what was monitored.
        device: "cpu" or "cuda".
        framework_version: the framework's own version.
        source: how bytes were counted.
        machine: where.
        every: a line for so many steps.
        first_step: the number of the first step.
        schema_version: of this file.
    """

    time: float
    xmem_version: str
    backend: str
    device: str
    framework_version: str
    source: str
    machine: Machine
    every: int
    first_step: int
    schema_version: int = SCHEMA_VERSION


class StepRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="step"
):
    """The pool after a step. Bytes as in DESIGN; unknown is null or absent.

    Attributes:
        step: its number.
        time: when, in seconds since 1970.
        step_seconds: wall time a step since the line before.
        allocated_bytes: requested by live tensors now.
        peak_allocated_bytes: the highest since the line before; unknown inside `xmem.measure`,
            which has the one peak to itself.
        reserved_bytes: held by the framework's pool.
        process_bytes: resident now, of the whole process on the host.
        fragmentation: the share of what is reserved that no tensor asked for.
        out_of_memory_count: requests refused since `xmem.use`.
        owned_bytes: what model and optimizer own, by category; on the lines 1, 2, 4, 8...
        values: what was attached; null also where a number is not finite, or has thousands of
            digits.
    """

    step: int
    time: float
    step_seconds: float
    allocated_bytes: int
    peak_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    fragmentation: float | None = None
    out_of_memory_count: int | None = None
    owned_bytes: dict[str, int] | None = None
    values: dict[str, Value] = {}


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The end of a run; one that is missing was killed.

    Attributes:
        step: the last step.
        time: when, in seconds since 1970.
        error: the type of what ended it, or "".
    """

    step: int
    time: float
    error: str = ""


Record = RunRecord | StepRecord | EndRecord
_decode = msgspec.json.Decoder(Record).decode


def schema() -> dict[str, Any]:
    """Return the JSON schema of a line."""
    generated = msgspec.json.schema(Record)
    generated["$id"] = f"https://xmem-train.example/schema/monitor-{SCHEMA_VERSION}.json"
    return generated


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a file; `begin` is None where its first line is missing."""

    begin: RunRecord | None
    steps: tuple[StepRecord, ...]
    end: EndRecord | None


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """A file: its runs, and how many lines could not be read."""

    runs: tuple[Run, ...]
    cut_lines: int

    @property
    def last_step(self) -> int | None:
        """The number of the last step, or None."""
        return next((run.steps[-1].step for run in reversed(self.runs) if run.steps), None)


def parse_line(line: bytes) -> Record | None:
    """Return what a line says; None where it is cut off or something else."""
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_log(path: str | Path) -> Log:
    """Read a monitor's file; cut lines are counted, not an error.

    Raises:
        ReportError: there is no such file, or it cannot be read.
        SchemaError: it is no monitor's file, or of another version.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    return parse_log(path, content)


def parse_log(path: str | Path, content: bytes) -> Log:
    """Return what a file holds that has been read already; see `read_log`."""
    lines = content.splitlines()
    records = [parse_line(line) for line in lines if line.strip()]
    _check(path, lines, records)
    return Log(
        runs=tuple(_runs(r for r in records if r is not None)), cut_lines=records.count(None)
    )


def _check(path: str | Path, lines: Sequence[bytes], records: Sequence[Record | None]) -> None:
    if lines and not any(isinstance(r, RunRecord) for r in records):
        raise SchemaError(f"{path} has no line that begins a run, so it is no file of xmem.Monitor")
    versions = {r.schema_version for r in records if isinstance(r, RunRecord)}
    if not versions <= {SCHEMA_VERSION}:
        raise SchemaError(
            f"{path} has schema version {max(versions)}; this xmem reads {SCHEMA_VERSION}. Read it"
            " with the xmem that wrote it, or name another file."
        )


def _runs(records: Iterable[Record]) -> list[Run]:
    runs: list[Run] = []
    begin: RunRecord | None = None
    steps: list[StepRecord] = []
    end: EndRecord | None = None

    def close() -> None:
        if begin is not None or steps:
            runs.append(Run(begin=begin, steps=tuple(steps), end=end))

    for record in records:
        if isinstance(record, RunRecord):
            close()
            begin, steps, end = record, [], None
        elif isinstance(record, StepRecord):
            steps.append(record)
        else:
            end = record
    close()
    return runs


_TAIL_BYTES = 1 << 20


def last_step(path: str | Path) -> int | None:
    """Return the number of the last step in a file that may be long; None where there is none.

    A pipe or a device has none: it is for writing, and reading might never end.

    Raises:
        ReportError: it cannot be read.
        SchemaError: it is no monitor's file, or of another version.
    """
    try:
        mode = Path(path).stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return None
        with Path(path).open("rb") as file:
            first = file.readline(_TAIL_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    if not size:
        return None
    _check(path, [first], [parse_line(first)])
    found = (parse_line(line) for line in reversed(lines))
    return next((record.step for record in found if isinstance(record, StepRecord)), None)
