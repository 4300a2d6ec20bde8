"""The memory pool on PyTorch: our c10 allocator on a CPU, PyTorch's own on CUDA.

Without a C++ compiler only glibc's allocator can be told to keep what is freed; see `heap_pool.py`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch

from xmem.errors import OutOfMemoryError
from xmem.native.build import find_compiler
from xmem.pooling import Graph, OnOom, Owners, Point, PoolStats, Refusal, Segment, Setting
from xmem_torch import cpu_pool, cpu_settings, cuda_pool, living, native, oom, owners
from xmem_torch.heap_pool import HeapPool


class Control(Protocol):
    """One of the pools that can be behind `Pool`; methods as there."""

    gaps: Mapping[str, str]
    settings: Mapping[str, Setting]

    def in_force(self) -> dict[str, Any]:
        """Return the settings."""

    def configure(self, values: Mapping[str, Any], on_oom: OnOom | None) -> None:
        """Put settings in force."""

    def stats(self) -> PoolStats:
        """Read the counters."""

    def reset_peak(self) -> None:
        """Restart peaks and history."""

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse what would pass it."""

    def trim(self) -> int:
        """Give back what is free."""

    def preallocate(self, size_bytes: int) -> int:
        """Hold free memory."""

    def segments(self) -> Sequence[Segment]:
        """Walk all segments."""

    def history(self) -> Sequence[Point]:
        """Read the history."""

    def refusal(self) -> Refusal | None:
        """Read the latest refusal."""

    def recover(self) -> None:
        """Let nothing stay of a failed step."""


def _empty_backward_queue() -> None:
    """Have autograd forget the graph of a backward that failed in this thread.

    Its thread keeps what was still to be run (PyTorch 2.13) until it runs another backward. This
    one goes to the engine itself, past the doors that measuring watches.
    """
    with torch.inference_mode(False), torch.enable_grad(), suppress(torch.OutOfMemoryError):
        one = torch.ones((), requires_grad=True)
        torch.autograd.Variable._execution_engine.run_backward(
            (one,), (one.detach(),), False, False, (one,), allow_unreachable=True,
            accumulate_grad=False,
        )  # fmt: skip


@functools.cache  # "auto" and "cpu" open two backends, with one allocator behind them
def _control(cuda: bool, compiler: str | None) -> Control:
    if cuda:
        return cuda_pool.CudaPool()
    return HeapPool() if compiler is None else cpu_pool.CpuPool(native.load(compiler))


class Pool:
    """Controls the pool; see `xmem.pooling.Pool`."""

    def __init__(self, device: str) -> None:
        self._control = _control(device == "cuda", find_compiler())
        self.gaps: Mapping[str, str] = self._control.gaps
        here = set(self._control.settings)
        self._elsewhere = {
            **{name: "a CPU" for name in cpu_settings.SETTINGS if name not in here},
            **{name: "CUDA" for name in cuda_pool.SETTINGS if name not in here},
        }

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The settings of the pool in use."""
        return self._control.settings

    @property
    def elsewhere(self) -> Mapping[str, str]:
        """The settings of the other device."""
        return self._elsewhere

    def in_force(self) -> dict[str, Any]:
        """Return the settings as they are."""
        return self._control.in_force()

    def configure(self, values: Mapping[str, Any], on_oom: OnOom | None) -> None:
        """Put parsed values in force."""
        self._control.configure(values, on_oom)

    def stats(self) -> PoolStats:
        """Read the counters."""
        return self._control.stats()

    def reset_peak(self) -> None:
        """Restart peaks and history."""
        self._control.reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse allocations beyond it with torch.OutOfMemoryError."""
        self._control.set_limit(limit_bytes)

    def trim(self) -> int:
        """Give back what no tensor holds."""
        return self._control.trim()

    def preallocate(self, size_bytes: int) -> int:
        """Hold free memory in one piece."""
        return self._control.preallocate(size_bytes)

    def segments(self) -> Sequence[Segment]:
        """Return all that the pool holds."""
        return self._control.segments()

    def history(self) -> Sequence[Point]:
        """Return the history since `reset_peak`."""
        return self._control.history()

    def refusal(self) -> Refusal | None:
        """Return the latest refused request."""
        return self._control.refusal()

    def out_of_memory_type(self) -> type[OutOfMemoryError]:
        """Return the class that is torch.OutOfMemoryError too."""
        return oom.OutOfMemoryError

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Ask for the type; see `oom.py`. The allocator cannot chain what it raises in C++."""
        found = oom.is_out_of_memory(error)
        if found and error.__cause__ is None and isinstance(self._control, cpu_pool.CpuPool):
            error.__cause__ = self._control.failure
        return found

    def recover(self) -> None:
        """Collect what the failed step left, forget autocast's casts, and trim."""
        torch.clear_autocast_cache()
        _empty_backward_queue()
        gc.collect()
        self._control.recover()

    def watch(self, model: Any, optimizer: Any) -> AbstractContextManager[Owners]:
        """Follow modules and phases; see `owners.py`."""
        return owners.watch(model, optimizer)

    def parameter_names(self, model: Any, optimizer: Any) -> dict[int, str]:
        """Name what lies at an address; see `owners.py`."""
        return owners.parameter_names(model, optimizer)

    def live_tensors(self) -> Sequence[Any]:
        """List what Python holds; see `living.py`."""
        return living.live_tensors()

    def live_counts(self) -> dict[str, int]:
        """Count what is alive; see `living.py`."""
        return living.live_counts()

    def tensor_bytes(self, tensor: Any) -> int:
        """Size what lies behind a tensor; see `living.py`."""
        return living.tensor_bytes(tensor)

    def identity_of(self, tensor: Any) -> Any:
        """Tell a tensor from later ones; see `living.py`."""
        return living.identity_of(tensor)

    def on_step(self, call: Callable[[Any], None]) -> Callable[[], None]:
        """Follow the optimizers' steps; see `living.py`."""
        return living.on_step(call)

    def graph_of(self, tensor: Any) -> Graph | None:
        """Follow a tensor's graph; see `living.py`."""
        return living.graph_of(tensor)
