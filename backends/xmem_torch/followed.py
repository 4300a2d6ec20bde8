"""Following a step on fake tensors: which storages are alive, operation by operation.

A TorchDispatchMode over FakeTensorMode (PyTorch 2.13) sees every operation below autograd. A new
storage counts until Python lets go of it, which is when PyTorch would free it. What an operation
takes besides its outputs comes from `scratch.py`. What the dispatcher does not see (the states of
generators that a checkpointed region keeps) is allocated in truth, and xmem's allocator tells.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from xmem_torch.measure import Measure
from xmem_torch.scratch import LIFTS, Scratch, Signature, is_calibrated, scratch_of, signature

_READS = torch.ops.aten._local_scalar_dense.default
_ADDS = torch.ops.aten.add.Tensor
_NUMBER = 2  # what an optimizer reads of its state: the number of its step, above 0


class Followed(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Counts the bytes of a step.

    Args:
        fake_mode: what runs operations without data.
        device: the type of device whose bytes are counted.
        measure: counts bytes where an operation is run for itself.

    Attributes:
        current_bytes: allocated now.
        peak_bytes: the most since it was set back.
        updating: numbers may be read, as optimizers do; elsewhere that is refused.
        calibrated: the operations whose scratch is known.
        uncalibrated: those whose scratch is not.
    """

    def __init__(self, fake_mode: Any, device: str, measure: Measure) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._device = device
        self._measure = measure
        self._storages: dict[int, tuple[Any, int, int]] = {}
        self.current_bytes = self.peak_bytes = 0
        self.updating = False
        # Others count another device, or only inside a measured block.
        self._counts = measure.source == "allocator"
        self._outside_bytes = self._real_bytes()
        self.calibrated: set[Signature] = set()
        self.uncalibrated: set[Signature] = set()
        self._alone: tuple[int, int, int] | None = None
        self.learn()
        self.calibrated.clear()
        self.current_bytes = self.peak_bytes = 0

    def _real_bytes(self) -> int:
        return self._measure.counters().allocated_bytes if self._counts else 0

    def hold(self, tensor: torch.Tensor, size_bytes: int | None = None) -> None:
        """Count a tensor's storage until it is gone, and again where it has been resized.

        Args:
            tensor: a fake one; on another device it is not counted.
            size_bytes: what a new storage takes, if not its own size.
        """
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key, now_bytes = storage._cdata, storage.nbytes()
        if key in self._storages:
            reference, counted_bytes, was_bytes = self._storages[key]
            grown_bytes = now_bytes - was_bytes
            self._storages[key] = reference, counted_bytes + grown_bytes, now_bytes
            self.current_bytes += grown_bytes
        else:
            counted_bytes = now_bytes if size_bytes is None else size_bytes

            def gone(_: Any) -> None:
                self.current_bytes -= self._storages.pop(key)[1]

            self._storages[key] = weakref.ref(storage, gone), counted_bytes, now_bytes
            self.current_bytes += counted_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _faked(self, value: Any) -> Any:
        """Return what stands for a tensor with data, which was there before and is not counted."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self._fake_mode.from_tensor(value)
        self.hold(fake, 0)
        return fake

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.updating and function is _READS:
            return float(_NUMBER) if args[0].dtype.is_floating_point else _NUMBER
        if function not in LIFTS:
            args, kwargs = tree_map(self._faked, (args, kwargs))
        if function is _ADDS and not kwargs and self._is_accumulation(*args):
            function = torch.ops.aten.add_.Tensor
        wanted = signature(function, args, kwargs) if is_calibrated(function) else None
        result = function(*args, **kwargs)
        outputs, spec = tree_flatten(result)
        hidden_bytes = 0
        sizes: list[int | None] = [None] * len(outputs)
        if wanted is not None:
            found = self._found(wanted, outputs)
            if found is not None:
                hidden_bytes = found.hidden_bytes
                sizes = _corrected(outputs, found, aliases=function._schema.is_mutable)
                result = tree_unflatten(outputs, spec)
        elif function in LIFTS and self._counts and getattr(result, "constant", None) is not None:
            sizes = [0]  # kept in truth
        for tensor, size_bytes in zip(outputs, sizes, strict=True):
            if isinstance(tensor, torch.Tensor):
                self.hold(tensor, size_bytes)
        outside_bytes = self._real_bytes() - self._outside_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes + hidden_bytes + outside_bytes)
        return result

    def _is_accumulation(self, old: Any, new: Any) -> bool:
        """Say whether autograd adds a gradient to one that nobody else holds.

        With data it does so in place; under a mode it does not, so here that is done for it.
        """
        if torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return False
        if not isinstance(new, torch.Tensor) or old.shape != new.shape or old.dtype != new.dtype:
            return False
        holders = (
            torch._C._storage_Use_Count(old.untyped_storage()._cdata),
            old._use_count(),
            sys.getrefcount(old),
        )
        if self._alone is None:
            self._alone = holders
        return holders == self._alone and _is_dense(old)

    def learn(self) -> None:
        """See how many holders a gradient has that nobody else holds."""
        with self._fake_mode, self, torch.enable_grad():
            x = torch.zeros(2, requires_grad=True) * 1
            (x.sin() + x.cos()).sum().backward()

    def _found(self, wanted: Signature, outputs: list[Any]) -> Scratch | None:
        """Return what an operation takes, and note whether that is known."""
        total_bytes = sum(
            t.untyped_storage().nbytes() for t in outputs if isinstance(t, torch.Tensor)
        )
        before_bytes = self._real_bytes()
        found = scratch_of(self._measure, wanted, total_bytes)
        self._outside_bytes += self._real_bytes() - before_bytes
        (self.calibrated if found else self.uncalibrated).add(wanted)
        return found


def _is_dense(tensor: torch.Tensor) -> bool:
    """Say whether elements lie side by side, in whatever order of the axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _corrected(outputs: list[Any], found: Scratch, *, aliases: bool) -> list[int | None]:
    """Put fakes like the true outputs in the places of others; returns the storages' bytes."""
    places = [i for i, t in enumerate(outputs) if isinstance(t, torch.Tensor)]
    sizes: list[int | None] = [None] * len(outputs)
    if len(places) != len(found.outputs):
        return sizes
    for place, true in zip(places, found.outputs, strict=True):
        fake = outputs[place]
        if tuple(fake.shape) != true.shape:
            continue
        sizes[place] = true.storage_bytes
        if not aliases and (fake.dtype, fake.stride()) != (true.dtype, true.stride):
            outputs[place] = torch.empty_strided(
                true.shape, true.stride, dtype=true.dtype, device=fake.device
            )
    return sizes
