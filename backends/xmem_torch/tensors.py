"""What is noted of a tensor to compare it with another one later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xmem.containers import leaves
from xmem.mismatch import sample_step


def version(tensor: torch.Tensor) -> int:
    """Return what counts up when a tensor is changed in place; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors are among them
        return [version(tensor) for tensor in tensors]


class _Known(dict[type, bool]):
    """Whether a type is a tensor's; asking PyTorch each time takes ten times as long."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, torch.Tensor)
        return self[kind]


_tensor_types = _Known()


def is_tensor(value: Any) -> bool:
    """Say whether a value is a tensor."""
    return _tensor_types[type(value)]


def versions(tree: Any) -> tuple[int, ...]:
    """Return the version counters of the tensors in nested containers."""
    return tuple(version(tensor) for tensor in leaves(tree, torch.Tensor))


def shown(shape: Any, dtype: Any) -> str:
    """Return the text of a tensor's shape and type."""
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def sample(tensor: torch.Tensor) -> Any:
    """Return some of the values as a NumPy array."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        return flat[:: sample_step(flat.numel())].double().cpu().resolve_neg().numpy()


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    others = [t.nbytes for t in tensors if t.layout is not torch.strided]
    return sum(sizes.values()) + sum(others)
