"""Lossless packing, defined: masks as bits, integers as offsets of few bytes.

What backward reads is often no number at all: a mask, noise that is 0 or one other value
(dropout), the places that a pooling took its maxima from. This module is the definition, in NumPy;
`xmem/native/exact.cc` and each backend's kernels give the same bytes.

* Bits: element i is bit i % 8 of byte i // 8; set where the element's pattern is not 0.
* Offsets: blocks of 256. First the least value of each block as an int64, then for each element how
  far it is above it, unsigned, in 1, 2 or 4 bytes: as many as the widest block needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xmem.codec import BLOCK

INTEGERS = ("int16", "int32", "int64")
"""What offsets are tried for."""

Array = np.ndarray[Any, Any]


def bits_bytes(count: int) -> int:
    """Return the bytes of a number of bits."""
    return -(-count // 8)


def offsets_bytes(count: int, width: int) -> int:
    """Return the bytes of a number of integers packed as offsets of a width."""
    return 8 * -(-count // BLOCK) + width * count


def second_value(values: Array) -> int | None:
    """Return the pattern of the only value beside 0, 0 if all are 0; None if there are more.

    Args:
        values: float32 or of two bytes an element; the negative zero is a value beside 0.
    """
    patterns = values.reshape(-1).view(np.uint32 if values.itemsize == 4 else np.uint16)
    others = patterns[patterns != 0]
    if not others.size:
        return 0
    return int(others[0]) if (others == others[0]).all() else None


def pack_bits(values: Array) -> Array:
    """Return which elements are not 0 in every bit, a bit each."""
    patterns = values.reshape(-1).view(f"u{values.itemsize}")
    return np.packbits(patterns != 0, bitorder="little")


def unpack_bits(packed: Array, count: int, itemsize: int, pattern: int) -> Array:
    """Return a pattern where the bit is set and 0 elsewhere, as unsigned integers."""
    bits = np.unpackbits(packed, count=count, bitorder="little")
    values: Array = bits.astype(f"u{itemsize}") * np.array(pattern, f"u{itemsize}")
    return values


def offset_width(values: Array) -> int | None:
    """Return in how many bytes an element's offset fits; None if that saves nothing."""
    offsets = _offsets(values)[1]
    largest = int(offsets.max(initial=np.uint64(0)))
    for width in (1, 2, 4):
        if width < values.itemsize and largest < 1 << (8 * width):
            return width
    return None


def pack_offsets(values: Array, width: int) -> Array:
    """Return the least values of the blocks, and offsets of a width."""
    least, offsets = _offsets(values)
    narrow = offsets.astype(f"u{width}")
    return np.concatenate([least.view(np.uint8), narrow.view(np.uint8)])


def unpack_offsets(packed: Array, count: int, width: int, dtype: str) -> Array:
    """Return the integers."""
    blocks = -(-count // BLOCK)
    least = packed[: 8 * blocks].view(np.int64)
    offsets = packed[8 * blocks :].view(f"u{width}").astype(np.int64)
    return (offsets + np.repeat(least, BLOCK)[:count]).astype(dtype)


def _offsets(values: Array) -> tuple[Array, Array]:
    flat = values.reshape(-1).astype(np.int64)
    least = np.array(
        [flat[first : first + BLOCK].min() for first in range(0, flat.size, BLOCK)], np.int64
    )
    with np.errstate(over="ignore"):  # the difference of two int64 fits an uint64
        offsets = flat.view(np.uint64) - np.repeat(least, BLOCK)[: flat.size].view(np.uint64)
    return least, offsets
