"""Steps of optimizers whose states take few bits, on PyTorch tensors (2.13).

On a CPU one native loop over all blocks of all parameters, which allocates nothing. Without a
compiler, and on CUDA, PyTorch's own operations on pieces of 65536 elements: the same states and
parameters, bit for bit, at a higher price (there is no GPU on which this has been run).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from xmem import optim_rules as rules
from xmem.codec import BLOCK, DTYPES
from xmem.errors import NativeBuildError, XmemWarning
from xmem.native import optimizers as native
from xmem_torch.states import Blocks, bits_of, in_pieces, root

DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES)}
"""Types of parameters that the rules take, with their native codes."""


@dataclass(frozen=True)
class Update:
    """A parameter's step.

    Attributes:
        parameter: contiguous.
        gradient: contiguous, of the same type.
        states: the moments, first and second, as the rule has them.
        bits: of packed states.
        numbers: see `optim_rules.Numbers`.
        seed: see `optim_rules.seed_of`.
        flags: see `optim_rules`.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor, ...]
    bits: int
    numbers: rules.Numbers
    seed: int
    flags: int


def apply(rule: str, updates: Sequence[Update]) -> None:
    """Step parameters and their states in place."""
    if not updates:
        return
    compiled = is_compiled()
    _natively(rule, [u for u in updates if compiled and u.parameter.device.type == "cpu"])
    for update in updates:
        if not compiled or update.parameter.device.type != "cpu":
            _eagerly(rule, update)


def _natively(rule: str, updates: Sequence[Update]) -> None:
    if not updates:
        return
    rows = []
    for u in updates:
        first = u.states[0]
        rows.append(
            (
                u.parameter.data_ptr(),
                u.gradient.data_ptr(),
                first.data_ptr(),
                u.states[1].data_ptr() if len(u.states) > 1 else 0,
                u.parameter.numel(),
                *u.numbers.values(),
                u.seed,
                DTYPE_CODES[u.parameter.dtype],
                32 if first.dtype == torch.float32 else u.bits,
                u.flags,
            )
        )
    native.step_many(rule, np.array(rows, native.TASK), len(rows))
    # Autograd then refuses a backward that was to read a parameter as it was.
    torch.autograd.graph.increment_version([u.parameter for u in updates])


def _eagerly(rule: str, u: Update) -> None:
    p, g = u.parameter.view(-1), u.gradient.view(-1)
    moments: Sequence[rules.Moment] = ("first", "second")
    states = [
        Blocks(state, p.numel(), moment, u.bits)
        for state, moment in zip(u.states, moments, strict=False)
    ]
    move = _MOVES[rule]

    def piece(first: int, blocks: int) -> None:
        here = slice(first * BLOCK, (first + blocks) * BLOCK)
        d = g[here].float() * (-1.0 if u.flags & rules.MAXIMIZE else 1.0)
        x = p[here].float()
        d += x * u.numbers.l2
        values = [state.get(first, blocks) for state in states]
        way = move(d, values, u.numbers, u.flags)
        p[here] = (x * u.numbers.keep - way).to(p.dtype)
        for state, value in zip(states, values, strict=True):
            state.put(first, blocks, value, u.seed)

    in_pieces(p.numel(), piece)


# Each changes the moments and returns what the parameter moves by. One operation at a time, as the
# definition rounds; PyTorch's combined ones (lerp, addcmul) may keep digits between.
def _adam(d: Any, values: list[Any], n: rules.Numbers, flags: int) -> Any:
    m, v = values
    m += (d - m) * (1.0 - n.beta1)
    v *= n.beta2
    v += d * (1.0 - n.beta2) * d
    return m * n.rate / (root(v) * n.root + n.eps)


def _lion(d: Any, values: list[Any], n: rules.Numbers, flags: int) -> Any:
    [m] = values
    mixed = m * n.beta1 + d * (1.0 - n.beta1)
    m *= n.beta2
    m += d * (1.0 - n.beta2)
    return torch.where(mixed.isnan(), mixed, mixed.sign()) * n.rate


def _sgd(d: Any, values: list[Any], n: rules.Numbers, flags: int) -> Any:
    [m] = values
    first = flags & rules.FIRST_STEP
    m *= 0.0 if first else n.beta1
    m += d * (1.0 if first else 1.0 - n.beta2)
    return (d + m * n.beta1 if flags & rules.NESTEROV else m) * n.rate


