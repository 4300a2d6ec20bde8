"""What a snapshot of a pool is as data: the structs, their JSON schema, and how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from xmem.errors import ReportError, SchemaError
from xmem.report.model import Machine

SCHEMA_VERSION = 1
Value = bool | int | float | str | None


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A block that is written singly; free where nothing was requested.

    Attributes:
        address: where it begins.
        size_bytes: what it takes in its segment.
        requested_bytes: what its tensor asked for.
        category: of a live block, where the backend can tell.
        birth: the number of the moment it was made; see `xmem.pooling.Block`.
        owner: who holds it, where names were given.
    """

    address: int
    size_bytes: int
    requested_bytes: int = 0
    category: str | None = None
    birth: int = 0
    owner: str | None = None


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that are not written singly, summed.

    Attributes:
        live_count: how many hold a tensor.
        live_bytes: what those take.
        requested_bytes: what their tensors asked for.
        free_count: how many are free.
        free_bytes: what the free ones take.
        by_category: requested bytes by category, "unknown" included.
    """

    live_count: int
    live_bytes: int
    requested_bytes: int
    free_count: int
    free_bytes: int
    by_category: dict[str, int]


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A segment: its largest blocks, and the sum of the others."""

    address: int
    size_bytes: int
    blocks: tuple[BlockRecord, ...]
    rest: Rest | None = None


class OtherSegments(msgspec.Struct, frozen=True, kw_only=True):
    """Segments that are not written singly, summed with all their blocks."""

    count: int
    size_bytes: int
    rest: Rest


class PointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at a moment; see `xmem.pooling.Point`."""

    event: int
    allocated_bytes: int
    reserved_bytes: int


class StatsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The counters; see `xmem.pooling.PoolStats`."""

    allocated_bytes: int
    peak_allocated_bytes: int | None
    reserved_bytes: int | None
    peak_reserved_bytes: int | None
    process_bytes: int | None
    segment_count: int | None
    allocation_count: int | None
    free_count: int | None
    largest_free_bytes: int | None
    out_of_memory_count: int | None
    limit_bytes: int | None
    fragmentation: float | None
    retry_count: int | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at one instant.

    Attributes:
        created: when, ISO 8601 in UTC.
        xmem_version: which xmem wrote it.
        backend: whose pool, where it is the active one's.
        device: "cpu" or "cuda", likewise.
        machine: where.
        stats: the counters.
        settings: the settings in force.
        by_category: requested bytes of all live blocks by category.
        block_count: all blocks, written singly or not.
        segment_count: all segments, likewise.
        segments: the largest, by address.
        other_segments: all others.
        history: down-sampled, in order; the peak is in it.
        history_count: how many points the backend gave.
        peak: the moment of the highest allocated bytes in the history.
        gaps: what this pool cannot tell, with the reason.
    """

    created: str
    xmem_version: str
    backend: str | None
    device: str | None
    machine: Machine
    stats: StatsRecord
    settings: dict[str, Value]
    by_category: dict[str, int]
    block_count: int
    segment_count: int
    segments: tuple[SegmentRecord, ...]
    other_segments: OtherSegments | None
    history: tuple[PointRecord, ...]
    history_count: int
    peak: PointRecord | None
    gaps: dict[str, str]
    schema: Literal["xmem pool snapshot"] = "xmem pool snapshot"
    schema_version: int = SCHEMA_VERSION


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot that `write_snapshot` wrote.

    Raises:
        ReportError: there is no such file, or it cannot be read.
        SchemaError: the file is no such thing, or of another version.
    """
    try:
        raw = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("schema") != "xmem pool snapshot":
        raise SchemaError(f"{path} is no snapshot of a pool; xmem.pool.snapshot(path) writes one")
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise SchemaError(
            f"{path} has schema version {raw.get('schema_version')!r}; this xmem reads"
            f" {SCHEMA_VERSION}. Take it again, or read it with the xmem that wrote it."
        )
    try:
        return msgspec.convert(raw, Snapshot)
    except msgspec.ValidationError as error:
        raise SchemaError(f"{path} is no snapshot of a pool: {error}") from error


def schema() -> dict[str, Any]:
    """Return the JSON schema of a snapshot."""
    generated = msgspec.json.schema(Snapshot)
    generated["$id"] = f"https://xmem-train.example/schema/pool-snapshot-{SCHEMA_VERSION}.json"
    return generated
