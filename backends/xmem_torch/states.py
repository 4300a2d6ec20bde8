"""Optimizer states on PyTorch (2.13): uint8 tensors as `xmem.optim_rules` packs them, or float32.

A float32 state has the shape of its parameter, as in `torch.optim`; a packed one is flat, in the
order of the contiguous parameter. Which of the two a state is, its type tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xmem import optim_rules as rules
from xmem.codec import BLOCK, packed_bytes
from xmem.errors import UsageError
from xmem_torch import codec, eager

PIECE = 256
"""Blocks that PyTorch's own operations work on at once, so that what they make is bounded."""


def bits_for(parameter: Any, state_bits: int, min_elements: int) -> int:
    """Return the bits that a parameter's states take."""
    return 32 if parameter.numel() < min_elements else state_bits


def empty(parameter: Any, bits: int) -> torch.Tensor:
    """Return a state of zeros."""
    if bits == 32:
        return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    size = packed_bytes(parameter.numel(), bits)
    return torch.zeros(size, dtype=torch.uint8, device=parameter.device)


def bits_of(state: torch.Tensor, bits: int) -> int:
    """Return the bits of a state in a group of `bits`."""
    return 32 if state.dtype == torch.float32 else bits


def pack(values: torch.Tensor, moment: rules.Moment, bits: int, seed: int) -> torch.Tensor:
    """Return m or v as `optim_rules.pack_state` packs it."""
    x = values.detach().float()
    if bits == 32:
        return x.clone(memory_format=torch.contiguous_format)
    x = x.contiguous().reshape(-1)
    if bits == 4 or moment == "second":
        laid = torch.empty_like(x)
        for begin in range(0, x.numel(), PIECE * BLOCK):
            piece = slice(begin, begin + PIECE * BLOCK)
            laid[piece] = prepared(x[piece], moment, bits)
        x = laid
    style: Any = "plain" if moment == "first" else "floor"
    return codec.pack(x, bits, rules.seed_of_state(seed, moment), style=style)


def unpack(state: torch.Tensor, shape: Any, moment: rules.Moment, bits: int) -> torch.Tensor:
    """Return m or v, float32, in a parameter's shape."""
    if state.dtype == torch.float32:
        return state.detach().clone().view(shape)
    x = codec.unpack(state, torch.Size(shape).numel(), bits, torch.float32)
    return powers(x, moment, bits).view(shape)


def powers(x: torch.Tensor, moment: rules.Moment, bits: int) -> torch.Tensor:
    """Return m or v from what the codec gives, in its place."""
    if moment == "first":
        return x.mul_(x.abs()) if bits == 4 else x
    x.mul_(x)
    return x.mul_(x) if bits == 4 else x


