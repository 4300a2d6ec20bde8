"""Where this backend's byte counts come from: our allocator, the profiler, or CUDA's counters.

All three are exact. Only the allocator knows categories and limits on a CPU; the profiler stands
in where there is no C++ compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from xmem.errors import MeasurementError
from xmem.protocols import CATEGORIES, Category, Counters
from xmem_torch import native
from xmem_torch.living import live_tensors

_NO_COMPILER = (
    "PyTorch's profiler counts bytes and cannot {what}. Install g++ (or name a compiler in the"
    " environment variable CXX), so that xmem's own allocator can be compiled."
)


class Source(Protocol):
    """One way of counting."""

    name: str

    def start(self) -> None:
        """Begin a measured block."""

    def stop(self) -> None:
        """End it."""

    def counters(self) -> Counters:
        """Read the counters."""

    def reset_peak(self) -> None:
        """Restart the peaks."""

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse allocations beyond it."""

    def tag(self, category: Category, addresses: Sequence[int]) -> tuple[int, Sequence[bool]]:
        """Tag blocks by address; returns the bytes, and for each address whether it is ours."""

    def tag_untagged(self, category: Category, *, since_reset: bool) -> None:
        """Tag what nobody has claimed."""

    def peak_by_category(self) -> dict[Category, int] | None:
        """Return the breakdown at the peak."""


