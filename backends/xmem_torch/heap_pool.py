"""Without a C++ compiler: glibc's own allocator, which PyTorch uses, told to keep what is freed.

`mallopt` with M_MMAP_MAX=0 and a high M_TRIM_THRESHOLD: large tensors then come from the heap,
whose pages stay, instead of being mapped and faulted in anew each time. Nothing is counted.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping, Sequence
from typing import Any

from xmem.errors import CapabilityError, MeasurementError
from xmem.pooling import OnOom, Point, PoolStats, Refusal, Segment, Setting
from xmem.process import process_bytes
from xmem_torch import parsing
from xmem_torch.sources import live_tensor_bytes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEEDS = "xmem's own allocator {what}; install g++ (or name a compiler in CXX) so that it compiles"
_DEFAULT = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 128 * 1024}
_KEEPING = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1}

STRATEGIES = ("passthrough", "mallopt")


class HeapPool:
    """Controls glibc's heap."""

    gaps: Mapping[str, str] = {
        "limit": _NEEDS.format(what="is what can refuse a request"),
        "reserved": _NEEDS.format(what="is what counts reserved bytes"),
        "peak": "the profiler knows peaks inside xmem.measure only",
        "segments": _NEEDS.format(what="knows its segments"),
        "history": _NEEDS.format(what="keeps a history"),
        "refusal": _NEEDS.format(what="writes down what it refuses"),
        "preallocate": _NEEDS.format(what="can hold free memory"),
        "on_oom=trim_and_retry": _NEEDS.format(what="can try again"),
        "on_oom=offload": _NEEDS.format(what="knows when memory runs out"),
        "on_oom=spill": "tensors are in the host's memory already",
    }

    def __init__(self) -> None:
        self._strategy = "passthrough"
        self.settings: Mapping[str, Setting] = {
            "strategy": Setting(
                "strategy",
                parsing.one_of("strategy", STRATEGIES),
                "passthrough, or mallopt: glibc keeps what is freed",
            )
        }

    def in_force(self) -> dict[str, Any]:
        """Return the strategy."""
        return {"strategy": self._strategy, "on_oom": "raise"}

    def configure(self, values: Mapping[str, Any], on_oom: OnOom | None) -> None:
        """Tell glibc. After mallopt, what its heap has grown by can serve again, trimmed or not."""
        if on_oom not in (None, "raise"):
            raise CapabilityError(
                f'on_oom="{on_oom}" is not to be had: {self.gaps[f"on_oom={on_oom}"]}'
            )
        strategy = values.get("strategy", self._strategy)
        if strategy != self._strategy:
            keep_freed() if strategy == "mallopt" else _set(_DEFAULT)
            self._strategy = strategy

    def stats(self) -> PoolStats:
        """Add up the live tensors."""
        return PoolStats(
            allocated_bytes=live_tensor_bytes(),
            peak_allocated_bytes=None,
            reserved_bytes=None,
            peak_reserved_bytes=None,
            process_bytes=process_bytes(),
            segment_count=None,
            allocation_count=None,
            free_count=None,
            largest_free_bytes=None,
            out_of_memory_count=None,
            limit_bytes=None,
        )

    def reset_peak(self) -> None:
        """Nothing is counted."""

    def set_limit(self, limit_bytes: int | None) -> None:
        """Cannot."""
        if limit_bytes is not None:
            raise MeasurementError(self.gaps["limit"])

    def trim(self) -> int:
        """Have glibc give back what it can; returns by how much the process shrank."""
        gc.collect()
        before = process_bytes() or 0
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if give_back is not None:
            give_back(0)
        return max(0, before - (process_bytes() or 0))

    def preallocate(self, size_bytes: int) -> int:
        """Cannot."""
        raise CapabilityError(self.gaps["preallocate"])

    def segments(self) -> Sequence[Segment]:
        """Cannot."""
        raise CapabilityError(self.gaps["segments"])

    def history(self) -> Sequence[Point]:
        """Cannot."""
        raise CapabilityError(self.gaps["history"])

    def refusal(self) -> Refusal | None:
        """Nothing is written down."""
        return None

    def recover(self) -> None:
        """Trim."""
        self.trim()


def keep_freed() -> None:
    """Have glibc keep what is freed, from now on.

    Raises:
        CapabilityError: this system's C library has no `mallopt`.
    """
    _set(_KEEPING)


def _set(options: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        raise CapabilityError("this system's C library has no mallopt (glibc has)")
    for option, value in options.items():
        if not mallopt(option, value):
            raise CapabilityError(f"mallopt({option}, {value}) was refused by the C library")
