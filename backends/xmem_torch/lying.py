"""How a tensor lies in its memory, and in the memory of what is unpacked for it (PyTorch 2.13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Lie:
    """The part of a storage that a tensor's elements take, as one flat piece of memory.

    Attributes:
        key: tells parts of one storage apart.
        stride: the tensor's strides in the flat piece.
        numel: the flat piece's elements.
    """

    key: tuple[object, ...]
    stride: Sequence[int]
    numel: int
    _copied: Sequence[int] | None  # the order of dimensions to copy in, where there are gaps

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements: a view of the memory, or a copy where they lie apart."""
        tensor = tensor.detach()
        if self._copied is None:
            return tensor.as_strided((self.numel,), (1,))
        for dim, step in enumerate(tensor.stride()):
            if step == 0:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor.permute(*self._copied).reshape(-1)


def lie(tensor: torch.Tensor) -> Lie:
    """Say how a tensor lies.

    Whatever order its dimensions lie in, a dense tensor is one piece, and so is one that repeats
    elements (expanded, sliding windows). Elements that lie apart, as of one of three in a joint
    projection, are taken together in the order of their memory.
    """
    size, stride = tensor.shape, tensor.stride()
    steps = [(step, n, dim) for dim, (step, n) in enumerate(zip(stride, size, strict=True))]
    span = 1 + sum((n - 1) * step for step, n, _ in steps)
    distinct = prod(n for step, n, _ in steps if step)
    offset = tensor.storage_offset()
    if span <= distinct:
        return Lie((offset, span), stride, span, None)
    order = sorted(steps, key=lambda s: (-s[0], -s[1]))
    dense, at = [0] * len(size), 1
    for step, n, dim in reversed(order):
        if step:
            dense[dim] = at
            at *= n
    key = (offset, *((step, n) for step, n, _ in order))
    return Lie(key, dense, distinct, [dim for _, _, dim in order])
