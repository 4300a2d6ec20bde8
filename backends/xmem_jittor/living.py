"""What is alive: tensors that Python holds, and their graphs.

Jittor counts all by itself, so `live_counts` costs nothing. Its tensors are not known to Python's
garbage collector; the list of what Python holds comes from Jittor's own (`native/living.cc`). An
optimizer's gradients are in its groups and so in that list. Nothing here runs pending work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jittor as jt

from xmem.pooling import Graph
from xmem_jittor import native

_LIMIT = 200_000
"""More operations of one graph are not looked at."""


def live_tensors() -> Sequence[Any]:
    """Return the tensors that Python objects hold, each once."""
    capacity = 1024
    while True:
        found = (ctypes.c_longlong * capacity)()
        count = native.living().xmem_jittor_held_objects(id(jt.Var), found, capacity)
        if count <= capacity:
            return [ctypes.cast(address, ctypes.py_object).value for address in found[:count]]
        capacity = count


def live_counts() -> dict[str, int]:
    """Return Jittor's own counts; "tensors" are the Vars that something holds."""
    found = jt.liveness_info()
    return {
        "tensors": found["hold_vars"],
        "held_vars": found["hold_vars"],
        "live_vars": found["lived_vars"],
        "live_ops": found["lived_ops"],
    }


def tensor_bytes(tensor: Any) -> int:
    """Return what the memory behind a tensor takes; 0 where it is still to be computed."""
    array, count = native.addresses([tensor])
    return int(native.allocator().xmem_jittor_bytes_of(array, count))


def graph_of(tensor: Any) -> Graph | None:
    """Return what a tensor keeps alive: operations to differentiate, and such that have not run."""
    capacity = 1024
    is_pending = ctypes.c_int(0)
    while True:
        found = (ctypes.c_longlong * capacity)()
        count = native.living().xmem_jittor_behind(
            tensor.var_ptr, found, capacity, ctypes.byref(is_pending)
        )
        if count < capacity or capacity >= _LIMIT:
            break
        capacity *= 8
    if not count:
        return None
    return Graph(found[0], frozenset(found[:count]), is_pending=bool(is_pending.value))


def identity_of(tensor: Any) -> Any:
    """Return the number of the node; an update gives a handle another one."""
    return tensor.id


def on_step(call: Callable[[Any], None]) -> Callable[[], None]:
    """Follow `post_step`, by which all optimizers of Jittor end their steps."""
    original = jt.optim.Optimizer.post_step
    watching = True

    @wraps(original)
    def post_step(self: Any) -> None:
        original(self)
        if watching:
            call(self)

    def end() -> None:
        nonlocal watching
        watching = False  # also where somebody has wrapped ours, so that it has to stay
        if jt.optim.Optimizer.post_step is post_step:
            jt.optim.Optimizer.post_step = original

    jt.optim.Optimizer.post_step = post_step
    return end
