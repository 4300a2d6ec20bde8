"""The pool as a pickle that PyTorch's memory viewer (pytorch.org/memory_viz) opens.

The schema is that of `torch.cuda.memory._snapshot` (2.13), which `torch/cuda/_memory_viz.py` and
`torch/utils/viz/MemoryViz.js` read. Device 0 is the pool as it is: its segments, and its live
blocks in the order they were made. Device 1 is the pool's history, a pile as high as the allocated
bytes were. On CUDA PyTorch writes the file itself, with the lines that allocated (`Pool.dump`).

What the viewer asks for, and what happens otherwise: blocks fill their segment without a gap (the
next ones are drawn elsewhere); if any event has a category, one has "unknown" (it stops with a
TypeError); freed blocks lie in a segment of their time (likewise); and its own unpickler knows
dicts, lists, text, numbers and None only.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem import snapshots
from xmem.errors import MeasurementError, ReportError
from xmem.pooling import Block, Point, Segment
from xmem.report.model import write_whole

if TYPE_CHECKING:
    from xmem.pooling import Pool

MOST_BLOCKS = 4096
MOST_SEGMENTS = 2048
_LARGE_BYTES = 1 << 20  # PyTorch calls segments above it large
_PAGE_BYTES = 1 << 21


def write(capability: Pool, path: Path, *, names: Mapping[int, str] | None = None) -> None:
    """Write the pool for the viewer, in one step; the framework itself where it can."""
    dump = getattr(capability, "dump", None)
    if dump is not None:
        unfinished = path.with_name(f".{path.stem}.{os.getpid()}.tmp.pickle")
        try:
            if dump(unfinished):
                unfinished.replace(path)
                return
        except OSError as error:
            raise ReportError(
                f"cannot write {path}: {error.strerror or error}. Make room, or name another"
                " folder; what was written before is kept."
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)
    write_whole(pickle.dumps(as_viewed(capability, names=names), protocol=4), path)


def as_viewed(
    capability: Pool,
    *,
    names: Mapping[int, str] | None = None,
    most_blocks: int = MOST_BLOCKS,
    most_segments: int = MOST_SEGMENTS,
) -> dict[str, Any]:
    """Return the pool as the viewer's data, bounded; every total is exact."""
    gaps: dict[str, str] = {}
    segments = [_without_gaps(s) for s in snapshots.asked("segments", capability.segments, gaps)]
    history = snapshots.asked("history", capability.history, gaps)
    largest = sorted(segments, key=lambda s: -s.size_bytes)
    single, others = largest[:most_segments], largest[most_segments:]
    sizes = sorted((b.size_bytes for s in single for b in s.blocks), reverse=True)
    least_bytes = sizes[most_blocks - 1] if len(sizes) > most_blocks else 0
    drawn = [
        _segment(s.address, s.size_bytes, list(_merged(s.blocks, least_bytes, names or {})))
        for s in sorted(single, key=lambda s: s.address)
    ]
    if others:
        end = max(s.address + s.size_bytes for s in segments)
        blocks = list(_sum(b for s in others for b in s.blocks))
        size = sum(s.size_bytes for s in others)
        drawn.append(_segment(-(-end // _PAGE_BYTES) * _PAGE_BYTES, size, blocks))
    curve = list(_curve(snapshots.thin(history, snapshots.MOST_POINTS)))
    births = list(_births(drawn))
    for block in (block for segment in drawn for block in segment["blocks"]):
        del block["category"], block["birth"]
    settings = {name: snapshots.plain(v) for name, v in capability.in_force().items()}
    return {
        "segments": drawn,
        "device_traces": [births, curve],
        "allocator_settings": settings,
        "external_annotations": [],
    }


def _without_gaps(segment: Segment) -> Segment:
    """Return a segment whose blocks fill it: what belongs to no block counts as free."""
    blocks: list[Block] = []
    end = segment.address

    def fill(until: int) -> None:
        if until < end:
            raise MeasurementError(
                f"blocks of the pool overlap or leave their segment at address {until}: a bug in"
                " the backend's segments()"
            )
        if until > end:
            blocks.append(Block(end, until - end, 0, None, 0))

    for block in segment.blocks:
        fill(block.address)
        blocks.append(block)
        end = block.address + block.size_bytes
    fill(segment.address + segment.size_bytes)
    return Segment(segment.address, segment.size_bytes, tuple(blocks))


def _merged(
    blocks: Sequence[Block], least_bytes: int, names: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    """Yield blocks as they are; runs of those below a size as one live and one free block."""
    small: list[Block] = []
    for block in blocks:
        if block.size_bytes < least_bytes:
            small.append(block)
            continue
        yield from _sum(small)
        small = []
        yield _block(block, names.get(block.address))
    yield from _sum(small)


def _sum(blocks: Iterator[Block] | Sequence[Block]) -> Iterator[dict[str, Any]]:
    together = list(blocks)
    for group in (
        [b for b in together if not snapshots.is_free(b)],
        [b for b in together if snapshots.is_free(b)],
    ):
        if len(group) == 1:
            yield _block(group[0], None)
        elif group:
            categories = {b.category for b in group}
            yield _block(
                Block(
                    address=group[0].address,
                    size_bytes=sum(b.size_bytes for b in group),
                    requested_bytes=sum(b.requested_bytes for b in group),
                    category=categories.pop() if len(categories) == 1 else None,
                    birth=min(b.birth for b in group),
                ),
                f"{len(group)} small blocks together",
            )


def _block(block: Block, owner: str | None) -> dict[str, Any]:
    free = snapshots.is_free(block)
    return {
        "address": block.address,
        "size": block.size_bytes,
        "requested_size": block.requested_bytes,
        "state": "inactive" if free else "active_allocated",
        "frames": [] if free else _frames(owner, block.category),
        # Not PyTorch's: `as_viewed` takes both out again.
        "category": block.category or "unknown",
        "birth": block.birth,
    }


@functools.lru_cache(maxsize=MOST_BLOCKS)  # pickle writes an object once
def _frames(owner: str | None, category: str | None) -> list[dict[str, Any]]:
    """Tell owner and category where the viewer shows lines of code."""
    told = (("owner", owner), ("category", category or "unknown"))
    return [
        # flame graphs split their lines at semicolons
        {"filename": kind, "line": 0, "name": " ".join(text.replace(";", ",").split())}
        for kind, text in told
        if text is not None
    ]


def _segment(address: int, size_bytes: int, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    place = address
    for block in blocks:  # summed blocks lie behind each other
        block["address"] = place
        place += block["size"]
    live = [b for b in blocks if b["state"] == "active_allocated"]
    taken = sum(b["size"] for b in live)
    return {
        "device": 0,
        "address": address,
        "total_size": size_bytes,
        "allocated_size": taken,
        "active_size": taken,
        "requested_size": sum(b["requested_size"] for b in live),
        "stream": 0,
        "segment_type": "large" if size_bytes > _LARGE_BYTES else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _event(action: str, address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}


def _births(segments: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the live blocks as allocations, oldest first."""
    live = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    for block in sorted(live, key=lambda b: b["birth"]):
        event = _event("alloc", block["address"], block["requested_size"], block["frames"])
        yield {**event, "category": block["category"]}
    # Also what brings the category "unknown", without which the viewer stops.
    yield {**_event("snapshot", 0, 0, []), "category": "unknown"}


def _curve(points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Yield allocations and frees of a pile that is as high as the allocated bytes were."""
    if not points:
        return
    base = _PAGE_BYTES
    room = max(1, max(p.allocated_bytes for p in points))
    yield _event("segment_alloc", base, room, [])
    pile: list[tuple[int, int, list[dict[str, Any]]]] = []
    height = 0
    for point in points:
        name = f"{point.allocated_bytes} allocated, {point.reserved_bytes} reserved"
        frames = [{"filename": "history", "line": point.event, "name": name}]
        while height > point.allocated_bytes:
            address, size, above = pile.pop()
            height -= size
            for action in ("free_requested", "free_completed"):
                yield _event(action, address, size, above)
        if height < point.allocated_bytes:
            size = point.allocated_bytes - height
            pile.append((base + height, size, frames))
            yield _event("alloc", base + height, size, frames)
            height = point.allocated_bytes
    yield _event("segment_free", base, room, [])
