"""Exact bytes from an allocator of ours inside Jittor: `native/allocator.cc`.

Jittor's own figures do not suffice: `jt.get_mem_info` and `display_memory_info` know what the pool
holds, not what tensors requested, and no peak between two points.

Where phases begin is known in the order of execution only, so nothing here runs or adds an
operation: `watch` notes how many graph nodes there are when Python asks for the gradients, and the
allocator, which sees for which tensor it allocates, knows that backward has begun when the first
younger tensor is allocated.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jittor as jt

from xmem.containers import leaves
from xmem.errors import MeasurementError
from xmem.protocols import CATEGORIES, Category, Counters, Tagged
from xmem_jittor import flags, native, ran_out
from xmem_jittor.masters import masters_of

_CODES: dict[str, int] = {category: code for code, category in enumerate(CATEGORIES)}

_SETTINGS = (
    "use_cuda",
    "lazy_execution",
    "auto_mixed_precision_level",
    "amp_reg",
    "no_fuse",
    "gopt_disable",
    "use_sfrl_allocator",
    "use_temp_allocator",
    "use_stat_allocator",
    "use_cuda_managed_allocator",
    "use_cuda_host_allocator",
    "sfrl_large_block_size_device",
)


class Measure:
    """Count what Jittor's pool hands out; see `xmem.protocols.Measure`."""

    def __init__(self) -> None:
        self.gaps: Mapping[str, str] = {
            "workspaces": "workspaces of cuDNN come from another pool and are not counted",
        }
        flags.refuse_broken()
        self._library = native.allocator()
        probe = jt.zeros((1,)).sync()
        if not self._library.xmem_jittor_install(probe.var_ptr, _CODES["activation"]):
            raise MeasurementError(
                "Jittor allocates from a pool that xmem cannot count. Unset its allocator flags"
                " (use_sfrl_allocator, use_stat_allocator, use_nfef_allocator) and start again."
            )

    @property
    def source(self) -> str:
        """Bytes are counted by the allocator itself."""
        return "allocator"

    def synchronize(self) -> None:
        """Run everything that Python still holds a handle of."""
        jt.sync_all(True)

    def counters(self) -> Counters:
        """Read the counters."""
        flags.refuse_broken()
        values = (ctypes.c_longlong * 6)()
        if not self._library.xmem_jittor_counters(values):
            raise MeasurementError(
                "Jittor no longer allocates from the pool that xmem counts: one of its allocator"
                " flags (use_stat_allocator...) was changed since xmem.use()."
            )
        return Counters(*values)

    def reset_peak(self) -> None:
        """Let the peaks start again from now."""
        self._library.xmem_jittor_reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse allocations beyond a limit: a RuntimeError that says "out of memory"."""
        ran_out.set_limit(limit_bytes)

    def owned(self, model: Any, optimizer: Any, inputs: Any) -> dict[Category, Sequence[Any]]:
        """Return the tensors that model, optimizer and inputs own."""
        held = [p for module in leaves(model, jt.Module) for p in module.parameters()]
        known = {id(p) for p in held}
        given = [p for group in _groups(optimizer) for p in group["params"]]
        masters = masters_of(optimizer)
        known |= {id(master) for master in masters}
        return {
            "parameter": [p for p in held if not p.is_stop_grad()]
            + [p for p in given if id(p) not in known],
            "buffer": [p for p in held if p.is_stop_grad()],
            "gradient": [g for group in _groups(optimizer) for g in group.get("grads", ())],
            "optimizer": [v for group in _groups(optimizer) for v in _states(group)] + masters,
            "input": list(leaves(inputs, jt.Var)),
        }

    def tag(self, category: Category, tensors: Iterable[Any]) -> Tagged:
        """Give allocations a category; tensors that are not computed yet get it at their birth."""
        array, count = native.addresses(tensors)
        values = (ctypes.c_longlong * 3)()
        self._library.xmem_jittor_tag(array, count, _CODES[category], values)
        return Tagged(*values)

    def tag_untagged(self, category: Category) -> None:
        """Give every live allocation that nobody has claimed a category."""
        self._library.xmem_jittor_tag_unclaimed(_CODES[category])

    def peak_by_category(self) -> dict[Category, int] | None:
        """Return bytes by category at the peak."""
        values = (ctypes.c_longlong * len(CATEGORIES))()
        self._library.xmem_jittor_peak_by_category(values, len(CATEGORIES))
        return dict(zip(CATEGORIES, values, strict=True))

    @contextmanager
    def watch(self, model: Any, optimizer: Any, record: Callable[[str], None]) -> Iterator[None]:
        """Follow where backward begins: the outermost call of `jt.grad`.

        Jittor shows no other boundary, since it runs gradients and updates interleaved.
        """
        original = jt.grad
        depth = 0

        def grad(loss: Any, targets: Any, retain_graph: bool = True) -> Any:
            nonlocal depth
            if depth == 0:
                self._library.xmem_jittor_mark_backward()
                record("backward")
            depth += 1
            try:
                found = original(loss, targets, retain_graph)
            finally:
                depth -= 1
            if depth == 0:
                array, count = native.addresses(leaves(found, jt.Var))
                self._library.xmem_jittor_expect(array, count, _CODES["gradient"])
            return found

        jt.grad = grad
        try:
            yield
        finally:
            jt.grad = original
            self._library.xmem_jittor_forget_expectations()

    def settings(self) -> dict[str, str]:
        """Return Jittor's flags that change memory or time."""
        found = {name: str(getattr(jt.flags, name)) for name in _SETTINGS if flags.has(name)}
        found["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS", "all")
        found["onednn"] = str(jt.compile_extern.mkl_ops is not None)
        return found


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return list(getattr(optimizer, "param_groups", ()))


def _states(group: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what an optimizer keeps beside parameters and gradients, under whatever names."""
    for name, held in group.items():
        if name not in ("params", "grads"):
            yield from leaves(held, jt.Var)
