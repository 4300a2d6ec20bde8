"""The codec of `xmem.codec` by PyTorch's own operations, for devices without kernels of ours.

Works on pieces, so that what it needs beside the result is bounded. Integers stand for the unsigned
ones of the definition: patterns of magnitudes are never negative, and products wrap around.
"""

from __future__ import annotations

import torch

from xmem.codec import BLOCK, Style, levels

_SIGNED, _POSITIVE, _SPECIAL, _FLOORED, _PLAIN = range(5)
_MAGNITUDE, _INFINITE, _LEAST_NORMAL = 0x7FFFFFFF, 0x7F800000, 0x00800000
_LARGEST_AT_2_BITS, _NAN, _SIGN = 0x7E800000, 0x7FC00000, -0x80000000
_PIECE = {"cpu": 1 << 7, "cuda": 1 << 14}  # blocks at once


def pack(values: torch.Tensor, bits: int, seed: int, style: Style, packed: torch.Tensor) -> None:
    """Fill a buffer with the packed bytes of a flat tensor."""
    count = values.numel()
    blocks, parts = -(-count // BLOCK), 8 // bits
    headers = packed[: 4 * blocks].view(torch.int32)
    at, piece = 4 * blocks, _PIECE.get(values.device.type, 1 << 7)
    for first in range(0, blocks, piece):
        here = min(piece, blocks - first)
        x = values[first * BLOCK : (first + here) * BLOCK].float()
        size = x.numel()
        if size < here * BLOCK:
            x = torch.cat([x, x.new_zeros(here * BLOCK - size)])
        header, codes = _quantized(x.view(here, BLOCK), first, bits, seed, style)
        headers[first : first + here] = header
        full = size // BLOCK
        length = full * (BLOCK // parts)
        packed[at : at + length] = _joined(codes[:full], bits).reshape(-1)
        at += length
        if full < here:
            last = codes[full, : size - full * BLOCK]
            step = -(-last.numel() // parts)
            last = torch.nn.functional.pad(last, (0, step * parts - last.numel()))
            packed[at : at + step] = _joined(last[None], bits).reshape(-1)


def unpack(packed: torch.Tensor, bits: int, values: torch.Tensor) -> None:
    """Fill a flat tensor with what was packed."""
    count = values.numel()
    blocks, parts = -(-count // BLOCK), 8 // bits
    headers = packed[: 4 * blocks].view(torch.int32)
    least = 2.0**-24 if values.dtype == torch.float16 else 2.0**-126
    largest = torch.finfo(torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32).max
    at, piece = 4 * blocks, _PIECE.get(values.device.type, 1 << 7)
    for first in range(0, blocks, piece):
        here = min(piece, blocks - first)
        into = values[first * BLOCK : (first + here) * BLOCK]
        full = into.numel() // BLOCK
        length = full * (BLOCK // parts)
        codes = _split(packed[at : at + length].view(full, BLOCK // parts), bits)
        at += length
        header = headers[first : first + here]
        _put(_dequantized(header[:full], codes, bits, least, largest), into[: full * BLOCK])
        if full < here:
            rest = into[full * BLOCK :]
            codes = _split(packed[at:][None], bits)[:, : rest.numel()]
            _put(_dequantized(header[full:], codes, bits, least, largest), rest)


def _uniform(first: int, blocks: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return the random numbers of `xmem.codec.uniform`, a row a block."""
    block = torch.arange(first, first + blocks, device=device)[:, None]
    start = (seed + (block >> 24) * 0x85EBCA6B).to(torch.int32)
    index = (block * BLOCK + torch.arange(BLOCK // 2, device=device)).to(torch.int32)
    h = index * _wrapped(0x9E3779B1) + start
    h ^= _shifted(h, 15)
    h *= _wrapped(0x85EBCA77)
    h ^= _shifted(h, 13)
    h *= _wrapped(0xC2B2AE3D)
    h ^= _shifted(h, 16)
    return torch.cat([h & 0xFFFF, _shifted(h, 16)], 1).float() * 2.0**-16


def _wrapped(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shifted(h: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right without the sign."""
    return (h >> by) & ((1 << (32 - by)) - 1)


def _quantized(
    x: torch.Tensor, first: int, bits: int, seed: int, style: Style
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return headers, int32, and codes, uint8, of blocks."""
    pattern = x.view(torch.int32)
    magnitude = pattern & _MAGNITUDE
    there = magnitude > 0
    negative = (pattern < 0) & there
    finite = magnitude < _INFINITE
    without = {"floor": _FLOORED, "plain": _PLAIN}.get(style, _POSITIVE)
    mode = torch.where(negative.any(1), _PLAIN if style in ("floor", "plain") else _SIGNED, without)
    mode = torch.where(finite.all(1), mode, _SPECIAL)

    steps = torch.zeros_like(mode)
    for number in range(5):
        steps = torch.where(mode == number, levels(bits, number), steps)
    if bits == 2:  # has no codes for infinity and NaN, and none are read
        steps = steps.clamp(min=1)
    largest = torch.where(finite, magnitude, 0).amax(1)
    if bits == 2:
        largest = largest.clamp(max=_LARGEST_AT_2_BITS)
    quotient = largest.view(torch.float32) / steps.to(torch.float32)
    scale_pattern = ((quotient.view(torch.int32) + 7) & ~7).clamp(min=_LEAST_NORMAL)
    split = mode == _SIGNED
    below, split_pattern = _split_steps(magnitude, negative, bits)
    scale_pattern = torch.where(split, split_pattern, scale_pattern)
    scale = scale_pattern.view(torch.float32)
    inverse = torch.ones_like(scale) / scale

    flushed = torch.where(finite & (magnitude >= _LEAST_NORMAL), magnitude, 0)
    v = flushed.view(torch.float32) * inverse[:, None]
    u = 0.5 if style == "nearest" else _uniform(first, x.shape[0], seed, x.device)
    k = (v + u).to(torch.int32)
    most = torch.where(negative, below[:, None], (1 << bits) - 2 - below[:, None])
    k = torch.minimum(k, torch.where(split[:, None], most, steps[:, None]).to(torch.int32))
    k = torch.where((mode == _FLOORED)[:, None], k.clamp(min=1), k)
    special = (mode == _SPECIAL)[:, None]
    beyond = steps[:, None].to(torch.int32) + torch.where(magnitude == _INFINITE, 1, 2)
    k = torch.where(special & ~finite, beyond.to(torch.int32), k)
    code = k + (mode == _POSITIVE)[:, None]
    has_sign = ((mode == _SPECIAL) | (mode == _PLAIN))[:, None]
    sign = negative & has_sign & (magnitude <= _INFINITE)
    code = torch.where(there, code | (sign.to(torch.int32) << (bits - 1)), 0)
    zero = below[:, None] + 1
    code = torch.where(split[:, None], torch.where(negative, below[:, None] - k, zero + k), code)

    empty = ~there.any(1)
    fields = torch.where(split, (below + 1) << 3, 0) | mode
    header = torch.where(empty, _POSITIVE, scale_pattern | fields.to(torch.int32))
    if bits == 2:
        lost = mode == _SPECIAL
        header = torch.where(lost, _LEAST_NORMAL | _SPECIAL, header)
        code = torch.where(lost[:, None], 0, code)
    return header.to(torch.int32), code.to(torch.uint8)


def _split_steps(
    magnitude: torch.Tensor, negative: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many steps of blocks with both signs are below 0, and the scales' patterns."""
    steps = (1 << bits) - 2
    normal = torch.where(magnitude < _LEAST_NORMAL, 0, magnitude)
    sides = [torch.where(negative == side, normal, 0).amax(1) for side in (True, False)]
    if bits == 2:
        sides = [side.clamp(max=_LARGEST_AT_2_BITS) for side in sides]
    a, b = (side.to(torch.int32).view(torch.float32) for side in sides)
    share = torch.where(a <= b, (a / b) / (1 + a / b), 1 / (1 + b / a))
    share = torch.where((a > 0) & (b > 0), share, 0.0)
    below = (share * steps).to(torch.int32).clamp(1, steps - 1)
    more = (below + 1).clamp(max=steps - 1)
    below = torch.where(_step(a, b, more, steps) < _step(a, b, below, steps), more, below)
    below = torch.where(b > 0, torch.where(a > 0, below, 0), torch.where(a > 0, steps, 0))
    pattern = _step(a, b, below, steps).view(torch.int32)
    return below, ((pattern + 0x7FF) & ~0x7FF).clamp(min=_LEAST_NORMAL)


def _step(a: torch.Tensor, b: torch.Tensor, below: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the step that reaches both ends, when so many of all are below 0."""
    one = torch.where(below > 0, a / below, 0.0)
    return torch.maximum(one, torch.where(below < steps, b / (steps - below), 0.0))


def _dequantized(
    header: torch.Tensor, codes: torch.Tensor, bits: int, least: float, largest: float
) -> torch.Tensor:
    mode = (header & 7)[:, None]
    split = mode == _SIGNED
    scale = (header & torch.where((header & 7) == _SIGNED, ~0x7FF, ~7).to(torch.int32)).view(
        torch.float32
    )[:, None]
    tiny = (scale * 2.0**-16).clamp(min=least)
    half = 1 << (bits - 1)
    c = codes.to(torch.int32)
    unsigned = (mode == _POSITIVE) | (mode == _FLOORED)
    k = torch.where(unsigned, c - (mode == _POSITIVE).to(torch.int32), c & (half - 1))
    d = c - ((header >> 3) & 255)[:, None]
    k = torch.where(split, torch.where(d < 0, -1 - d, d), k)
    x = (k.float() * scale).clamp(max=largest)
    x = torch.where((k == 0) & (mode != _FLOORED) & (mode != _PLAIN), tiny, x)
    x = torch.where((c == 0) & unsigned, 0.0, x)
    pattern = x.view(torch.int32)
    turned = torch.where(split, d < 0, ~unsigned & ((c & half) != 0))
    sign = torch.where(turned, _SIGN, 0).to(torch.int32)
    special, count = mode == _SPECIAL, levels(bits, _SPECIAL)
    pattern = torch.where(special & (k == count + 1), _INFINITE, pattern)
    lost = special & ((k == count + 2) | (bits == 2))
    pattern = torch.where(lost, _NAN, pattern | sign)
    return pattern.to(torch.int32).view(torch.float32)


def _put(found: torch.Tensor, into: torch.Tensor) -> None:
    found = found.reshape(-1)
    into.copy_(found)
    if into.dtype == torch.bfloat16:  # PyTorch's vectors turn NaN into another one (2.13, CPU)
        into.view(torch.int16).masked_fill_(found.isnan(), _NAN >> 16)


def _joined(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Put the parts of each row beside one another in bytes."""
    parts = 8 // bits
    rows = codes.view(codes.shape[0], parts, codes.shape[1] // parts)
    joined = rows[:, 0]
    for part in range(1, parts):
        joined = joined | (rows[:, part] << (part * bits))
    return joined


def _split(packed: torch.Tensor, bits: int) -> torch.Tensor:
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (part * bits)) & mask for part in range(8 // bits)], 1)
