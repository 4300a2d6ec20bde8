"""Exact bytes on PyTorch (2.13): see `sources.py` for where they come from.

Relies on torch.autograd.backward and torch.autograd.grad being the doors to backward. Blind spots
on a CPU: shared memory, `from_numpy`, memory maps, and what oneDNN and MKL keep for themselves.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from xmem.containers import leaves
from xmem.errors import XmemWarning
from xmem.native.build import find_compiler
from xmem.protocols import Category, Counters, Tagged
from xmem.sizes import parse_size
from xmem_torch.local_parts import local_part
from xmem_torch.masters import master_of
from xmem_torch.sources import AllocatorSource, CudaSource, ProfilerSource, Source

_CATEGORY_GAP = "only xmem's own allocator sees single blocks; {0} reports totals"


class Measure:
    """Counts bytes; see `xmem.protocols.Measure`."""

    def __init__(self, device: str) -> None:
        self._source = _choose_source(device)
        self.gaps: Mapping[str, str] = {}
        if not isinstance(self._source, AllocatorSource):
            self.gaps = {"by_category": _CATEGORY_GAP.format(self._source.name)}
        if isinstance(self._source, ProfilerSource):
            self.gaps = {
                **self.gaps,
                "limit": "the profiler watches and cannot refuse",
                "peak": "the profiler knows peaks inside xmem.measure only",
                "timeline": "reading the profiler stops it, which steps should not pay for",
            }

    @property
    def source(self) -> str:
        """How bytes are counted."""
        return self._source.name

    def synchronize(self) -> None:
        """Wait for the device; on a CPU everything has been executed already."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def counters(self) -> Counters:
        """Read the counters."""
        return self._source.counters()

    def reset_peak(self) -> None:
        """Restart the peaks."""
        self._source.reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse allocations beyond it with torch.OutOfMemoryError."""
        self._source.set_limit(None if limit_bytes is None else parse_size(limit_bytes))

    def owned(self, model: Any, optimizer: Any, inputs: Any) -> Mapping[Category, Sequence[Any]]:
        """Ask the modules and the optimizer."""
        # One walk over the modules; parameters() and buffers() would each take one.
        inside = {s for m in leaves(model, torch.nn.Module) for s in m.modules()}
        parameters = [p for m in inside for p in m._parameters.values() if p is not None]
        state = [] if optimizer is None else leaves(list(optimizer.state.values()), torch.Tensor)
        if optimizer is not None:  # float32 masters, where the model has been cast
            state += [m for p in parameters if (m := master_of(p)) is not p]
        return {
            "parameter": parameters,
            "buffer": [b for m in inside for b in m._buffers.values() if b is not None],
            "gradient": _gradients(parameters),
            "optimizer": state,
            "input": leaves(inputs, torch.Tensor),
        }

    def tag(self, category: Category, tensors: Iterable[Any]) -> Tagged:
        """Tag the storages behind the tensors."""
        storages = [s for tensor in tensors for s in _storages(tensor) if s.nbytes()]
        sizes = {s.data_ptr(): s.nbytes() for s in storages}
        sizes.pop(0, None)  # on the meta device
        tagged_bytes, ours = self._source.tag(category, list(sizes))
        untracked = sum(size for size, own in zip(sizes.values(), ours, strict=True) if not own)
        return Tagged(sum(ours), tagged_bytes, untracked)

    def tag_untagged(self, category: Category) -> None:
        """Tag what nobody has claimed."""
        self._source.tag_untagged(category, since_reset=False)

    def peak_by_category(self) -> dict[Category, int] | None:
        """Return the breakdown at the peak; None without our allocator."""
        return self._source.peak_by_category()

    def watch(
        self, model: Any, optimizer: Any, record: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """Follow backward through its two doors, and optimizer steps through their own hooks."""
        silent = "timeline" in self.gaps
        return self._watch(model, (lambda _: None) if silent else record)

    @contextmanager
    def _watch(self, model: Any, record: Callable[[str], None]) -> Iterator[None]:
        depth = 0
        parameters = self.owned(model, None, None)["parameter"]

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                outermost = depth == 0
                if outermost:  # recomputation may call backward inside backward
                    self._source.tag_untagged("activation", since_reset=True)
                    record("backward")
                depth += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    depth -= 1
                    if outermost:
                        self.tag("gradient", _gradients(parameters))
                        record("backward_end")

            return run

        doors = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
        hook = register_optimizer_step_post_hook(lambda *_: record("optimizer_end"))
        self._source.start()
        try:
            for name, function in doors.items():
                setattr(torch.autograd, name, around(function))
            yield
        finally:
            for name, function in doors.items():
                setattr(torch.autograd, name, function)
            hook.remove()
            self._source.stop()

    def settings(self) -> dict[str, str]:
        """Return threads, libraries and allocator settings."""
        found = {
            "threads": str(torch.get_num_threads()),
            "mkldnn": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        }
        for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE"):
            if variable in os.environ:
                found[variable] = os.environ[variable]
        return found


_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _gradients(parameters: Sequence[Any]) -> list[Any]:
    return [gradient for p in parameters if (gradient := master_of(p).grad) is not None]


def _storages(tensor: Any) -> list[Any]:
    """Return what memory a tensor stands on here; a lazy parameter has none yet."""
    tensor = local_part(tensor)
    if tensor.layout is torch.strided:
        return [] if torch.nn.parameter.is_lazy(tensor) else [tensor.untyped_storage()]
    parts = _SPARSE_PARTS.get(tensor.layout, ())  # oneDNN's own layout shows no storage
    return [getattr(tensor, part)().untyped_storage() for part in parts]


def _choose_source(device: str) -> Source:
    if device == "cuda":
        return CudaSource()
    compiler = find_compiler()
    if compiler is not None:
        return AllocatorSource(compiler)
    warnings.warn(
        "no C++ compiler was found, so bytes are counted by PyTorch's profiler: exact, slower, and"
        " without categories or limits. Install g++ for xmem's own allocator.",
        XmemWarning,
        stacklevel=2,
    )
    return ProfilerSource()
