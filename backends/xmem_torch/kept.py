"""What a stage of a plan keeps of what it saves for backward (PyTorch 2.13).

A saved tensor is kept as a part of a value that the stage reads, by itself, or, where the plan says
so, in few bits or in a depot. Parameters and buffers are kept by themselves always, and so is what
lies in the stage's own output, which is held anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from xmem.compressing import MIN_BYTES, next_seed
from xmem.saving import Choice
from xmem.stage_options import AS_IS
from xmem_torch import codec
from xmem_torch.held import Packed, Place, packed_by_codec, packed_exactly, place
from xmem_torch.leaving import Absent, Leaving
from xmem_torch.lying import lie
from xmem_torch.owned import Owned
from xmem_torch.refusals import saves_early
from xmem_torch.tensors import version
from xmem_torch.values import Part, Places, Value

Kept = Part | Place | Absent | tuple[torch.Tensor, int]


class Keeper:
    """Takes what one pass of a stage saves.

    Args:
        places: where the values lie that the stage reads.
        read: which of them it reads, see `Places.part`.
        choice: what becomes of all else.
        modules: whose parameters and buffers are kept as they are.

    Attributes:
        kept: what is kept, in the order in which it was saved.
    """

    def __init__(
        self,
        places: Places,
        read: Collection[tuple[int, int]],
        choice: Choice,
        modules: Iterable[Any],
    ) -> None:
        self.kept: list[Kept | None] = []
        self._places = places
        self._read = read
        self._bits = choice.bits
        self._leaving: Leaving | None = None
        if choice.away is not None and choice.away.depot.failure is None:
            self._leaving = Leaving(choice.away)
        self._owned = Owned()
        if choice != AS_IS:
            self._owned.add(modules)
        self._packed: dict[Any, Packed] = {}
        self._lies: list[tuple[int, StorageWeakRef, Sequence[int], Sequence[int], int]] = []

    def save(self, tensor: torch.Tensor, saver: FrameType) -> None:
        """Take a tensor.

        Args:
            tensor: what is saved.
            saver: the frame that called the operation that saves it.
        """
        self.kept.append(self._form(tensor, saver))

    def ended(self, outputs: Iterable[torch.Tensor]) -> None:
        """Take back as it is what lies in the memory of the outputs."""
        if self._leaving is not None:
            self._leaving.ended()
        held = {output.untyped_storage()._cdata: output.detach() for output in outputs}
        for index, storage, size, stride, offset in self._lies:
            if storage.cdata in held:
                alias = held[storage.cdata].as_strided(size, stride, offset)
                self.kept[index] = alias, version(alias)
        self._lies.clear()
        self._packed.clear()

    def _form(self, tensor: torch.Tensor, saver: FrameType) -> Kept:
        part = self._places.part(tensor, self._read)
        if part is not None:
            return part
        if self._leaving is not None and self._may_go(tensor, saver):
            self._note_lie(tensor)
            return self._leaving.left(tensor)
        if (
            self._bits is not None
            and tensor.dtype in codec.DTYPES.values()
            and self._may_go(tensor, saver)
        ):
            self._note_lie(tensor)
            return self._place(tensor, self._bits)
        alias = tensor.detach()  # a node that holds its own output is a cycle that is never freed
        return alias, version(alias)

    def _may_go(self, tensor: torch.Tensor, saver: FrameType) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.nbytes >= MIN_BYTES
            and not (tensor.is_neg() or tensor.is_conj())
            and not self._owned.holds(tensor)
            and not self._owned.copied(tensor)
            and not saves_early(saver.f_code)
        )

    def _note_lie(self, tensor: torch.Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        where = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._lies.append((len(self.kept), storage, *where))

    def _place(self, tensor: torch.Tensor, bits: int) -> Place:
        lies = lie(tensor)
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, lies.key, version(tensor))
        packed = self._packed.get(key)
        if packed is None:
            flat = lies.flat(tensor)
            packed = packed_exactly(flat, storage)
            if packed is None:
                packed = packed_by_codec(flat, storage, bits, next_seed())
            self._packed[key] = packed
        return place(tensor, packed, lies.stride)


def taken(found: Kept, value: Value | None) -> tuple[torch.Tensor | None, bool]:
    """Return a tensor that is kept, and whether it was changed in place since.

    Args:
        found: how it is kept.
        value: a copy of the value that it is a part of.
    """
    if isinstance(found, Part):
        tensor = None if value is None else found.of(value)
        return tensor, value is not None and value.changed(found.leaf)
    if isinstance(found, (Place, Absent)):
        changed = version(found.witness) != found.version
        return (None if changed else found.tensor()), changed
    alias, was = found
    return alias, version(alias) != was
