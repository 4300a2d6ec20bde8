"""PyTorch's own CUDA allocator (2.13), through `torch.cuda` and PYTORCH_ALLOC_CONF.

Relies on torch.cuda.memory_stats, memory_snapshot, set_per_process_memory_fraction, on
torch._C._accelerator_setAllocatorSettings, and on torch._C._cuda_attach_out_of_memory_observer,
which calls back where a request is refused. PyTorch gives its cache back and tries again by itself
before it refuses. The limit is on what it reserves.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xmem.errors import CapabilityError, UsageError, XmemWarning
from xmem.pooling import Block, OnOom, Point, PoolStats, Refusal, Segment, Setting
from xmem.process import process_bytes
from xmem.sizes import format_size
from xmem_torch import cuda_settings
from xmem_torch.cuda_settings import SETTINGS, VARIABLES
from xmem_torch.oom import OutOfMemoryError
from xmem_torch.sources import read_cuda

__all__ = ["SETTINGS", "CudaPool"]

_LARGEST = 256

GAPS = {
    "on_oom=trim_and_retry": "PyTorch's CUDA allocator gives its cache back and tries again by"
    " itself already; garbage cannot be collected at that point",
    "on_oom=spill": "PyTorch can route what one thread asks for to managed memory"
    " (torch.cuda._use_uvm), but not the requests that fail, nor those of backward's threads",
    "on_oom=offload": "PyTorch's CUDA allocator asks nobody before it refuses: its observer is told"
    " afterwards. Use xmem.offload_activations, which decides when a tensor is saved",
    "history": "PyTorch's CUDA allocator keeps no history of its sizes",
    "categories": "PyTorch's CUDA allocator does not know what a block is for",
}
_DRIVERS = "the driver's pool (backend cudaMallocAsync) does not tell of {what}"
_DRIVERS_GAPS = {
    "refusal": _DRIVERS.format(what="refused requests"),
    "segments": _DRIVERS.format(what="its segments"),
}


class CudaPool:
    """Controls PyTorch's CUDA allocator."""

    gaps: Mapping[str, str] = GAPS
    settings: Mapping[str, Setting] = SETTINGS

    def __init__(self) -> None:
        self._refusal: Refusal | None = None
        # The runtime's parser starts from its defaults: what is not named is reset. So what the
        # environment said is said again.
        self._values = _from_environment()
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        self._is_native = torch.cuda.get_allocator_backend() == "native"
        if not self._is_native:
            self.gaps = {**GAPS, **_DRIVERS_GAPS}
        elif attach is None:
            self.gaps = {**GAPS, "refusal": "this PyTorch does not tell of refused requests"}
        else:
            attach(self._note_refusal)

    def in_force(self) -> dict[str, Any]:
        """Return what was set; the rest is PyTorch's default."""
        found = {"backend": torch.cuda.get_allocator_backend(), **self._values}
        return {**found, "on_oom": "raise"}

    def configure(self, values: Mapping[str, Any], on_oom: OnOom | None) -> None:
        """Hand settings over to the running allocator."""
        if on_oom not in (None, "raise"):
            raise CapabilityError(
                f'on_oom="{on_oom}" is not to be had on CUDA: {GAPS[f"on_oom={on_oom}"]}'
            )
        for name, value in values.items():
            self._refuse_late(name, value)
        merged = {**self._values, **values}
        running = {"backend": torch.cuda.get_allocator_backend()}
        cuda_settings.check({**merged, **running})
        if merged != self._values:
            torch._C._accelerator_setAllocatorSettings(cuda_settings.write(merged))
            self._values = merged

    def _refuse_late(self, name: str, value: Any) -> None:
        applies = SETTINGS[name].applies
        if applies == "before start":
            running = torch.cuda.get_allocator_backend()
            late = value != running
            when = f"when PyTorch is imported, and {running!r} runs"
        else:
            late = (
                applies == "before use"
                and torch.cuda.is_initialized()
                and self._values.get(name) != value
            )
            when = "when CUDA is first used, and it has been"
        if late:
            variable = next((v for v in VARIABLES if v in os.environ), VARIABLES[-1])
            raise UsageError(
                f"{name}={value!r} comes too late: it is read {when}. Set the environment"
                f" variable {variable}={cuda_settings.write({**self._values, name: value})}"
                " before Python starts"
            )

    def stats(self) -> PoolStats:
        """Read PyTorch's statistics; allocated is what tensors asked for, unrounded."""
        read = read_cuda()
        return PoolStats(
            allocated_bytes=read("requested_bytes.all.current") or 0,
            peak_allocated_bytes=read("requested_bytes.all.peak"),
            reserved_bytes=read("reserved_bytes.all.current"),
            peak_reserved_bytes=read("reserved_bytes.all.peak"),
            process_bytes=process_bytes(),
            segment_count=read("segment.all.current"),
            allocation_count=read("allocation.all.allocated"),
            free_count=read("allocation.all.freed"),
            largest_free_bytes=_largest_free(self.segments()) if self._is_native else None,
            out_of_memory_count=read("num_ooms"),
            limit_bytes=_limit(),
            retry_count=read("num_alloc_retries"),
        )

    def reset_peak(self) -> None:
        """Restart PyTorch's peaks."""
        torch.cuda.reset_peak_memory_stats()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Limit what is reserved, as a fraction of the device."""
        fraction = 1.0 if limit_bytes is None else min(1.0, limit_bytes / _device_bytes())
        torch.cuda.set_per_process_memory_fraction(fraction)

    def trim(self) -> int:
        """Give unused segments back to the driver."""
        before = torch.cuda.memory_reserved()
        torch.cuda.synchronize()  # blocks that other streams have used are free after that
        torch.cuda.empty_cache()
        return int(before - torch.cuda.memory_reserved())

    def preallocate(self, size_bytes: int) -> int:
        """Make a tensor of that size and drop it: its segment stays."""
        if self._is_native and _largest_free(self.segments()) >= size_bytes:
            return 0
        before = torch.cuda.memory_reserved()
        try:
            torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the device has no {format_size(size_bytes)} left in one piece to preallocate"
            ) from error
        return int(torch.cuda.memory_reserved() - before)

    def segments(self) -> Sequence[Segment]:
        """Read PyTorch's snapshot, of the current device."""
        if not self._is_native:
            raise CapabilityError(_DRIVERS_GAPS["segments"])
        device = torch.cuda.current_device()
        found = [
            Segment(
                address=s["address"],
                size_bytes=s["total_size"],
                blocks=tuple(_blocks(s)),
            )
            for s in torch.cuda.memory_snapshot()
            if s["device"] == device
        ]
        return sorted(found, key=lambda s: s.address)

    def history(self) -> Sequence[Point]:
        """Cannot."""
        raise CapabilityError(GAPS["history"])

    def refusal(self) -> Refusal | None:
        """Return what was written down when PyTorch last refused."""
        return self._refusal

    def _note_refusal(
        self, device: int, requested: int, total: int, free: int
    ) -> None:  # called by PyTorch, in the thread that asked
        self._refusal = None
        # What is raised here would take the place of the out-of-memory error.
        with contextlib.suppress(Exception), torch.cuda.device(device):
            self._refusal = self._describe(requested)

    def _describe(self, requested: int) -> Refusal:
        segments, stats = self.segments(), self.stats()
        live = [b for s in segments for b in s.blocks if b.requested_bytes]
        graph_task = getattr(torch._C, "_current_graph_task_id", None)
        return Refusal(
            requested_bytes=requested,
            allocated_bytes=stats.allocated_bytes,
            reserved_bytes=stats.reserved_bytes,
            limit_bytes=stats.limit_bytes,
            largest_free_bytes=stats.largest_free_bytes,
            birth=0,
            by_category=None,
            blocks=tuple(sorted(live, key=lambda b: -b.requested_bytes)[:_LARGEST]),
            in_backward=None if graph_task is None else graph_task() != -1,
        )

    def recover(self) -> None:
        """Wait for what is under way, collect garbage and trim."""
        torch.cuda.synchronize()
        gc.collect()
        self.trim()


def _from_environment() -> dict[str, Any]:
    texts = {v: os.environ[v] for v in VARIABLES if v in os.environ}
    if len(set(texts.values())) > 1:
        named = " and ".join(f"{name}={text}" for name, text in texts.items())
        warnings.warn(f"{named} differ; PyTorch reads the first", XmemWarning, stacklevel=4)
    for variable, text in texts.items():
        try:
            return cuda_settings.read(text)
        except UsageError as error:
            raise UsageError(f"in the environment variable {variable}: {error}") from error
    return {}


def _device_bytes() -> int:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.total_memory)


def _limit() -> int | None:
    fraction = torch.cuda.get_per_process_memory_fraction()
    return None if fraction >= 1 else round(fraction * _device_bytes())


def _blocks(segment: Mapping[str, Any]) -> list[Block]:
    found, address = [], segment["address"]
    for block in segment["blocks"]:
        live = block["state"] != "inactive"
        asked = block.get("requested_size", block["size"]) if live else 0
        found.append(Block(block.get("address", address), block["size"], asked, None, 0))
        address += block["size"]
    return found


def _largest_free(segments: Sequence[Segment]) -> int:
    free = (b.size_bytes for s in segments for b in s.blocks if not b.requested_bytes)
    return max(free, default=0)