_MOVES: dict[str, Callable[[Any, list[Any], rules.Numbers, int], Any]] = {
    "adam": _adam,
    "lion": _lion,
    "sgd": _sgd,
}


@functools.cache
def is_compiled() -> bool:
    """Say whether there are native kernels; warns once where there are none."""
    try:
        native.load()
    except NativeBuildError as error:
        warnings.warn(
            "optimizers with states in few bits step by PyTorch's own operations, with the same"
            " results and many times slower: the native kernels could not be compiled."
            f" {str(error).splitlines()[0]}",
            XmemWarning,
            stacklevel=5,
        )
        return False
    return True


@dataclass(frozen=True)
class Factored:
    """A step of Adafactor.

    Attributes:
        parameter: contiguous.
        gradient: contiguous, of the same type.
        row: the factor of the rows, float32; None for a vector.
        column: the factor of the columns; a vector's whole second moment.
        first: the first moment, or None.
        bits: of `first`, if packed.
        seed: see `optim_rules.seed_of`.
        numbers: beta1, rest2, eps1, eps2, keep, rate, clip: see `xmem/native/optimizers.cc`.
        maximize: whether to climb.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    row: torch.Tensor | None
    column: torch.Tensor
    first: torch.Tensor | None
    bits: int
    seed: int
    numbers: tuple[float, ...]
    maximize: bool


def apply_factored(u: Factored) -> None:
    """Step a parameter by Adafactor, in place."""
    if u.parameter.numel() == 0:
        return
    if u.parameter.device.type != "cpu" or not is_compiled():
        _factored_eagerly(u)
        return
    rows = 1 if u.row is None else u.row.numel()
    native.load().xmem_optim_adafactor(
        u.parameter.data_ptr(),
        u.gradient.data_ptr(),
        DTYPE_CODES[u.parameter.dtype],
        rows,
        u.parameter.numel() // rows,
        None if u.row is None else u.row.data_ptr(),
        u.column.data_ptr(),
        None if u.first is None else u.first.data_ptr(),
        32 if u.first is None else bits_of(u.first, u.bits),
        u.seed,
        rules.MAXIMIZE if u.maximize else 0,
        *u.numbers,
    )
    torch.autograd.graph.increment_version(u.parameter)


def _factored_eagerly(u: Factored) -> None:
    beta1, rest2, eps1, eps2, keep, rate, clip = u.numbers
    rows = 1 if u.row is None else u.row.numel()
    p, g = u.parameter.view(rows, -1), u.gradient.view(rows, -1)
    columns, row, column = p.shape[1], u.row, u.column.view(-1)
    squares = torch.zeros(columns, dtype=torch.float64, device=p.device)
    step = max(1, 65536 // columns)
    for at in range(0, rows, step):
        square = g[at : at + step].double().square_()
        squares += square.sum(0)
        if row is not None:
            part = row.view(-1)[at : at + step]
            part += (square.mean(1).float() - part) * rest2
    column += ((squares / rows).float() - column) * rest2
    mean = None if row is None else row.double().mean().float().clamp(min=eps1)

    def way(first: int, blocks: int) -> torch.Tensor:
        begin, end = first * BLOCK, min(p.numel(), (first + blocks) * BLOCK)
        index = torch.arange(begin, end, device=p.device)
        variance = column[index % columns]
        if row is not None:
            variance = row.view(-1)[index // columns] * variance / mean
        d = g.view(-1)[begin:end].float() * (-1.0 if u.maximize else 1.0)
        return d / variance.clamp(min=eps1 * eps1).sqrt()

    def norm(of_piece: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=p.device)
        in_pieces(
            p.numel(), lambda first, n: total.add_(of_piece(first, n).double().square_().sum())
        )
        return total.sqrt() / p.numel() ** 0.5

    flat = p.view(-1)
    length = norm(lambda first, n: flat[first * BLOCK : (first + n) * BLOCK])
    reached = norm(way) / clip
    scale = (length.clamp(min=eps2) * rate / reached.clamp(min=1.0)).float()
    held = None if u.first is None else Blocks(u.first, p.numel(), "first", u.bits)

    def move(first: int, blocks: int) -> None:
        here = slice(first * BLOCK, (first + blocks) * BLOCK)
        moved = way(first, blocks) * scale
        if held is not None:
            m = held.get(first, blocks)
            moved = m + (moved - m) * (1.0 - beta1)
            held.put(first, blocks, moved, u.seed)
        flat[here] = (flat[here].float() * keep - moved).to(flat.dtype)

    in_pieces(p.numel(), move)
