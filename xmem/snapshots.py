"""The pool in a file: ours as JSON, bounded in size, or a pickle for PyTorch's memory_viz.

A snapshot is for people who look for what holds memory, and files of gigabytes do not open. So the
largest blocks and segments are written singly and all others are summed, which keeps every total
exact; of the history the peak stays exactly, and of each stretch its highest and lowest point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from xmem.containers import optimizers_in
from xmem.errors import CapabilityError, UsageError
from xmem.pooling import Block, Point, Segment
from xmem.report.model import Machine, write_whole
from xmem.snapshot_model import (
    BlockRecord,
    OtherSegments,
    PointRecord,
    Rest,
    SegmentRecord,
    Snapshot,
    StatsRecord,
    Value,
)
from xmem.snapshot_model import read_snapshot as read_snapshot
from xmem.snapshot_model import schema as schema
from xmem.snapshot_text import text as text

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.pooling import Pool

MOST_BLOCKS = 4096
MOST_SEGMENTS = 1024
MOST_POINTS = 2000

T = TypeVar("T")


def write(capability: Pool, path: str | Path, *, names: Mapping[int, str] | None = None) -> Path:
    """Write the pool to a file: `.json` is ours, `.pickle` opens in pytorch.org/memory_viz.

    Args:
        capability: the pool of a backend.
        path: where to; its folder must exist.
        names: who holds what lies at an address, see `claim`.

    Returns:
        The path.

    Raises:
        UsageError: another suffix, or no such folder.
        ReportError: the file cannot be written.
    """
    from xmem import memory_viz

    target = Path(path)
    kinds = {".json": write_snapshot, ".pickle": memory_viz.write}
    if target.suffix not in kinds:
        raise UsageError(
            f"a snapshot is a .json file (xmem's own) or a .pickle file (for"
            f" pytorch.org/memory_viz), and {target.name!r} is neither"
        )
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent} for the snapshot; make it first")
    kinds[target.suffix](capability, target, names=names)
    return target


def claim(backend: Backend, model: Any, optimizer: Any) -> Mapping[int, str]:
    """Give what model and optimizer own its category, and return its names for `write`."""
    for one in optimizers_in(optimizer) or [None]:
        for category, tensors in backend.measure.owned(model, one, None).items():
            backend.measure.tag(category, tensors)
    return backend.pool.parameter_names(model, optimizer)


def write_snapshot(
    capability: Pool, path: Path, *, names: Mapping[int, str] | None = None
) -> Snapshot:
    """Write the pool as JSON, in one step, and return what was written."""
    snapshot = take(capability, names=names)
    write_whole(msgspec.json.encode(snapshot) + b"\n", path)
    return snapshot


def take(
    capability: Pool,
    *,
    names: Mapping[int, str] | None = None,
    most_blocks: int = MOST_BLOCKS,
    most_segments: int = MOST_SEGMENTS,
    most_points: int = MOST_POINTS,
) -> Snapshot:
    """Return the pool as data, bounded; what it cannot tell is in `gaps`."""
    import xmem
    from xmem import api

    gaps = {name: str(reason) for name, reason in capability.gaps.items()}
    segments = asked("segments", capability.segments, gaps)
    history = asked("history", capability.history, gaps)
    stats = capability.stats()
    active = api._active if api._active is not None and api._active.pool is capability else None
    written, others = _bounded(segments, names or {}, most_blocks, most_segments)
    thinned = thin(history, most_points)
    peak = max(thinned, key=_allocated, default=None)
    known = {n: getattr(stats, n) for n in StatsRecord.__struct_fields__}
    return Snapshot(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        xmem_version=xmem.__version__,
        backend=active.name if active else None,
        device=active.device if active else None,
        machine=Machine.here(),
        stats=StatsRecord(**known),
        settings={name: plain(value) for name, value in capability.in_force().items()},
        by_category=_by_category(block for s in segments for block in s.blocks),
        block_count=sum(len(s.blocks) for s in segments),
        segment_count=len(segments),
        segments=written,
        other_segments=others,
        history=tuple(map(_point, thinned)),
        history_count=len(history),
        peak=None if peak is None else _point(peak),
        gaps=gaps,
    )


def asked(name: str, ask: Callable[[], Sequence[T]], gaps: dict[str, str]) -> Sequence[T]:
    """Ask a pool for a list; note the reason where it has none to give."""
    try:
        return ask()
    except CapabilityError as error:
        gaps.setdefault(name, str(error))
        return ()


def is_free(block: Block) -> bool:
    """Say whether no tensor holds a block."""
    return block.requested_bytes == 0


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most so many points: first, last, both peaks, and what each stretch spans."""
    if len(points) <= most:
        return list(points)
    order = range(len(points))
    kept = {0, len(points) - 1}
    kept.add(max(order, key=lambda n: points[n].allocated_bytes))
    kept.add(max(order, key=lambda n: points[n].reserved_bytes))
    stretches = max(0, (most - len(kept)) // 2)
    for number in range(stretches):
        inside = range(len(points) * number // stretches, len(points) * (number + 1) // stretches)
        kept.add(max(inside, key=lambda n: points[n].allocated_bytes))
        kept.add(min(inside, key=lambda n: points[n].allocated_bytes))
    return [points[n] for n in sorted(kept)]


def _bounded(
    segments: Sequence[Segment],
    names: Mapping[int, str],
    most_blocks: int,
    most_segments: int,
) -> tuple[tuple[SegmentRecord, ...], OtherSegments | None]:
    largest = sorted(segments, key=lambda s: -s.size_bytes)
    single, others = largest[:most_segments], largest[most_segments:]
    blocks = sorted((b for s in single for b in s.blocks), key=lambda b: -b.size_bytes)
    chosen = {block.address for block in blocks[:most_blocks]}
    written = tuple(
        _segment(segment, chosen, names) for segment in sorted(single, key=lambda s: s.address)
    )
    if not others:
        return written, None
    return written, OtherSegments(
        count=len(others),
        size_bytes=sum(s.size_bytes for s in others),
        rest=_rest([block for s in others for block in s.blocks]),
    )


def _segment(segment: Segment, chosen: set[int], names: Mapping[int, str]) -> SegmentRecord:
    rest = [b for b in segment.blocks if b.address not in chosen]
    return SegmentRecord(
        address=segment.address,
        size_bytes=segment.size_bytes,
        blocks=tuple(
            BlockRecord(**dataclasses.asdict(b), owner=names.get(b.address))
            for b in segment.blocks
            if b.address in chosen
        ),
        rest=_rest(rest) if rest else None,
    )


def _rest(blocks: Sequence[Block]) -> Rest:
    live = [b for b in blocks if not is_free(b)]
    free = [b for b in blocks if is_free(b)]
    return Rest(
        live_count=len(live),
        live_bytes=sum(b.size_bytes for b in live),
        requested_bytes=sum(b.requested_bytes for b in live),
        free_count=len(free),
        free_bytes=sum(b.size_bytes for b in free),
        by_category=_by_category(live),
    )


def _by_category(blocks: Iterable[Block]) -> dict[str, int]:
    found: dict[str, int] = {}
    for block in blocks:
        if not is_free(block):
            category = block.category or "unknown"
            found[category] = found.get(category, 0) + block.requested_bytes
    return found


def _allocated(point: Point) -> int:
    return point.allocated_bytes


def _point(point: Point) -> PointRecord:
    return PointRecord(**dataclasses.asdict(point))


def plain(value: Any) -> Value:
    """Return a setting as a file can hold it."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
