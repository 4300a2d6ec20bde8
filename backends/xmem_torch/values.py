"""What flows from stage to stage, as a run holds it, and tensors that are parts of it.

Whether a tensor lies in a value is asked by the address of its storage, which no other storage gets
while a weak reference to it is held (`StorageWeakRef`, PyTorch 2.13). So it is known of values that
the run does not hold, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from xmem_torch.tensors import version, versions_of


class Value:
    """The tensors in a stage's output: aliases without their graph.

    Args:
        tensors: the tensors.

    Attributes:
        tensors: the aliases.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self._versions = versions_of(self.tensors)

    def changed(self, leaf: int) -> bool:
        """Say whether one of them has been changed in place since."""
        return version(self.tensors[leaf]) != self._versions[leaf]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that is one of a value's, or a view of it: of any copy of that value.

    Attributes:
        number: of the value.
        leaf: which of the value's tensors.
        whole: that tensor's shape and strides.
        shape: its own.
        stride: its own.
        offset: from where that tensor begins, in elements.
    """

    number: int
    leaf: int
    whole: tuple[torch.Size, tuple[int, ...]]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, value: Value) -> torch.Tensor | None:
        """Return the part of a copy of the value; None where the copy is laid out otherwise."""
        whole = value.tensors[self.leaf] if self.leaf < len(value.tensors) else None
        if whole is None or (whole.shape, whole.stride()) != self.whole:
            return None
        if (self.shape, self.stride) == self.whole:
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class Places:
    """Where values lie; it holds none of them."""

    def __init__(self) -> None:
        self._wholes: dict[int, list[_Whole]] = {}

    def add(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Note where the tensors of a value lie."""
        for leaf, tensor in enumerate(tensors):
            if _plain(tensor):
                whole = _Whole(number, leaf, tensor)
                self._wholes.setdefault(whole.storage.cdata, []).append(whole)

    def part(self, tensor: torch.Tensor, leaves: Collection[tuple[int, int]]) -> Part | None:
        """Return which part a tensor is of one of some values' tensors; None where of none.

        Args:
            tensor: the tensor.
            leaves: numbers of values, and which of their tensors.
        """
        for whole in self._around(tensor) if leaves else ():
            if whole.key in leaves and (part := whole.part(tensor)):
                return part
        return None

    def unchanged(self, tensor: torch.Tensor, numbers: Collection[int]) -> Part | None:
        """Return which part of one of some values a tensor is that is as it was."""
        for whole in self._around(tensor):
            known = whole.key[0] in numbers and whole.version == version(tensor)
            if known and (part := whole.part(tensor)):
                return part
        return None

    def _around(self, tensor: torch.Tensor) -> Iterable[_Whole]:
        """Return what lies in the same storage, the latest first."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return ()
        wholes = self._wholes.get(tensor.untyped_storage()._cdata)
        if wholes is None or not _plain(tensor) or tensor.numel() == 0:
            return ()
        return reversed(wholes)


class _Whole:
    """Where a tensor of a value lies.

    Args:
        number: of the value.
        leaf: which of the value's tensors it is.
        tensor: the tensor.
    """

    def __init__(self, number: int, leaf: int, tensor: torch.Tensor) -> None:
        self.key = number, leaf
        self.version = version(tensor)
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self._geometry = tensor.shape, tensor.stride()
        self._dtype = tensor.dtype
        self._offset = tensor.storage_offset()
        # Between the elements of a tensor with gaps there may be anything.
        self._elements = tensor.numel() if _extent(tensor) == tensor.numel() else 0

    def part(self, tensor: torch.Tensor) -> Part | None:
        """Return which part of it a tensor in the same storage is."""
        shape, stride = tensor.shape, tensor.stride()
        offset = tensor.storage_offset() - self._offset
        same = offset == 0 and (shape, stride) == self._geometry
        inside = 0 <= offset <= self._elements - _extent(tensor)
        if tensor.dtype != self._dtype or not (same or inside):
            return None
        return Part(*self.key, self._geometry, shape, stride, offset)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def _extent(tensor: torch.Tensor) -> int:
    """Return how many elements lie from its first to its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * stride for length, stride in sizes)
