"""What is a parameter or a buffer, and what is a copy of one (PyTorch 2.13).

Autocast casts a weight wherever it is used, and saves the half copy for backward: a weight in
effect, whose rounding would be one of the model. The copy of a weight that is trained is found in
the graph behind it; one of a frozen weight has no graph, and is found by its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from xmem_torch.tensors import parts_of


class Owned:
    """The parameters and buffers of modules; parameters outside of modules count, too."""

    def __init__(self) -> None:
        self._storages: set[int] = set()
        self._frozen: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}

    def add(self, modules: Iterable[torch.nn.Module]) -> None:
        """Take up what modules hold by themselves."""
        for module in modules:
            held = (*module._parameters.values(), *module._buffers.values())
            self._storages |= storages([t for t in held if t is not None])
            for p in module._parameters.values():
                if p is None or p.requires_grad or torch.nn.parameter.is_lazy(p) or not p.dim():
                    continue
                if p.is_floating_point() and p.layout is torch.strided:
                    self._frozen.setdefault(tuple(p.shape[1:]), {})[id(p)] = p

    def forget(self) -> None:
        """Let go of parameters."""
        self._frozen.clear()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies in a parameter or a buffer."""
        if tensor.untyped_storage()._cdata in self._storages:
            return True
        base = _base(tensor)
        if isinstance(base, torch.nn.Parameter):  # a frozen one that is gathered for a pass
            return True
        return base.is_leaf and base.requires_grad

    def copied(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is a copy of a parameter, or a part of one."""
        base = _base(tensor)
        node: Any = base.grad_fn
        if node is None:
            return base.dtype in _HALF and self._is_frozen(base)
        while node is not None and node.name() in _COPIES:
            node = node.next_functions[0][0]
        return isinstance(node, _Leaf)

    def _is_frozen(self, base: torch.Tensor) -> bool:
        if not base.dim():
            return False
        rows = base.shape[0]
        for p in self._frozen.get(tuple(base.shape[1:]), {}).values():
            if not p.untyped_storage().nbytes():  # away: another layer's
                continue
            for first in {0, rows, p.shape[0] - rows}:  # attention casts parts of its projection
                part = p.detach()[first : first + rows]
                if 0 <= first <= p.shape[0] - rows and _is_cast(base, part):
                    return True
        return False


def storages(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return what tells the storages of dense tensors, and of the parts of others, apart."""
    parts = (part for tensor in tensors for part in parts_of(tensor))
    return {
        part.untyped_storage()._cdata
        for part in parts
        if part.layout is torch.strided and not torch.nn.parameter.is_lazy(part)
    }


def _is_cast(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether a tensor is a weight in another type; the first row tells most others apart."""
    return weight.device == tensor.device and all(
        torch.equal(weight[:rows].to(tensor.dtype), tensor[:rows]) for rows in (1, weight.shape[0])
    )


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor is a view of; what hooks are given is a view of what is saved."""
    return tensor if tensor._base is None else tensor._base


_HALF = (torch.float16, torch.bfloat16)
_Leaf = type(torch.zeros((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])
_COPIES = frozenset(
    f"{name}Backward0"
    for name in (
        "ToCopy", "Clone", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias",
        "Expand", "Squeeze", "Unsqueeze", "Select", "Slice", "Split", "SplitWithSizes", "Unbind",
    )
)  # fmt: skip
