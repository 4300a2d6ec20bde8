"""What an operation allocates beyond its outputs, by running it once by itself (PyTorch 2.13).

Kernels of convolutions, normalisations and attention take scratch memory that no dispatcher sees.
How much depends on the operation, the shapes, strides and types of its inputs, the device and the
number of threads; not on values. So each such signature is run once per process, on tensors of
ones, and the backend's exact counters say what it took. That shows the outputs, too, where the
formula of PyTorch's fake tensors differs from the kernel (statistics of a half batch_norm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from xmem_torch.measure import Measure

_SMALL_BYTES = 64 * 2**20  # fits without a look at what is free
_FREE_SHARE = 0.5  # of what is free, for one operation
_FAILURES = (RuntimeError, ValueError, IndexError, TypeError)
"""What an operation may raise on ones; torch.OutOfMemoryError is a RuntimeError."""


@dataclass(frozen=True)
class Scratch:
    """What one operation takes.

    Attributes:
        hidden_bytes: beyond its outputs, at its own peak.
        outputs: the tensors that it returns.
    """

    hidden_bytes: int
    outputs: Sequence[Output]


@dataclass(frozen=True)
class Output:
    """What an operation returns.

    Attributes:
        shape: of the tensor.
        stride: of the tensor.
        dtype: of the tensor.
        storage_bytes: of the memory behind it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    storage_bytes: int


@dataclass(frozen=True)
class _Like:
    """A tensor without its data; `number` tells apart the tensors of one call."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any

    @property
    def elements(self) -> int:
        """How many elements lie between the first and the last, these included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def size_bytes(self) -> int:
        return self.elements * int(self.dtype.itemsize)

    def made(self) -> torch.Tensor:
        """Make one of ones, or of zeros where it may be an index."""
        value = 1 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        memory = torch.empty(self.elements, dtype=self.dtype, device=self.device).fill_(value)
        return memory.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Signature:
    """An operation with its arguments, tensors without their data."""

    function: Any
    leaves: tuple[Any, ...]
    spec: Any
    state: tuple[Any, ...]

    @property
    def tensors(self) -> list[_Like]:
        """The tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Like)]


def signature(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Signature | None:
    """Return what an operation's scratch depends on; None where it cannot be run by itself."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    numbers: dict[int, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            if isinstance(leaf, (torch.Generator, torch.SymInt)):
                return None
            described.append((type(leaf), leaf) if isinstance(leaf, (bool, int, float)) else leaf)
            continue
        if leaf.layout is not torch.strided or leaf.device.type == "meta":
            return None
        number = numbers.setdefault(id(leaf), len(numbers))
        described.append(
            _Like(number, tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device)
        )
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    threads = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    return Signature(function, tuple(described), spec, (*threads, *autocast))


_DEVICES = ("cpu", "cuda")
LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Where a tensor that was made of numbers becomes a fake one."""
_known: dict[tuple[str, Signature], Scratch | None] = {}


def is_calibrated(function: Any) -> bool:
    """Say whether an operation may allocate at all: views, and empty tensors, do not."""
    if function in LIFTS or function.name().startswith(_NO_SCRATCH):
        return False
    aliases = [r.alias_info for r in function._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


# Fused optimizers work in place on all of a model at once.
_NO_SCRATCH = tuple(
    f"aten::{n}" for n in ("empty", "new_empty", "detach", "lift_", "set_", "_fused")
)


def scratch_of(measure: Measure, wanted: Signature, output_bytes: int) -> Scratch | None:
    """Return what an operation takes, running it if it is met for the first time.

    Args:
        measure: counts bytes.
        wanted: the operation.
        output_bytes: of its outputs, for a look at whether there is room.

    Returns:
        None where it cannot be run, or where there is no room for it.
    """
    key = (measure.source, wanted)
    if key not in _known:
        need_bytes = sum(like.size_bytes for like in wanted.tensors) + output_bytes
        if need_bytes > _SMALL_BYTES and need_bytes > _FREE_SHARE * _free_bytes(wanted):
            return None  # there may be room another time
        try:
            _known[key] = _run(measure, wanted)
        except _FAILURES:
            _known[key] = None
    return _known[key]


def _run(measure: Measure, wanted: Signature) -> Scratch:
    # The profiler knows peaks inside a watched block only; the others count all the time.
    watch = measure.watch(None, None, lambda _: None) if "peak" in measure.gaps else nullcontext()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        made: dict[int, torch.Tensor] = {}
        leaves: list[Any] = []
        for leaf in wanted.leaves:
            if isinstance(leaf, _Like):
                if leaf.number not in made:
                    made[leaf.number] = leaf.made()
                leaves.append(made[leaf.number])
            else:
                leaves.append(leaf[1] if isinstance(leaf, tuple) else leaf)
        args, kwargs = tree_unflatten(leaves, wanted.spec)
        del leaves, made
        if any(like.device.type == "cuda" for like in wanted.tensors):
            wanted.function(*args, **kwargs)  # cuBLAS and cuDNN keep what they make first
        with watch:
            measure.reset_peak()
            before = measure.counters().allocated_bytes
            outputs = wanted.function(*args, **kwargs)
            counters = measure.counters()
            peak = counters.peak_allocated_bytes
    assert peak is not None
    found = [
        Output(tuple(t.shape), tuple(t.stride()), t.dtype, t.untyped_storage().nbytes())
        for t in tree_flatten(outputs)[0]
        if isinstance(t, torch.Tensor)
    ]
    return Scratch(max(0, peak - max(counters.allocated_bytes, before)), found)


def _free_bytes(wanted: Signature) -> float:
    """Return the bytes that are free on the device of an operation, infinity if unknown."""
    if any(like.device.type == "cuda" for like in wanted.tensors):
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([float("inf"), *found])
