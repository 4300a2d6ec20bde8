"""The block-wise codec, defined: how tensors are kept in 8, 4 or 2 bits an element.

One codec serves activations, optimizer states, weights and gradients on every backend. This module
is the definition, in NumPy; `xmem/native/codec.cc` and each backend's kernels give the same bytes
for the same values and seed.

A tensor, flattened in the order of its memory, is cut into blocks of 256. What is packed is one
header per block, then the codes of all blocks. A header is a float32, the block's scale, with the
block's mode in its three lowest bits; the scale is rounded up to make room for them. With the
largest magnitude in the block divided by the number of levels as scale s, a value x becomes
k = floor(|x| / s + u), u from a hash of the element's index and the seed, uniform in [0, 1):
stochastic rounding, so that the mean of the unpacked is x, to s / 65536. No random stream is
touched.

| mode | code | unpacks to | levels at 8, 4, 2 bits |
|---|---|---|---|
| signed | n + k, n - 1 - k if below 0 | +-k s; k = 0: +-t | 254, 14, 2 between both ends |
| positive | 0 for 0, else k + 1 | k s; k = 0: t | 254, 14, 2 |
| special | as plain; the two last codes are infinity and NaN | k = 0: +-t | 124, 5, - |
| floored | 0 for 0, else max(k, 1) | k s | 255, 15, 3 |
| plain | sign, k | +-k s | 127, 7, 1 |

In signed blocks the levels are shared out as the largest magnitudes on both sides of 0 are, so that
the step is least: GELU's outputs have hardly any below it. n, the number of codes for negative
values, is in the header above the mode (8 bits), and s is rounded up to make room for both.

t = s / 65536, at least the smallest normal float32 (2^-24 for float16): what is not 0 never
becomes 0, and no sign changes, so that a ReLU's mask survives in its packed output; without it the
error of an MLP's gradients is 20 times larger. The price is that 0 becomes t in signed blocks. The
style that is asked for chooses among the modes: "signs" (activations) signed or positive, "floor"
(second moments of optimizers, which are divided by) floored, "plain" plain. "nearest" (gradients
that are sent, whose errors are kept for the next ones) is as "signs" with u = 1/2: a mean over many
is off then, and a single value's error 0.7 of what it is otherwise. A block without a value other
than 0 unpacks to zeros in each.

Blocks that hold infinity or NaN are special: infinities and NaN come back where they were, among
finite values in 124 levels (5 at 4 bits); at 2 bits the whole block comes back as NaN. Denormals
are taken for 0 with their sign, so that the machine's setting for them does not matter. At 2 bits,
magnitudes beyond 2^126 come back as about that.

After Chen et al., "ActNN" (ICML 2021), and Liu et al., "GACT" (ICML 2022), which keep a minimum
beside the scale: sign and magnitude need half the header, and keep signs.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from xmem.errors import UsageError

Bits = Literal[8, 4, 2]
Style = Literal["signs", "plain", "floor", "nearest"]

BLOCK = 256
"""Elements that share a scale."""

BITS: tuple[Bits, ...] = (8, 4, 2)
STYLES: tuple[Style, ...] = ("signs", "plain", "floor", "nearest")
DTYPES = ("float32", "float16", "bfloat16")
"""What can be packed, in the order of the native codes."""

_SIGNED, _POSITIVE, _SPECIAL, _FLOORED, _PLAIN = range(5)
_MODE, _SPLIT = np.uint32(7), np.uint32(0x7FF)
_MAGNITUDE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_LEAST_NORMAL = np.uint32(0x00800000)
_LARGEST_AT_2_BITS = np.uint32(0x7E800000)
_NAN = np.uint32(0x7FC00000)

Array = np.ndarray[Any, Any]


def check_bits(bits: Any) -> None:
    """Refuse other numbers of bits than 8, 4 and 2.

    Raises:
        UsageError: names what was given and what there is.
    """
    if bits not in BITS or not isinstance(bits, int):
        raise UsageError(f"bits is {bits!r}; the codec has 8, 4 and 2.")


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that a number of elements take when packed.

    1.0157 an element at 8 bits, 0.5157 at 4, 0.2657 at 2, up to the padding of the last block.
    """
    full, rest = divmod(count, BLOCK)
    parts = 8 // bits
    return 4 * -(-count // BLOCK) + full * (BLOCK // parts) + -(-rest // parts)


def uniform(count: int, first: int, seed: int) -> Array:
    """Return the random numbers of a block, float32 in [0, 1), multiples of 2^-16.

    Murmur3's finalizer (Appleby, 2011) of an element's index and the seed: its low half serves the
    first half of a block, its high half the element 128 further on.

    Args:
        count: how many.
        first: the index of the block's first element in its tensor.
        seed: 32 bits.
    """
    half = BLOCK // 2
    with np.errstate(over="ignore"):
        started = np.uint32(seed & 0xFFFFFFFF) + np.uint32(first >> 32) * np.uint32(0x85EBCA6B)
        index = np.uint32(first & 0xFFFFFFFF) + np.arange(half, dtype=np.uint32)
        h = index * np.uint32(0x9E3779B1) + started
        h ^= h >> np.uint32(15)
        h *= np.uint32(0x85EBCA77)
        h ^= h >> np.uint32(13)
        h *= np.uint32(0xC2B2AE3D)
        h ^= h >> np.uint32(16)
    drawn: Array = np.concatenate([h & np.uint32(0xFFFF), h >> np.uint32(16)])[:count]
    numbers: Array = drawn.astype(np.float32) * np.float32(2.0**-16)
    return numbers


def levels(bits: int, mode: int) -> int:
    """Return how many steps the largest magnitude of a block is away from 0."""
    half, full = (1 << (bits - 1)) - 1, (1 << bits) - 1
    if mode == _POSITIVE:
        return full - 1
    if mode == _FLOORED:
        return full
    if mode == _SPECIAL:
        return half - 2 - (bits == 8)
    return half


def pack(values: Array, bits: int, seed: int, style: Style = "signs") -> Array:
    """Pack an array.

    Args:
        values: float32 or float16, or uint16 that holds bfloat16; any shape, read in C order.
        bits: 8, 4 or 2.
        seed: 32 bits; with other seeds the rounding is another; "nearest" has none.
        style: which modes blocks may have.

    Returns:
        `packed_bytes(values.size, bits)` bytes, uint8.
    """
    check_bits(bits)
    x = np.ascontiguousarray(_widened(values).reshape(-1))
    count = x.size
    headers = np.zeros(-(-count // BLOCK), np.uint32)
    codes = []
    for number in range(headers.size):
        first = number * BLOCK
        block = x[first : first + BLOCK]
        drawn = uniform(block.size, first, seed)
        if style == "nearest":
            drawn = np.full_like(drawn, 0.5)
        headers[number], found = _quantized(block, bits, drawn, style)
        codes.append(_joined(found, bits))
    return np.concatenate([headers.view(np.uint8), *codes]) if count else np.zeros(0, np.uint8)


def unpack(packed: Array, count: int, bits: int, dtype: str = "float32") -> Array:
    """Return what was packed, as a flat array of a dtype; bfloat16 as uint16."""
    check_bits(bits)
    blocks = -(-count // BLOCK)
    headers = packed[: 4 * blocks].view(np.uint32)
    least = np.float32(2.0**-24 if dtype == "float16" else 2.0**-126)
    largest = np.uint32(0x7F7F0000 if dtype == "bfloat16" else 0x7F7FFFFF).view(np.float32)
    found, at = [np.zeros(0, np.float32)], 4 * blocks
    for number in range(blocks):
        size = min(BLOCK, count - number * BLOCK)
        length = -(-size // (8 // bits))
        codes = _split(packed[at : at + length], bits, size)
        found.append(_dequantized(headers[number], codes, bits, least, largest))
        at += length
    return _narrowed(np.concatenate(found), dtype)


def _quantized(x: Array, bits: int, u: Array, style: Style) -> tuple[np.uint32, Array]:
    pattern = x.view(np.uint32)
    magnitude = pattern & _MAGNITUDE
    sign = np.where(magnitude > 0, pattern >> np.uint32(31), np.uint32(0)).astype(np.uint32)
    if not magnitude.any():
        return np.uint32(_POSITIVE), np.zeros(x.size, np.uint8)
    finite = magnitude < _INFINITE
    mode = _mode(sign, finite, style)
    if mode == _SPECIAL and bits == 2:
        return _LEAST_NORMAL | np.uint32(mode), np.zeros(x.size, np.uint8)
    if mode == _SIGNED:
        return _quantized_signed(magnitude, sign, bits, u)
    count = levels(bits, mode)
    scale = _scale(magnitude[finite].max(initial=np.uint32(0)), count, bits)
    flushed = _flushed(np.where(finite, magnitude, np.uint32(0)))
    v = flushed.view(np.float32) * (np.float32(1) / scale)
    k = np.minimum((v + u).astype(np.int32), count)
    if mode == _FLOORED:
        k = np.maximum(k, 1)
    if mode == _SPECIAL:
        k = np.where(finite, k, np.where(magnitude == _INFINITE, count + 1, count + 2))
        sign = np.where(magnitude > _INFINITE, np.uint32(0), sign).astype(np.uint32)
    code = k + 1 if mode == _POSITIVE else k
    if mode in (_SPECIAL, _PLAIN):
        code = code | (sign << np.uint32(bits - 1))
    code = np.where(magnitude > 0, code, 0)
    return scale.view(np.uint32) | np.uint32(mode), code.astype(np.uint8)


def _quantized_signed(
    magnitude: Array, sign: Array, bits: int, u: Array
) -> tuple[np.uint32, Array]:
    none = np.uint32(0)
    below, above = (magnitude[sign == side].max(initial=none) for side in (1, 0))
    negative, scale = _split_steps(below, above, bits)
    v = _flushed(magnitude).view(np.float32) * (np.float32(1) / scale)
    top = np.where(sign == 1, negative, (1 << bits) - 2 - negative)
    k = np.minimum((v + u).astype(np.int32), top)
    first = negative + 1
    code = np.where(sign == 1, first - 1 - k, first + k)
    return scale.view(np.uint32) | np.uint32(first << 3 | _SIGNED), code.astype(np.uint8)


def _split_steps(below: np.uint32, above: np.uint32, bits: int) -> tuple[int, np.float32]:
    """Return how many steps are below 0, and their size."""
    steps = (1 << bits) - 2
    if bits == 2:
        below, above = (min(side, _LARGEST_AT_2_BITS) for side in (below, above))
    a, b = (_flushed(np.asarray(side)).view(np.float32)[()] for side in (below, above))
    one, negative = np.float32(1), 0
    if a > 0 and b > 0:
        share = (a / b) / (one + a / b) if a <= b else one / (one + b / a)
        negative = min(max(int(share * np.float32(steps)), 1), steps - 1)
        more = min(negative + 1, steps - 1)
        if _step(a, b, more, steps) < _step(a, b, negative, steps):
            negative = more
    elif a > 0:
        negative = steps
    return negative, _rounded_up(_step(a, b, negative, steps), _SPLIT)


def _step(a: Any, b: Any, negative: int, steps: int) -> Any:
    """Return the step that reaches both ends, when so many of all are below 0."""
    below = a / np.float32(negative) if negative else np.float32(0)
    above = b / np.float32(steps - negative) if negative < steps else np.float32(0)
    return max(below, above)


def _flushed(magnitude: Array) -> Array:
    """Take denormals for 0."""
    normal: Array = np.where(magnitude < _LEAST_NORMAL, np.uint32(0), magnitude).astype(np.uint32)
    return normal


def _rounded_up(scale: Any, mask: np.uint32) -> np.float32:
    pattern = (np.float32(scale).view(np.uint32) + mask) & ~mask
    return np.float32(max(pattern, _LEAST_NORMAL).view(np.float32))


def _mode(sign: Array, finite: Array, style: Style) -> int:
    if not finite.all():
        return _SPECIAL
    if sign.any():
        return _SIGNED if style in ("signs", "nearest") else _PLAIN
    return {"floor": _FLOORED, "plain": _PLAIN}.get(style, _POSITIVE)


def _scale(largest: np.uint32, count: int, bits: int) -> np.float32:
    if bits == 2:
        largest = min(largest, _LARGEST_AT_2_BITS)
    return _rounded_up(largest.view(np.float32) / np.float32(count), _MODE)


def _dequantized(
    header: np.uint32, codes: Array, bits: int, least: np.float32, largest: np.float32
) -> Array:
    mode = int(header & _MODE)
    scale = (header & ~(_SPLIT if mode == _SIGNED else _MODE)).view(np.float32)
    tiny = max(scale * np.float32(2.0**-16), least)
    half = 1 << (bits - 1)
    k = codes.astype(np.int32) & (half - 1)
    sign = (codes & np.uint8(half)).astype(np.uint32) << np.uint32(32 - bits)
    if mode in (_POSITIVE, _FLOORED):
        k = codes.astype(np.int32) - (mode == _POSITIVE)
    if mode == _SIGNED:
        k = codes.astype(np.int32) - int(header >> np.uint32(3) & np.uint32(255))
        sign = np.where(k < 0, np.uint32(1 << 31), np.uint32(0))
        k = np.where(k < 0, -1 - k, k)
    with np.errstate(over="ignore"):
        x = np.minimum(k.astype(np.float32) * scale, largest)
    if mode == _POSITIVE:
        return np.where(codes == 0, np.float32(0), np.where(codes == 1, tiny, x))
    if mode == _FLOORED:
        return x
    if mode != _PLAIN:
        x = np.where(k == 0, tiny, x)
    pattern = x.astype(np.float32).view(np.uint32)
    if mode == _SPECIAL:
        count = levels(bits, mode)
        pattern = np.where(k == count + 1, _INFINITE, pattern)
        lost = (k == count + 2) | (bits == 2)
        pattern, sign = np.where(lost, _NAN, pattern), np.where(lost, np.uint32(0), sign)
    return (pattern | sign).astype(np.uint32).view(np.float32)


def _joined(codes: Array, bits: int) -> Array:
    parts = 8 // bits
    length = -(-codes.size // parts)
    padded = np.zeros(length * parts, np.uint8)
    padded[: codes.size] = codes
    rows = padded.reshape(parts, length)
    shifts = (np.arange(parts, dtype=np.uint8) * bits)[:, None]
    joined: Array = np.bitwise_or.reduce(rows << shifts, axis=0).astype(np.uint8)
    return joined


def _split(packed: Array, bits: int, count: int) -> Array:
    shifts = (np.arange(8 // bits, dtype=np.uint8) * bits)[:, None]
    codes: Array = (packed[None, :] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(-1)[:count]


def _widened(values: Array) -> Array:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def _narrowed(x: Array, dtype: str) -> Array:
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    pattern = x.view(np.uint32)
    rounded = (pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))) >> 16
    nan = (pattern >> np.uint32(16)) | np.uint32(0x40)
    narrow: Array = np.where(np.isnan(x), nan, rounded).astype(np.uint16)
    return narrow
