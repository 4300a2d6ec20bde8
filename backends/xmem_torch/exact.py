"""Lossless packing of `xmem.exact` on torch tensors (PyTorch 2.13): masks and integers.

On a CPU by the native kernels, elsewhere by PyTorch's own operations, which give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from xmem.codec import BLOCK
from xmem.exact import bits_bytes, offsets_bytes
from xmem.native import exact as native
from xmem_torch.codec import has_kernels

_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bits
_PIECE = 1 << 20  # elements at once, a multiple of 8


def second_value(values: torch.Tensor) -> int | None:
    """See `xmem.exact.second_value`.

    Not asked on CUDA, where it would wait for the device: dropout keeps a bool mask there.
    """
    if values.device.type != "cpu":
        return None
    size = values.element_size()
    if has_kernels("cpu"):
        return native.second_value(values.data_ptr(), size, values.numel())
    patterns = values.view(_UNSIGNED[size])
    others = patterns[:1024][patterns[:1024] != 0]
    if others.numel() and (others != others[0]).any():
        return None
    found: set[int] = set()
    for piece in patterns.split(_PIECE):
        others = piece[piece != 0]
        if others.numel():
            found |= {int(others.min()), int(others.max())}
        if len(found) > 1:
            return None
    return (found.pop() if found else 0) & ((1 << 8 * size) - 1)


def pack_bits(values: torch.Tensor) -> torch.Tensor:
    """See `xmem.exact.pack_bits`; of a flat tensor."""
    count, size = values.numel(), values.element_size()
    packed = torch.empty(bits_bytes(count), dtype=torch.uint8, device=values.device)
    if has_kernels(values.device.type):
        native.pack_bits(values.data_ptr(), size, count, packed.data_ptr())
        return packed
    shifts = torch.arange(8, device=values.device, dtype=torch.uint8)
    for number, piece in enumerate(values.view(_UNSIGNED[size]).split(_PIECE)):
        bits = torch.nn.functional.pad(piece != 0, (0, -piece.numel() % 8)).view(-1, 8)
        joined = (bits.to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)
        first = number * _PIECE // 8
        packed[first : first + joined.numel()] = joined
    return packed


def unpack_bits(packed: torch.Tensor, count: int, dtype: torch.dtype, pattern: int) -> torch.Tensor:
    """Return a flat tensor that holds a pattern where a bit is set, and 0 elsewhere."""
    values = torch.empty(count, dtype=dtype, device=packed.device)
    size = values.element_size()
    if has_kernels(packed.device.type):
        native.unpack_bits(packed.data_ptr(), count, size, pattern, values.data_ptr())
        return values
    signed = pattern - (1 << 8 * size) if size > 1 and pattern >> (8 * size - 1) else pattern
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    into = values.view(_UNSIGNED[size])
    for number, piece in enumerate(packed.split(_PIECE // 8)):
        bits = ((piece[:, None] >> shifts) & 1).view(-1)[: count - number * _PIECE]
        first = number * _PIECE
        into[first : first + bits.numel()] = bits.to(into.dtype) * signed
    return values


def offset_width(values: torch.Tensor) -> int | None:
    """See `xmem.exact.offset_width`; of a flat tensor."""
    size = values.element_size()
    if has_kernels(values.device.type):
        return native.offset_width(values.data_ptr(), size, values.numel())
    largest = 0
    for blocks in _blocks(values):
        low, high = blocks.amin(1), blocks.amax(1)
        least, most = int((high - low).min()), int((high - low).max())
        largest = max(largest, most, 1 << 63 if least < 0 else 0)  # int64 wraps around
    fitting = (w for w in (1, 2, 4) if w < size and largest < 1 << (8 * w))
    return next(fitting, None)


def pack_offsets(values: torch.Tensor, width: int) -> torch.Tensor:
    """See `xmem.exact.pack_offsets`; of a flat tensor."""
    count, size = values.numel(), values.element_size()
    packed = torch.empty(offsets_bytes(count, width), dtype=torch.uint8, device=values.device)
    if has_kernels(values.device.type):
        native.pack_offsets(values.data_ptr(), size, count, width, packed.data_ptr())
        return packed
    least, offsets = _parts(packed, count, width)
    at = row = 0
    for blocks in _blocks(values):
        low = blocks.amin(1)
        least[row : row + low.numel()] = low
        flat = (blocks - low[:, None]).view(-1)[: count - at]
        offsets[at : at + flat.numel()] = flat.to(offsets.dtype)
        row, at = row + low.numel(), at + flat.numel()
    return packed


def unpack_offsets(
    packed: torch.Tensor, count: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the integers, flat."""
    values = torch.empty(count, dtype=dtype, device=packed.device)
    if has_kernels(packed.device.type):
        size = values.element_size()
        native.unpack_offsets(packed.data_ptr(), count, size, width, values.data_ptr())
        return values
    least, offsets = _parts(packed, count, width)
    rows = _PIECE // BLOCK
    for number, piece in enumerate(offsets.split(_PIECE)):
        low = least[number * rows : (number + 1) * rows].repeat_interleave(BLOCK)
        wide = (piece.long() & ((1 << 8 * width) - 1)) + low[: piece.numel()]
        first = number * _PIECE
        values[first : first + piece.numel()] = wide.to(dtype)
    return values


def _parts(packed: torch.Tensor, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = -(-count // BLOCK)
    return packed[: 8 * blocks].view(torch.int64), packed[8 * blocks :].view(_UNSIGNED[width])


def _blocks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield pieces as int64, a row a block; the last row is filled up with its last value."""
    for piece in values.split(_PIECE):
        wide = piece.long()
        missing = -wide.numel() % BLOCK
        if missing:
            wide = torch.cat([wide, wide[-1:].expand(missing)])
        yield wide.view(-1, BLOCK)