def prepared(x: torch.Tensor, moment: rules.Moment, bits: int) -> torch.Tensor:
    """Return what the codec is given of m or v: flat, of whole blocks but for the last one."""
    if bits == 8:
        return root(x) if moment == "second" else x
    count = x.numel()
    blocks = -(-count // BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - count)).view(blocks, BLOCK)
    power, levels = (2, 7) if moment == "first" else (4, 15)
    return _laid_out(padded, power=power, levels=levels).reshape(-1)[:count]


def root(x: torch.Tensor) -> torch.Tensor:
    """Return square roots rounded to the nearest float32.

    PyTorch's own on a CPU is MKL's (`vsSqrt`), which is one bit off for one number in 20,000.
    """
    return x.double().sqrt_().float()


def _laid_out(x: torch.Tensor, *, power: int, levels: int) -> torch.Tensor:
    """See `optim_rules`: roots of blocks, whose stochastic rounding has the values as its mean."""
    magnitude = x.abs()
    roots = root(magnitude)
    if power == 4:
        roots = root(roots)
    largest = roots.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(1)
    least = 2.0**-24 if power == 4 else 2.0**-48
    fits = (largest < 0x7F800000) & (largest.view(torch.float32) >= least)
    pattern = (largest.view(torch.float32) / levels).view(torch.int32)
    pattern = ((pattern + 7) & ~7).clamp(min=0x00800000)
    scale = torch.where(fits, pattern, 0x3F800000).to(torch.int32).view(torch.float32)[:, None]
    k = (roots * (torch.ones_like(scale) / scale)).to(torch.int32).float()
    low, high = k * scale, (k + 1.0) * scale
    low, high = low * low, high * high
    if power == 4:
        low, high = low * low, high * high
    share = ((magnitude - low) / (high - low)).clamp(0.0, 1.0)
    laid = torch.where(fits[:, None], (k + share) * scale, roots)
    return torch.copysign(laid, x)


def check(state: Any, parameter: torch.Tensor, bits: int, name: str, kind: str) -> torch.Tensor:
    """Refuse a state that is not one of this parameter.

    Raises:
        UsageError: it has another type or size.
    """
    wanted = (packed_bytes(parameter.numel(), bits),) if bits != 32 else tuple(parameter.shape)
    if isinstance(state, torch.Tensor) and tuple(state.shape) == wanted:
        return state
    found = tuple(state.shape) if isinstance(state, torch.Tensor) else type(state).__name__
    raise UsageError(
        f"the state has {name!r} of shape {found} for a parameter of shape"
        f" {tuple(parameter.shape)}, and {kind} keeps it as {wanted}: it is of another model, or"
        " of another min_elements"
    )


def in_pieces(count: int, update: Callable[[int, int], None], *, blocks: int = PIECE) -> None:
    """Call a function with the first block and the number of blocks of each piece."""
    whole = -(-count // BLOCK)
    for first in range(0, whole, blocks):
        update(first, min(blocks, whole - first))


class Blocks:
    """A packed state that PyTorch's own operations read and write some blocks at a time."""

    def __init__(self, state: torch.Tensor, count: int, moment: rules.Moment, bits: int) -> None:
        self._state = state
        self._count = count
        self._moment: rules.Moment = moment
        self._bits = bits_of(state, bits)
        self._headers = -(-count // BLOCK)

    def get(self, first: int, blocks: int) -> torch.Tensor:
        """Return m or v, flat."""
        size = self._size(first, blocks)
        if self._bits == 32:
            begin = first * BLOCK
            return self._state.view(-1)[begin : begin + size].clone()
        x = torch.empty(size, dtype=torch.float32, device=self._state.device)
        eager.unpack(self._joined(first, blocks), self._bits, x)
        return powers(x, self._moment, self._bits)

    def put(self, first: int, blocks: int, x: torch.Tensor, seed: int) -> None:
        """Pack m or v; `seed` is the step's."""
        if self._bits == 32:
            begin = first * BLOCK
            self._state.view(-1)[begin : begin + x.numel()] = x
            return
        style: Any = "plain" if self._moment == "first" else "floor"
        packed = self._joined(first, blocks)
        # The hash of an element adds its index to the seed: a piece is a tensor of another seed.
        drawn = _moved(rules.seed_of_state(seed, self._moment), first * BLOCK)
        eager.pack(prepared(x, self._moment, self._bits), self._bits, drawn, style, packed)
        split = 4 * blocks
        self._state[4 * first : 4 * first + split] = packed[:split]
        at = self._codes_at(first)
        self._state[at : at + packed.numel() - split] = packed[split:]

    def _size(self, first: int, blocks: int) -> int:
        return min(self._count, (first + blocks) * BLOCK) - first * BLOCK

    def _codes_at(self, first: int) -> int:
        return 4 * self._headers + first * BLOCK * self._bits // 8

    def _joined(self, first: int, blocks: int) -> torch.Tensor:
        """Return a piece as a tensor of its own would be packed."""
        at = self._codes_at(first)
        length = packed_bytes(self._size(first, blocks), self._bits) - 4 * blocks
        headers = self._state[4 * first : 4 * (first + blocks)]
        return torch.cat([headers, self._state[at : at + length]])


def _moved(seed: int, first: int) -> int:
    """Return the seed with which an element has the random number of the one at `first` + it."""
    low, high = first & 0xFFFFFFFF, first >> 32
    return (seed + low * 0x9E3779B1 + high * 0x85EBCA6B) & 0xFFFFFFFF
