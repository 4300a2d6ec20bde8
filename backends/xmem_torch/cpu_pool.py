"""The pool of our c10 allocator (PyTorch 2.13, SetCPUAllocator): see native/pool.h.

`passthrough` asks PyTorch's own allocation function and only counts. `size_class` keeps freed
blocks and rounds requests up, so that they fit again. `bfc` cuts segments by best fit and joins
what is freed with its neighbours. Reserved bytes are whole segments as they came from the system,
with the 64 bytes before each tensor and with what is free in them.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from xmem.errors import CapabilityError, OffloadError, UsageError, XmemWarning
from xmem.offload import adaptive
from xmem.pooling import Block, OnOom, Point, PoolStats, Refusal, Segment, Setting
from xmem.process import process_bytes
from xmem.records import CATEGORIES
from xmem.sizes import format_size
from xmem_torch import native
from xmem_torch.cpu_settings import DEFAULTS, MIN_CACHED, ONLY_FOR, SETTINGS, STRATEGIES
from xmem_torch.late import Late
from xmem_torch.oom import OutOfMemoryError

_MORE_THAN_IS_KEPT = -2  # xmem_torch_preallocate
_LIMIT = 10  # xmem_torch_counters


class CpuPool:
    """Controls our allocator."""

    gaps: Mapping[str, str] = {"on_oom=spill": "tensors are in the host's memory already"}
    settings: Mapping[str, Setting] = SETTINGS

    def __init__(self, library: Any) -> None:
        self._library = library
        native.install(library)
        library.xmem_torch_set_graph_task(native.graph_task_probe())
        self._values = dict(DEFAULTS)
        self._on_oom: OnOom = "raise"
        self._adaptive = adaptive.Adaptive()
        self._late = Late()
        self._callbacks = {
            "trim_and_retry": native.ON_OOM(_collect),
            "offload": native.ON_OOM(self._make_room),
        }

    def in_force(self) -> dict[str, Any]:
        """Return the settings; they can be given to `configure` again."""
        return {**self._values, **self._adaptive.settings, "on_oom": self._on_oom}

    def configure(self, values: Mapping[str, Any], on_oom: OnOom | None) -> None:
        """Put settings in force; what is cached goes back to the system if any of them changes."""
        if on_oom == "spill":
            raise CapabilityError(
                'on_oom="spill" is for devices: on a CPU tensors are in the host\'s memory'
                ' already, and there is nowhere to spill to. Use on_oom="offload".'
            )
        moves = (on_oom or self._on_oom) == "offload"
        self._late.check(on=moves)
        prepared = self._adaptive.prepare(values, on=moves)
        values = {name: values[name] for name in values if name not in adaptive.SETTINGS}
        merged = {**self._values, **values}
        for name, strategies in ONLY_FOR.items():
            new = values.get(name, self._values[name])
            without_effect = merged["strategy"] not in strategies
            # All settings can be put back as they were, those without effect too.
            if without_effect and new not in (self._values[name], DEFAULTS[name]):
                raise UsageError(
                    f"{name}={values[name]!r} has no effect with strategy="
                    f"{merged['strategy']!r}; it is for {' and '.join(strategies)}"
                )
        if merged != self._values:
            self._values = merged
            self._apply()
        self._adaptive.put_in_force(**prepared)
        if self._adaptive.away is None:
            self._late.end()
        else:
            self._late.begin(self._adaptive.away.depot)
        if on_oom is not None:
            self._answer_by(on_oom)

    def _answer_by(self, on_oom: OnOom) -> None:
        self._on_oom = on_oom
        callback = self._callbacks.get(on_oom)
        self._library.xmem_torch_set_note(b"")
        self._library.xmem_torch_set_on_oom(
            None if callback is None else ctypes.cast(callback, ctypes.c_void_p)
        )
        if callback is not None:
            # After that Python can no longer be called, and threads still free and allocate.
            atexit.unregister(self._library.xmem_torch_set_on_oom)
            atexit.register(self._library.xmem_torch_set_on_oom, None)

    def _make_room(self, requested: int) -> int:
        counters = self._counters()
        limit = native.size_or_none(counters[_LIMIT])
        freed = self._late.make_room(*adaptive.wanted_bytes(requested, counters[0], limit))
        if not freed:
            self._library.xmem_torch_set_note(self._adaptive.note().encode())
        return freed

    @property
    def failure(self) -> OffloadError | None:
        """Why `on_oom="offload"` moves nothing any more, if so."""
        return self._adaptive.failure

    def _min_cached(self) -> int:
        chosen = self._values["min_cached"]
        return int(MIN_CACHED[self._values["strategy"]] if chosen is None else chosen)

    def _apply(self) -> None:
        values = self._values
        self._library.xmem_torch_configure(
            STRATEGIES.index(values["strategy"]),
            values["segment_size"],
            round((values["reserve_ratio"] or 0) * 1000),
            self._min_cached(),
            native.number(values["cache_limit"]),
            values["divisions"],
            round(values["slack"] * 1000),
            int(values["huge_pages"]),
        )

    def _counters(self) -> list[int]:
        values = (ctypes.c_int64 * native.COUNTERS)()
        self._library.xmem_torch_counters(values)
        return list(values)

    def stats(self) -> PoolStats:
        """Read the allocator."""
        if self._library.xmem_torch_displaced():
            warnings.warn(
                "another allocator has taken the place of xmem's (c10::SetCPUAllocator): what is"
                " made since is not counted. Call xmem.use() after what sets it",
                XmemWarning,
                stacklevel=4,
            )
        (allocated, peak, reserved, peak_reserved, allocations, refused, frees, segments, _, free,
         limit, retries) = self._counters()  # fmt: skip
        return PoolStats(
            allocated_bytes=allocated,
            peak_allocated_bytes=peak,
            reserved_bytes=reserved,
            peak_reserved_bytes=peak_reserved,
            process_bytes=process_bytes(),
            segment_count=segments,
            allocation_count=allocations,
            free_count=frees,
            largest_free_bytes=free,
            out_of_memory_count=refused,
            limit_bytes=native.size_or_none(limit),
            retry_count=retries,
            offloaded_bytes=self._adaptive.moved_bytes,
        )

    def reset_peak(self) -> None:
        """Restart peaks and history."""
        self._library.xmem_torch_reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse what would pass it, exactly; cached segments beyond it go back at once."""
        self._library.xmem_torch_set_limit(native.number(limit_bytes))

    def trim(self) -> int:
        """Give back the segments that are free as a whole."""
        return int(self._library.xmem_torch_trim())

    def preallocate(self, size_bytes: int) -> int:
        """Map a segment; its pages become resident as they are first written to."""
        if self._values["strategy"] == "passthrough":
            raise UsageError(
                'strategy="passthrough" holds no free memory; first call'
                ' xmem.pool.configure(strategy="bfc")'
            )
        if size_bytes < self._min_cached():
            raise UsageError(
                f"{size_bytes} bytes are less than min_cached ({self._min_cached()}): requests of"
                " that size pass through"
            )
        stats = self.stats()
        if (limit := stats.limit_bytes) is not None and stats.allocated_bytes + size_bytes > limit:
            raise UsageError(
                f"the limit is {format_size(limit)} and {format_size(stats.allocated_bytes)} are"
                f" allocated, so {format_size(size_bytes)} more could never be used"
            )
        taken = int(self._library.xmem_torch_preallocate(native.number(size_bytes)))
        if taken == _MORE_THAN_IS_KEPT:
            raise UsageError(
                f"cache_limit is {format_size(self._values['cache_limit'])}, so a segment for"
                f" {format_size(size_bytes)} would not be kept; raise it with"
                " xmem.pool.configure(cache_limit=...)"
            )
        if taken < 0:
            raise OutOfMemoryError(
                f"the system has no {format_size(size_bytes)} left in one piece to preallocate"
            )
        return taken

    def segments(self) -> Sequence[Segment]:
        """Walk all segments; a request that passed through is a segment of its own."""
        rows = _read(self._library.xmem_torch_blocks, native.Row, self.stats().segment_count or 0)
        found = [
            Segment(address, sum(b.size_bytes for b in blocks), blocks)
            for address, group in groupby(rows, attrgetter("segment"))
            for blocks in [tuple(_block(row) for row in group)]
        ]
        return sorted(found, key=attrgetter("address"))

    def history(self) -> Sequence[Point]:
        """Read the highest moment of each stretch of allocations and frees."""
        points = (native.Point * native.HISTORY)()
        count = self._library.xmem_torch_history(points)
        return [Point(p.event, p.allocated, p.reserved) for p in points[:count]]

    def refusal(self) -> Refusal | None:
        """Read what was written down when it happened."""
        found = native.Refusal()
        if not self._library.xmem_torch_refusal(ctypes.byref(found)):
            return None
        return Refusal(
            requested_bytes=found.requested,
            allocated_bytes=found.allocated,
            reserved_bytes=found.reserved,
            limit_bytes=native.size_or_none(found.limit),
            largest_free_bytes=found.largest_free,
            birth=found.birth,
            by_category=dict(zip(CATEGORIES, found.by_category, strict=True)),
            blocks=tuple(_block(row) for row in found.largest[: found.count]),
            in_backward=None if found.in_backward < 0 else bool(found.in_backward),
        )

    def recover(self) -> None:
        """Give cached segments back."""
        self.trim()


def _collect(_: int) -> int:
    gc.collect()
    return 0


def _block(row: Any) -> Block:
    live = row.category >= 0
    category = CATEGORIES[row.category] if live else None
    return Block(row.address, row.size, row.bytes, category, row.birth)


def _read(function: Any, record: Any, guess: int) -> Any:
    """Call a function that writes rows and returns how many there are, until they fit."""
    capacity = guess + 64
    while True:
        rows = (record * capacity)()
        count = function(rows, capacity)
        if count <= capacity:
            return rows[:count]
        capacity = count + count // 8
