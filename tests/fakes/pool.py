"""A pool without a framework: what its segments, history and counters are is up to the test."""

import random
from dataclasses import dataclass, field

from xmem.errors import CapabilityError
from xmem.pooling import Block, Point, PoolStats, Segment

CATEGORIES = ("parameter", "gradient", "optimizer", "activation", "temporary")


def make_segments(*, blocks, segments=1, seed=0, base=1 << 44):
    """Return segments that are cut into live and free blocks of drawn sizes, without a gap."""
    draw = random.Random(seed)
    found = []
    address = base
    birth = 0
    for number in range(segments):
        begin = address
        cut = []
        for _ in range(blocks // segments + (number < blocks % segments)):
            size = 64 * draw.randint(1, 1 << draw.randint(1, 12))
            birth += 1
            live = draw.random() < 0.6
            asked = size - draw.randint(0, 63) if live else 0
            category = draw.choice(CATEGORIES) if live else None
            cut.append(Block(address, size, asked, category, birth if live else 0))
            address += size
        found.append(Segment(begin, address - begin, tuple(cut)))
        address += 1 << 21
    return tuple(found)


def make_history(count, *, seed=0):
    """Return a walk with one highest point, and another that has most reserved."""
    draw = random.Random(seed)
    allocated = 1 << 30
    points = []
    for event in range(count):
        allocated = max(0, allocated + draw.randint(-(1 << 20), 1 << 20))
        points.append(Point(event, allocated, allocated + (1 << 22)))
    top = count // 3
    points[top] = Point(top, (1 << 40) + 1, (1 << 40) + (1 << 22))
    most = count // 2
    if most != top:
        points[most] = Point(most, points[most].allocated_bytes, 1 << 41)
    return tuple(points)


@dataclass
class FakePool:
    """A pool of given segments and points."""

    segments_given: tuple = ()
    history_given: tuple = ()
    gaps: dict = field(default_factory=dict)
    settings_given: dict = field(default_factory=lambda: {"strategy": "bfc", "on_oom": "raise"})

    def segments(self):
        if "segments" in self.gaps:
            raise CapabilityError(self.gaps["segments"])
        return self.segments_given

    def history(self):
        if "history" in self.gaps:
            raise CapabilityError(self.gaps["history"])
        return self.history_given

    def in_force(self):
        return self.settings_given

    def stats(self):
        blocks = [b for s in self.segments_given for b in s.blocks]
        reserved = sum(s.size_bytes for s in self.segments_given)
        return PoolStats(
            allocated_bytes=sum(b.requested_bytes for b in blocks),
            peak_allocated_bytes=max((p.allocated_bytes for p in self.history_given), default=None),
            reserved_bytes=reserved,
            peak_reserved_bytes=None,
            process_bytes=None,
            segment_count=len(self.segments_given),
            allocation_count=len(blocks),
            free_count=0,
            largest_free_bytes=max((b.size_bytes for b in blocks if not b.birth), default=0),
            out_of_memory_count=0,
            limit_bytes=None,
        )


def check_viewers_way_back(data):
    """Undo the events of each device as MemoryViz.js does: it stops at blocks outside segments."""
    for device, events in enumerate(data["device_traces"]):
        held = [s for s in data["segments"] if s["device"] == device]
        segments = {s["address"]: s["total_size"] for s in held}
        blocks = {
            b["address"]: b["size"]
            for s in held
            for b in s["blocks"]
            if b["state"] == "active_allocated"
        }
        for event in reversed([None, *events]):
            for address in blocks:
                assert any(a <= address < a + size for a, size in segments.items()), address
            if event is None:
                continue
            action, address, size = event["action"], event["addr"], event["size"]
            if action == "alloc":
                blocks.pop(address, None)
            elif action == "free_completed":
                blocks[address] = size
            elif action == "segment_free":
                segments[address] = size
            elif action == "segment_alloc":
                segments.pop(address, None)
        assert not blocks