class AllocatorSource:
    """Our c10 allocator (SetCPUAllocator, PyTorch 2.13), installed for the life of the process."""

    name = "allocator"

    def __init__(self, compiler: str) -> None:
        self._library = native.load(compiler)
        native.install(self._library)

    def start(self) -> None:
        """Nothing to begin: it counts all the time."""

    def stop(self) -> None:
        """Nothing to end."""

    def counters(self) -> Counters:
        """Read the allocator."""
        values = (ctypes.c_int64 * native.COUNTERS)()
        self._library.xmem_torch_counters(values)
        return Counters(*values[:6])

    def reset_peak(self) -> None:
        """Restart both peaks and the breakdown."""
        self._library.xmem_torch_reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refused requests raise torch.OutOfMemoryError."""
        self._library.xmem_torch_set_limit(native.number(limit_bytes))

    def tag(self, category: Category, addresses: Sequence[int]) -> tuple[int, Sequence[bool]]:
        """Walk the live blocks once."""
        count = len(addresses)
        found = (ctypes.c_uint8 * max(count, 1))()
        wanted = (ctypes.c_uint64 * max(count, 1))(*addresses)
        size = self._library.xmem_torch_tag(wanted, count, CATEGORIES.index(category), found)
        return size, [bool(f) for f in found[:count]]

    def tag_untagged(self, category: Category, *, since_reset: bool) -> None:
        """Walk the live blocks once."""
        self._library.xmem_torch_tag_untagged(CATEGORIES.index(category), int(since_reset))

    def peak_by_category(self) -> dict[Category, int] | None:
        """Read the breakdown kept at the last peak."""
        values = (ctypes.c_int64 * len(CATEGORIES))()
        self._library.xmem_torch_peak_by_category(values)
        return dict(zip(CATEGORIES, values, strict=True))


class ProfilerSource:
    """torch.profiler's memory events between two points, on top of the live tensors at the first.

    Exact for the step, as the events come from the default allocator itself; what is live at the
    beginning is counted by walking Python's objects, so a tensor that only C++ holds is missed.
    Peaks and numbers of allocations are known inside a measured block only.
    """

    name = "profiler"

    def __init__(self) -> None:
        self._profiler: Any = None
        self._measuring = False
        self._current = self._peak = 0
        self._allocations = 0

    def start(self) -> None:
        """Count the live tensors; the profiler starts when the counters are first read."""
        self._current = self._peak = live_tensor_bytes()
        self._measuring = True

    def _resume(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profiler.__enter__()

    def stop(self) -> None:
        """Stop the profiler."""
        self._measuring = False
        if self._profiler is not None:
            self._fold()

    def _fold(self) -> None:
        self._profiler.__exit__(None, None, None)
        events = self._profiler.profiler.kineto_results.events()
        self._profiler = None
        memory = [e for e in events if e.name() == "[memory]"]
        for event in sorted(memory, key=lambda e: e.start_ns()):
            self._current += event.nbytes()
            self._allocations += event.nbytes() > 0
            self._peak = max(self._peak, self._current)

    def counters(self) -> Counters:
        """Stop the profiler, add up its events, and let it go on."""
        if not self._measuring:
            return Counters(live_tensor_bytes(), None, None, None, None, None)
        if self._profiler is not None:
            self._fold()
        found = Counters(self._current, self._peak, None, None, self._allocations, None)
        self._resume()
        return found

    def reset_peak(self) -> None:
        """Restart the peak."""
        if self._profiler is not None:
            self._fold()
            self._resume()
        self._peak = self._current

    def set_limit(self, limit_bytes: int | None) -> None:
        """Cannot."""
        if limit_bytes is not None:
            raise MeasurementError(_NO_COMPILER.format(what="enforce a limit"))

    def tag(self, category: Category, addresses: Sequence[int]) -> tuple[int, Sequence[bool]]:
        """Knows no categories."""
        return 0, [True] * len(addresses)

    def tag_untagged(self, category: Category, *, since_reset: bool) -> None:
        """Knows no categories."""

    def peak_by_category(self) -> dict[Category, int] | None:
        """Knows no categories."""
        return None


class CudaSource:
    """torch.cuda.memory_stats of the current device."""

    name = "cuda"

    def start(self) -> None:
        """Nothing to begin."""

    def stop(self) -> None:
        """Nothing to end."""

    def counters(self) -> Counters:
        """Read PyTorch's statistics; "requested_bytes" is what tensors asked for, unrounded."""
        read = read_cuda()
        return Counters(
            allocated_bytes=read("requested_bytes.all.current") or 0,
            peak_allocated_bytes=read("requested_bytes.all.peak"),
            reserved_bytes=read("reserved_bytes.all.current"),
            peak_reserved_bytes=read("reserved_bytes.all.peak"),
            allocation_count=read("allocation.all.allocated"),
            out_of_memory_count=read("num_ooms"),
        )

    def reset_peak(self) -> None:
        """Restart the peaks."""
        torch.cuda.reset_peak_memory_stats()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Limit what the caching allocator reserves, as a fraction of the device."""
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        fraction = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction)

    def tag(self, category: Category, addresses: Sequence[int]) -> tuple[int, Sequence[bool]]:
        """Knows no categories."""
        return 0, [True] * len(addresses)

    def tag_untagged(self, category: Category, *, since_reset: bool) -> None:
        """Knows no categories."""

    def peak_by_category(self) -> dict[Category, int] | None:
        """Knows no categories."""
        return None


def read_cuda() -> Callable[[str], int | None]:
    """Read PyTorch's statistics of the current device; returns what looks one up by its name.

    The pool of CUDA's driver (cudaMallocAsync) tells of what it has allocated, rounded up, and
    reserved; all else PyTorch gives as zero there, and is None here.
    """
    stats = torch.cuda.memory_stats()
    if torch.cuda.get_allocator_backend() == "native":
        unknown = None if stats else 0  # nothing is there before the first allocation
        return lambda name: stats.get(name, unknown)
    known = {n: v for n, v in stats.items() if n.startswith(("allocated_bytes", "reserved_bytes"))}
    return lambda name: known.get(name.replace("requested_bytes", "allocated_bytes"))


def live_tensor_bytes() -> int:
    """Add up the distinct CPU storages that Python's objects hold."""
    sizes: dict[int, int] = {}
    for tensor in live_tensors():
        # What has no memory says so: fake and lazy tensors, and those of layouts without storage.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
