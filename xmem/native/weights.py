"""The library of packed weights (`weights.cc`), compiled on first use; see `xmem.weights_format`.

All arguments that name memory are addresses; scratch is the caller's, so that it is counted.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from xmem.codec import DTYPES
from xmem.native.codec import open_library
from xmem.weights_format import Packing

PARTS = 64
"""How many parts the rows are shared out in, each with scratch of its own."""


@functools.cache
def load() -> Any:
    """Return the library, its functions declared.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    library = open_library("weights")
    address, integer, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.xmem_weights_pack.argtypes = [
        address, integer, count, count, integer, integer, address, address,
        ctypes.POINTER(ctypes.c_double),
    ]  # fmt: skip
    library.xmem_weights_unpack.argtypes = [
        address, count, count, integer, integer, integer, address,
    ]  # fmt: skip
    for product in (library.xmem_weights_linear, library.xmem_weights_dynamic):
        product.argtypes = [
            address, count, address, count, count, integer, integer, address, address,
        ]  # fmt: skip
        product.restype = None
    library.xmem_weights_pack.restype = library.xmem_weights_unpack.restype = None
    library.xmem_weights_dynamic_bytes.argtypes = [count, count]
    library.xmem_weights_dynamic_bytes.restype = count
    return library


def pack(values: int, dtype: str, packing: Packing, packed: int) -> tuple[float, float]:
    """Pack memory into memory.

    Returns:
        The squared norms of the error and of the values; not finite where a value is not.
    """
    scratch = (ctypes.c_float * (PARTS * (packing.columns + packing.blocks)))()
    norms = (ctypes.c_double * 2)()
    load().xmem_weights_pack(
        values, DTYPES.index(dtype), packing.rows, packing.columns, packing.bits, packing.block,
        packed, ctypes.addressof(scratch), norms,
    )  # fmt: skip
    return norms[0], norms[1]


def unpack(packed: int, rows: int, packing: Packing, dtype: str, values: int) -> None:
    """Unpack a number of rows into memory."""
    load().xmem_weights_unpack(
        packed, rows, packing.columns, packing.bits, packing.block, DTYPES.index(dtype), values
    )


def product_scratch_bytes(packing: Packing, batch: int, *, dynamic: bool) -> int:
    """Return the bytes of scratch that `product` needs."""
    if dynamic:
        return int(load().xmem_weights_dynamic_bytes(batch, packing.columns))
    return 4 * PARTS * packing.columns


def product(
    x: int, batch: int, packed: int, packing: Packing, scratch: int, y: int, *, dynamic: bool
) -> None:
    """Write x (batch, columns) times the transposed weight to y (batch, rows), all float32."""
    library = load()
    run = library.xmem_weights_dynamic if dynamic else library.xmem_weights_linear
    run(
        x, batch, packed, packing.rows, packing.columns, packing.bits, packing.block, scratch, y
    )  # fmt: skip
