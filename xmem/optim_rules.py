"""Update rules whose states take few bits, defined in NumPy, and the numbers that a step needs.

`xmem/native/optimizers.cc` and each backend's kernels give the same states, bit for bit, for the
same gradients, parameters and steps (Adafactor's sums apart, which are float64 of another order).

States are kept as `xmem.codec` packs them: the first moment m in style "plain", where 0 stays 0; of
the second moment v, which is divided by, the square root at 8 bits and the fourth root at 4, in
style "floor", where what is above 0 never becomes 0. Linear codes of a root are as good as codes
of v with more of them near 0. At 4 bits m too is kept as a root with its sign. Rounding is
stochastic, from the step, the parameter's number and which state it is, so that small changes are
not lost; at 4 bits, where a code is far from the next, a root is laid between two codes such that
the mean of what comes back is m or v and not its root.

Adam and AdamW: Kingma & Ba, ICLR 2015; Loshchilov & Hutter, ICLR 2019; in 8 bits Dettmers et al.,
ICLR 2022, in 4 bits Li et al., NeurIPS 2023; both look codes up in tables of unequal distances and
round to the nearest. Lion: Chen et al., NeurIPS 2023. Adafactor: Shazeer & Stern, ICML 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from xmem import codec
from xmem.errors import UsageError

RULES = ("adam", "lion", "sgd")
"""Rules that treat every element alike, in the order of the native codes."""

STATE_BITS = (32, 8, 4)
MAXIMIZE, NESTEROV, FIRST_STEP = 1, 2, 4
"""Flags of a step."""

Moment = Literal["first", "second"]
Array = np.ndarray[Any, Any]

_MAGNITUDE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Numbers:
    """What a step needs beside tensors; `xmem/native/optimizers.cc` says what each rule reads."""

    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    keep: float = 1.0
    l2: float = 0.0
    rate: float = 0.0
    root: float = 1.0

    def values(self) -> tuple[float, ...]:
        """Return them in the order of the native arguments."""
        return (self.beta1, self.beta2, self.eps, self.keep, self.l2, self.rate, self.root)


def adam_numbers(
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> Numbers:
    """Return the numbers of Adam's (or, decoupled, AdamW's) step, counted from 1."""
    return Numbers(
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        keep=1 - lr * weight_decay if decoupled else 1.0,
        l2=0.0 if decoupled else weight_decay,
        rate=lr / (1 - betas[0] ** step),
        root=1 / math.sqrt(1 - betas[1] ** step),
    )


def lion_numbers(*, lr: float, betas: tuple[float, float], weight_decay: float) -> Numbers:
    """Return the numbers of Lion's step."""
    return Numbers(beta1=betas[0], beta2=betas[1], keep=1 - lr * weight_decay, rate=lr)


def sgd_numbers(*, lr: float, momentum: float, dampening: float, weight_decay: float) -> Numbers:
    """Return the numbers of a step of stochastic gradient descent with momentum."""
    return Numbers(beta1=momentum, beta2=dampening, l2=weight_decay, rate=lr)


def check_state_bits(bits: Any) -> None:
    """Refuse other numbers of bits than 32, 8 and 4.

    Raises:
        UsageError: names what was given and what there is.
    """
    if bits not in STATE_BITS or not isinstance(bits, int):
        raise UsageError(f"state_bits is {bits!r}; optimizer states take 32, 8 or 4 bits.")


def state_bytes(count: int, bits: int) -> int:
    """Return the bytes that one moment of a number of elements takes."""
    return 4 * count if bits == 32 else codec.packed_bytes(count, bits)


def mixed(index: int, seed: int) -> int:
    """Return the codec's hash of two 32-bit numbers."""
    h = (index * 0x9E3779B1 + seed) & _MASK
    h ^= h >> 15
    h = h * 0x85EBCA77 & _MASK
    h ^= h >> 13
    h = h * 0xC2B2AE3D & _MASK
    return h ^ h >> 16


def seed_of(step: int, index: int) -> int:
    """Return the seed of a parameter's step.

    Args:
        step: the parameter's own count of steps, from 1.
        index: its number in the optimizer, through all groups, from 0.
    """
    return mixed(index, mixed(step, 0))


def seed_of_state(seed: int, moment: Moment) -> int:
    """Return the seed of a state's rounding in a parameter's step."""
    return mixed(0 if moment == "first" else 1, seed)


def pack_state(values: Array, moment: Moment, bits: int, seed: int) -> Array:
    """Pack m, or v; `seed` is the step's (`seed_of`). Float32 at 32 bits."""
    x = np.ascontiguousarray(values, np.float32).reshape(-1)
    if bits == 32:
        return x.copy()
    style: codec.Style = "plain" if moment == "first" else "floor"
    if bits == 4:
        x = _laid_out(x, power=2 if moment == "first" else 4, levels=7 if moment == "first" else 15)
    elif moment == "second":
        x = np.sqrt(x)
    return codec.pack(x, bits, seed_of_state(seed, moment), style)


def unpack_state(state: Array, count: int, moment: Moment, bits: int) -> Array:
    """Return m, or v, flat float32."""
    if bits == 32:
        return state.astype(np.float32)
    x = codec.unpack(state, count, bits)
    with np.errstate(over="ignore", invalid="ignore"):
        if moment == "first":
            return x * np.abs(x) if bits == 4 else x
        x = x * x
        return x * x if bits == 4 else x


