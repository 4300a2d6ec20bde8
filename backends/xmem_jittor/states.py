"""Optimizer states on Jittor: uint8 tensors as `xmem.optim_rules` packs them, or float32.

A float32 state has the shape of its parameter, as in `jt.optim`; a packed one is flat. Which of the
two a state is, its type tells.
"""

from __future__ import annotations

from typing import Any

import jittor as jt
import numpy as np

from xmem import optim_rules as rules
from xmem.codec import packed_bytes
from xmem.errors import UsageError
from xmem.native import codec

Array = np.ndarray[Any, Any]


def bits_for(parameter: Any, state_bits: int, min_elements: int) -> int:
    """Return the bits that a parameter's states take."""
    return 32 if parameter.numel() < min_elements else state_bits


def empty(parameter: Any, bits: int) -> Any:
    """Return a state of zeros."""
    if bits == 32:
        return jt.zeros(parameter.shape, "float32").stop_grad()
    return jt.zeros((packed_bytes(parameter.numel(), bits),), "uint8").stop_grad()


def pack(values: Array, moment: rules.Moment, bits: int, seed: int) -> Array:
    """Pack m or v, as `optim_rules.pack_state` defines it."""
    if bits != 8:
        return rules.pack_state(values, moment, bits, seed)
    x = np.ascontiguousarray(values, np.float32).reshape(-1)
    if moment == "second":
        x = np.sqrt(x)
    found = np.empty(packed_bytes(x.size, bits), np.uint8)
    style = "plain" if moment == "first" else "floor"
    drawn = rules.seed_of_state(seed, moment)
    codec.pack(x.ctypes.data, "float32", x.size, bits, drawn, found.ctypes.data, style)
    return found


def unpack(packed: Array, count: int, moment: rules.Moment, bits: int) -> Array:
    """Return m or v, flat, as `optim_rules.unpack_state` defines it."""
    if bits == 32:
        return packed.reshape(-1)
    packed = np.ascontiguousarray(packed)
    found = np.empty(count, np.float32)
    codec.unpack(packed.ctypes.data, count, bits, "float32", found.ctypes.data)
    for _ in range((moment == "second") + (bits == 4)):
        found = found * np.abs(found)
    return found


def bits_of(state: Any, packed: int) -> int:
    """Return the bits that a state takes, where packed ones take `packed`."""
    return packed if str(state.dtype) == "uint8" else 32


def check(state: Any, parameter: Any, packed: int) -> None:
    """Refuse a state of another parameter.

    Raises:
        UsageError: names both shapes.
    """
    bits, count = bits_of(state, packed), parameter.numel()
    if int(np.prod(state.shape)) != (count if bits == 32 else packed_bytes(count, bits)):
        raise UsageError(
            f"a state of shape {tuple(state.shape)} and {bits} bits is not of a parameter of shape"
            f" {tuple(parameter.shape)}. Give a state of an optimizer of the same parameters"
        )


def convert(
    state: Any, parameter: Any, moment: rules.Moment, *, before: int, after: int, seed: int
) -> Any:
    """Return a state in other bits, or a snapshot of it in the same.

    Args:
        state: a tensor or an array, as a state file holds it; None where there is none yet.
        parameter: whose state it is.
        moment: what it is.
        before: the bits of the state where it is packed.
        after: those that it is to take.
        seed: of the rounding.
    """
    if state is None:
        return None
    before = bits_of(state, before)
    if before == after:
        return snapshot(state)
    held = state if isinstance(state, np.ndarray) else state.numpy()
    found = pack(unpack(held, parameter.numel(), moment, before), moment, after, seed)
    return jt.array(found.reshape(parameter.shape) if after == 32 else found).stop_grad()


def snapshot(value: Any) -> Any:
    """Return what keeps its value while an optimizer goes on; it shares memory until then."""
    if isinstance(value, jt.Var):
        return value.detach().stop_grad()
    if isinstance(value, np.ndarray):
        return jt.array(value).stop_grad()
    if isinstance(value, dict):
        return {key: snapshot(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(held) for held in value)
    return value
