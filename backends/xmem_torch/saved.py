"""What backward will read, packed: PyTorch's saved-tensor hooks (2.13).

Relies on `torch.autograd.graph.saved_tensors_hooks`: each tensor that an operation saves is handed
to the innermost hooks. What is not packed is held as an alias; see `held.py`. Not covered: what a
selective checkpoint caches (it bypasses hooks), and what is written past autograd's counter of
versions (`.data`) between two operations that save the same memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from xmem.codec import DTYPES
from xmem.errors import UsageError
from xmem.exact import INTEGERS
from xmem.saving import Candidate, Choice, Policy
from xmem_torch.away import Senders
from xmem_torch.held import (
    Packed,
    Place,
    Whole,
    packed_by_codec,
    packed_exactly,
    place,
    recall,
    unpacked_whole,
)
from xmem_torch.lying import Lie, lie
from xmem_torch.refusals import refuse_compiled, refuse_here, refuse_module, saves_early
from xmem_torch.running import Running
from xmem_torch.tensors import size_bytes


class Saved:
    """See `xmem.saving.Saved`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.gaps: Mapping[str, str] = {}

    def saving(self, policy: Policy, *, model: Any) -> AbstractContextManager[Any]:
        """Pack in saved-tensor hooks; layers are known by global module hooks."""
        if model is not None and not isinstance(model, torch.nn.Module):
            raise UsageError(f"model={model!r} is no torch.nn.Module")
        return Saving(policy, model)


class Saving(AbstractContextManager["Saving"]):
    """A block in which a policy says what becomes of saved tensors."""

    def __init__(self, policy: Policy, model: Any) -> None:
        self._policy = policy
        self._running = Running(model, refuse_module)
        # While the graph holds what was packed, its storage's address belongs to no other one.
        self._held: WeakValueDictionary[tuple[Any, ...], Whole | Packed] = WeakValueDictionary()
        self._hooks = saved_tensors_hooks(self._pack, recall)
        self._saved = 0
        self._senders = Senders()

    def __enter__(self) -> Saving:
        refuse_here()
        self._running.begin()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._running.end()
        if error[0] is None:
            self._senders.raise_failure()

    def _pack(self, tensor: torch.Tensor) -> Place:
        frame = sys._getframe(1)
        refuse_compiled(frame)
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            self._policy.kept(self._candidate(tensor), _kind(tensor))
            return place(tensor, Whole(None))
        if self._running.owned.holds(tensor):
            return place(tensor, Whole(None))
        storage = StorageWeakRef(tensor.untyped_storage())
        where = lie(tensor)
        key = (storage.cdata, *where.key, tensor.dtype, tensor._version)
        held = self._held.get(key)
        if held is None:
            held = self._hold(tensor, where, storage, frame)
            self._held[key] = held
        if isinstance(held, Packed):
            self._saved += 1
            held.saved_as(self._saved)
        return place(tensor, held, where.stride)

    def _hold(
        self, tensor: torch.Tensor, where: Lie, storage: StorageWeakRef, frame: FrameType
    ) -> Whole | Packed:
        """Pack a tensor or keep it, and tell the policy."""
        policy, candidate = self._policy, self._candidate(tensor)
        reason = self._obstacle(tensor, frame)
        if not reason:
            choice = policy.choose(candidate)
            packed, exact = self._packed(tensor, where, storage, choice)
            if packed is not None and choice.away is not None:
                size, sending = (
                    packed.nbytes,
                    functools.partial(self._senders.send, away=choice.away),
                )
                if packed.send(sending):
                    policy.packed(candidate, 0, exact=exact, away_bytes=size)
                    return packed
                if size == candidate.nbytes:
                    packed = None
            if packed is not None:
                policy.packed(candidate, packed.nbytes, exact=exact)
                return packed
            reason = choice.reason or _FULL
        policy.kept(candidate, reason)
        return Whole(storage)

    def _packed(
        self, tensor: torch.Tensor, where: Lie, storage: StorageWeakRef, choice: Choice
    ) -> tuple[Packed | None, bool]:
        """Return a tensor as a choice has it, and whether nothing is lost; None: kept as it is."""
        exact = choice.exact and _type_of(tensor) in _EXACT
        if not exact and choice.bits is None and choice.away is None:
            return None, True
        flat = where.flat(tensor)  # a copy, where its elements lie apart
        packed = packed_exactly(flat, storage) if exact else None
        if packed is None and choice.bits is not None:
            return packed_by_codec(flat, storage, choice.bits, choice.seed), False
        if packed is None and choice.away is not None:
            packed = unpacked_whole(flat, storage)
        return packed, True

    def _candidate(self, tensor: torch.Tensor) -> Candidate:
        module, layer = self._running.innermost
        shape, size = tuple(tensor.shape), size_bytes(tensor)
        return Candidate(layer, _type_of(tensor), shape, size, module=module, tensor=tensor)

    def _obstacle(self, tensor: torch.Tensor, frame: FrameType) -> str:
        """Return why a tensor is kept, whatever the policy says; "" for nothing."""
        if tensor.device.type not in _DEVICES:
            return f"on {tensor.device.type}"
        if tensor.is_neg() or tensor.is_conj() or not tensor.numel():
            return "not plain numbers"
        if self._running.is_input(tensor):
            return "input"
        if self._running.owned.copied(tensor):
            return "copies of weights"
        if saves_early(frame.f_code):
            return "RReLU"
        return ""


_FULL = "the depot takes no more"
_DEVICES = ("cpu", "cuda")
_EXACT = ("bool", *INTEGERS, *DTYPES)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _type_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(tensor: torch.Tensor) -> str:
    if type(tensor) not in _PLAIN:
        return type(tensor).__name__
    return str(tensor.layout).removeprefix("torch.")
