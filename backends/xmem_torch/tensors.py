"""What is noted of a tensor to compare it with another one later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xmem.containers import leaves
from xmem.mismatch import sample_step
from xmem_torch.local_parts import local_part


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


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that a tensor consists of here: two or three of a sparse one."""
    tensor = local_part(tensor)
    names = _PARTS.get(tensor.layout)
    if names is None:
        return [tensor]
    return [getattr(tensor, name)() for name in names]


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),  # without underscores, of a coalesced one only
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
    torch.jagged: ("values", "offsets"),
}


def size_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, and of the indices of a sparse one."""
    return sum(_nbytes(part) for part in parts_of(tensor))


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    parts = [part for tensor in tensors for part in parts_of(tensor)]
    storages = [part.untyped_storage() for part in parts if part.layout is torch.strided]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    others = [_nbytes(part) for part in parts if part.layout is not torch.strided]
    return sum(sizes.values()) + sum(others)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())  # nbytes is not known of every layout
