"""The library of lossless packing (`exact.cc`); all addresses. See `xmem.exact`."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from xmem.native.codec import open_library


@functools.cache
def load() -> Any:
    """Return the library, its functions declared.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    library = open_library("exact")
    address, integer, count, pattern = (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_uint32,
    )
    for name, result, arguments in (
        ("two_valued", integer, [address, integer, count, ctypes.POINTER(pattern)]),
        ("pack_bits", None, [address, integer, count, address]),
        ("unpack_bits", None, [address, count, integer, pattern, address]),
        ("widest", ctypes.c_uint64, [address, integer, count]),
        ("pack_offsets", None, [address, integer, count, integer, address]),
        ("unpack_offsets", None, [address, count, integer, integer, address]),
    ):
        function = getattr(library, f"xmem_exact_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def second_value(values: int, itemsize: int, count: int) -> int | None:
    """See `xmem.exact.second_value`; ends at the first value too many."""
    found = ctypes.c_uint32()
    if load().xmem_exact_two_valued(values, itemsize, count, ctypes.byref(found)):
        return found.value
    return None


def pack_bits(values: int, itemsize: int, count: int, packed: int) -> None:
    """See `xmem.exact.pack_bits`."""
    load().xmem_exact_pack_bits(values, itemsize, count, packed)


def unpack_bits(packed: int, count: int, itemsize: int, pattern: int, values: int) -> None:
    """See `xmem.exact.unpack_bits`."""
    load().xmem_exact_unpack_bits(packed, count, itemsize, pattern, values)


def offset_width(values: int, itemsize: int, count: int) -> int | None:
    """See `xmem.exact.offset_width`."""
    largest = load().xmem_exact_widest(values, itemsize, count)
    for width in (1, 2, 4):
        if width < itemsize and largest < 1 << (8 * width):
            return width
    return None


def pack_offsets(values: int, itemsize: int, count: int, width: int, packed: int) -> None:
    """See `xmem.exact.pack_offsets`."""
    load().xmem_exact_pack_offsets(values, itemsize, count, width, packed)


def unpack_offsets(packed: int, count: int, itemsize: int, width: int, values: int) -> None:
    """See `xmem.exact.unpack_offsets`."""
    load().xmem_exact_unpack_offsets(packed, count, itemsize, width, values)