def step(
    rule: str,
    parameter: Array,
    gradient: Array,
    states: tuple[Array, ...],
    *,
    bits: int,
    seed: int,
    numbers: Numbers,
    flags: int = 0,
) -> tuple[Array, tuple[Array, ...]]:
    """Step a float32 parameter.

    Args:
        rule: one of `RULES`.
        parameter: flat float32.
        gradient: flat float32.
        states: the first moment, and Adam's second.
        bits: of the states.
        seed: `seed_of(step, index)`.
        numbers: what the rule's function above returns.
        flags: MAXIMIZE, NESTEROV, FIRST_STEP, added.

    Returns:
        The parameter and the states after the step.
    """
    n = Numbers(*map(np.float32, numbers.values()))  # type: ignore[arg-type]
    fresh1 = np.float32(1.0 - numbers.beta1)
    fresh2 = np.float32(1.0 - numbers.beta2)
    sign = np.float32(-1 if flags & MAXIMIZE else 1)
    count = parameter.size
    with np.errstate(all="ignore"):
        d = gradient * sign + parameter * n.l2
        m = unpack_state(states[0], count, "first", bits)
        if rule == "adam":
            m = m + (d - m) * fresh1
            v = unpack_state(states[1], count, "second", bits)
            v = v * n.beta2 + fresh2 * d * d
            way = n.rate * m / (np.sqrt(v) * n.root + n.eps)
            kept = (pack_state(m, "first", bits, seed), pack_state(v, "second", bits, seed))
            return parameter * n.keep - way, kept
        if rule == "lion":
            towards = np.sign(m * n.beta1 + d * fresh1)
            m = m * n.beta2 + d * fresh2
            return parameter * n.keep - towards * n.rate, (pack_state(m, "first", bits, seed),)
        m = d if flags & FIRST_STEP else m * n.beta1 + d * fresh2
        way = d + m * n.beta1 if flags & NESTEROV else m
        return parameter * n.keep - n.rate * way, (pack_state(m, "first", bits, seed),)


def adafactor(
    parameter: Array,
    gradient: Array,
    factors: tuple[Array | None, Array],
    momentum: Array | None = None,
    *,
    step: int,
    lr: float,
    beta2_decay: float,
    eps: tuple[float, float],
    weight_decay: float,
    clip: float,
    beta1: float = 0.0,
    bits: int = 32,
    seed: int = 0,
) -> tuple[Array, tuple[Array | None, Array], Array | None]:
    """Step a float32 parameter (rows, columns), or a vector (count,), whose row factor is None.

    Returns:
        The parameter, its factors and its packed momentum after the step.
    """
    row, column = factors
    fresh = np.float32(step**beta2_decay)
    square = gradient.astype(np.float64) ** 2
    if row is None:
        column = column + (square.astype(np.float32) - column) * fresh
        variance = column
    else:
        row = row + (square.mean(1).astype(np.float32) - row) * fresh
        column = column + (square.mean(0).astype(np.float32) - column) * fresh
        mean = np.maximum(np.float32(row.astype(np.float64).mean()), np.float32(eps[0]))
        variance = row[:, None] * column[None, :] / mean
    way = gradient / np.sqrt(np.maximum(variance, np.float32(eps[0] ** 2)))
    whole = math.sqrt(parameter.size)
    length = float(np.linalg.norm(parameter.astype(np.float64))) / whole
    reached = float(np.linalg.norm(way.astype(np.float64))) / (whole * clip)
    rate = np.float32(max(eps[1], length) * min(lr, step**-0.5) / max(1.0, reached))
    moved = way * rate
    if momentum is not None:
        m = unpack_state(momentum, parameter.size, "first", bits).reshape(parameter.shape)
        moved = m + (moved - m) * np.float32(1 - beta1)
        momentum = pack_state(moved, "first", bits, seed)
    return parameter * np.float32(1 - lr * weight_decay) - moved, (row, column), momentum


def _laid_out(x: Array, *, power: int, levels: int) -> Array:
    """Return roots of values whose stochastic rounding has the values as its mean."""
    found = np.empty_like(x)
    for first in range(0, x.size, codec.BLOCK):
        block = x[first : first + codec.BLOCK]
        magnitude = np.abs(block)
        roots = np.sqrt(magnitude)
        if power == 4:
            roots = np.sqrt(roots)
        largest = np.max(roots.view(np.uint32) & _MAGNITUDE)
        least = np.float32(2.0**-24 if power == 4 else 2.0**-48)
        y = roots
        if largest < _INFINITE and largest.view(np.float32) >= least:
            y = _between(magnitude, roots, codec._scale(largest, levels, 4), power)
        found[first : first + codec.BLOCK] = np.copysign(y, block)
    return found


def _between(magnitude: Array, roots: Array, scale: np.float32, power: int) -> Array:
    k = (roots * (np.float32(1) / scale)).astype(np.int32).astype(np.float32)
    low, high = k * scale, (k + np.float32(1)) * scale
    low, high = low * low, high * high
    if power == 4:
        low, high = low * low, high * high
    share = np.minimum(np.maximum((magnitude - low) / (high - low), 0), 1).astype(np.float32)
    laid: Array = (k + share) * scale
    return laid
