"""A snapshot of a pool for people: what is allocated, by whom, and what lies free in between."""

from __future__ import annotations

from collections.abc import Sequence

from xmem.report.tables import Cell, Table
from xmem.report.text import plain_table
from xmem.sizes import format_size
from xmem.snapshot_model import BlockRecord, SegmentRecord, Snapshot

_LISTED = 20


def text(snapshot: Snapshot) -> str:
    """Return a snapshot as plain text."""
    parts = (f"{table.title}\n{plain_table(table)}" for table in tables(snapshot))
    return "\n\n".join(parts) + "\n"


def tables(snapshot: Snapshot) -> list[Table]:
    """Return a snapshot as tables: the pool, its categories, the largest blocks, free memory."""
    made = (_pool_table, _categories_table, _blocks_table, _segments_table, _gaps_table)
    return [table for table in (make(snapshot) for make in made) if table.rows]


def _table(
    title: str, columns: tuple[str, ...], numeric: int, rows: Sequence[tuple[str, ...]]
) -> Table:
    return Table(title, columns, numeric, tuple(tuple(map(Cell, row)) for row in rows))


def _pool_table(snapshot: Snapshot) -> Table:
    stats = snapshot.stats
    figures = [
        (name.removesuffix("_bytes").replace("_", " "), format_size(getattr(stats, name)))
        for name in stats.__struct_fields__
        if name.endswith("_bytes")
    ]
    counts = [
        (name.replace("_", " "), str(getattr(stats, name)))
        for name in stats.__struct_fields__
        if name.endswith("_count") and getattr(stats, name) is not None
    ]
    if stats.fragmentation is not None:
        figures.append(("fragmentation", f"{stats.fragmentation:.1%}"))
    settings = [(f"setting {name}", str(value)) for name, value in snapshot.settings.items()]
    where = f" of {snapshot.backend} on {snapshot.device}" if snapshot.backend else ""
    title = f"Pool{where}, {snapshot.created}"
    return _table(title, ("What", "Value"), 1, [*figures, *counts, *settings])


def _categories_table(snapshot: Snapshot) -> Table:
    total = sum(snapshot.by_category.values()) or 1
    ordered = sorted(snapshot.by_category.items(), key=lambda item: -item[1])
    rows = [(name, format_size(size), f"{size / total:.0%}") for name, size in ordered]
    return _table("Live bytes by category", ("Category", "Requested", "Share"), 2, rows)


def _blocks_table(snapshot: Snapshot) -> Table:
    rows = [
        (block.category or "unknown", block.owner or "-", format_size(block.requested_bytes))
        for block in _largest_live(snapshot)
    ]
    return _table("Largest live blocks", ("Category", "Owner", "Requested"), 1, rows)


def _segments_table(snapshot: Snapshot) -> Table:
    ordered = sorted(snapshot.segments, key=lambda s: -_free_bytes(s))[:_LISTED]
    rows = [
        (f"{s.address:#x}", format_size(s.size_bytes), format_size(f), f"{f / s.size_bytes:.0%}")
        for s, f in ((s, _free_bytes(s)) for s in ordered)
        if f
    ]
    return _table("Segments with most free memory", ("Address", "Size", "Free", "Share"), 3, rows)


def _gaps_table(snapshot: Snapshot) -> Table:
    rows = list(snapshot.gaps.items())
    return _table("What this pool cannot tell", ("What", "Why"), 0, rows)


def _largest_live(snapshot: Snapshot) -> list[BlockRecord]:
    found = [b for segment in snapshot.segments for b in segment.blocks if b.requested_bytes]
    return sorted(found, key=lambda b: -b.requested_bytes)[:_LISTED]


def _free_bytes(segment: SegmentRecord) -> int:
    single = sum(b.size_bytes for b in segment.blocks if not b.requested_bytes)
    return single + (segment.rest.free_bytes if segment.rest else 0)
