"""The codec of `xmem.codec` on torch tensors (PyTorch 2.13).

On a CPU by the native kernels; without a compiler, and on CUDA, by PyTorch's own operations
(`eager.py`), which give the same bytes.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from xmem.codec import Style, packed_bytes
from xmem.errors import NativeBuildError, XmemWarning
from xmem.native import codec as native
from xmem.native import exact as native_exact
from xmem_torch import eager

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(values: torch.Tensor, bits: int, seed: int, *, style: Style = "signs") -> torch.Tensor:
    """Return a tensor's packed bytes, uint8.

    Args:
        values: contiguous, float32, float16 or bfloat16; any shape.
        bits: 8, 4 or 2.
        seed: of the rounding, 32 bits.
        style: see `xmem.codec`.
    """
    count = values.numel()
    packed = torch.empty(packed_bytes(count, bits), dtype=torch.uint8, device=values.device)
    if _native(values.device.type):
        name = _NAMES[values.dtype]
        native.pack(values.data_ptr(), name, count, bits, seed, packed.data_ptr(), style)
    else:
        eager.pack(values.reshape(-1), bits, seed, style, packed)
    return packed


def unpack(packed: torch.Tensor, count: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what was packed, flat."""
    values = torch.empty(count, dtype=dtype, device=packed.device)
    if _native(packed.device.type):
        native.unpack(packed.data_ptr(), count, bits, _NAMES[dtype], values.data_ptr())
    else:
        eager.unpack(packed, bits, values)
    return values


def has_kernels(device: str) -> bool:
    """Say whether tensors on a device are packed by compiled kernels."""
    return _native(device)


def _native(device: str) -> bool:
    return device == "cpu" and _compiled()


@functools.cache
def _compiled() -> bool:
    try:
        libraries: tuple[Any, ...] = (native.load(), native_exact.load())
    except NativeBuildError as error:
        warnings.warn(
            "tensors are packed by PyTorch's own operations, exact and about 20 times slower: the"
            f" native kernels could not be compiled. {str(error).splitlines()[0]}",
            XmemWarning,
            stacklevel=4,
        )
        return False
    return all(libraries)
