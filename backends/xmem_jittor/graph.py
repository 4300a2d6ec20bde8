"""Questions to Jittor's graph, and tensors behind handles: the Python side of `native/graph.cc`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jittor as jt

from xmem_jittor import native


def newest_node() -> int:
    """Return the number of the node that was made last."""
    return int(native.graph().xmem_jittor_total_node())


@contextmanager
def swapped(handles: Sequence[Any], others: Sequence[Any]) -> Iterator[None]:
    """Let handles hold other tensors inside the block."""
    for handle, other in zip(handles, others, strict=True):
        handle.swap(other)
    try:
        yield
    finally:
        for handle, other in zip(handles, others, strict=True):
            handle.swap(other)


def read_by(outputs: Sequence[Any], newest: int, stops: Sequence[Any]) -> tuple[list[int], bool]:
    """Return the addresses of what was read, and whether some of it ran already."""
    executed = ctypes.c_int(0)
    capacity = 256
    while True:
        found = (ctypes.c_longlong * capacity)()
        count = native.graph().xmem_jittor_read_by(
            *native.addresses(outputs),
            newest,
            *native.addresses(stops),
            found,
            capacity,
            ctypes.byref(executed),
        )
        if count <= capacity:
            return list(found[:count]), bool(executed.value)
        capacity = count


def handles_of(addresses: Sequence[int]) -> list[list[Any]]:
    """Return the Python objects behind each tensor; a new one where there is none."""
    if not addresses:
        return []
    capacity = 4 * len(addresses) + 64
    while True:
        owners = (ctypes.c_int * capacity)()
        objects = (ctypes.c_longlong * capacity)()
        count = native.graph().xmem_jittor_handles(
            (ctypes.c_longlong * len(addresses))(*addresses),
            len(addresses),
            id(jt.Var),
            owners,
            objects,
            capacity,
        )
        if count <= capacity:
            break
        capacity = count
    found: list[list[Any]] = [[] for _ in addresses]
    for owner, address in zip(owners[:count], objects[:count], strict=True):
        found[owner].append(ctypes.cast(address, ctypes.py_object).value)
    return [
        held or [jt.wrap_var_addr(address)] for held, address in zip(found, addresses, strict=True)
    ]


def reached(outputs: Sequence[Any], targets: Sequence[Any]) -> list[bool]:
    """Say for each target whether gradients of the outputs come to it."""
    flags = (ctypes.c_int * max(len(targets), 1))()
    native.graph().xmem_jittor_reached_by_gradient(
        *native.addresses(outputs), *native.addresses(targets), flags
    )
    return [bool(flag) for flag in flags[: len(targets)]]


def depends(var: Any, newest: int, inputs: Sequence[Any]) -> bool:
    """Say whether gradients of a new tensor come to an input, or to what was there before a node.

    Of what was there before itself only an input counts.
    """
    if var.id <= newest:
        return not var.is_stop_grad() and any(var is v for v in inputs)
    addresses, _ = read_by([var], newest, inputs)
    targets = [*inputs, *(handles[0] for handles in handles_of(addresses))]
    return any(reached([var], [v for v in targets if v.dtype.is_float() and not v.is_stop_grad()]))


def may_depend(var: Any, newest: int) -> bool:
    """Say whether a tensor computed without gradients would ask for some, computed with them.

    What has been detached would not. What was computed under `jt.no_grad` looks as if it would, and
    so does what has been waited for.
    """
    return bool(native.graph().xmem_jittor_may_depend(var.var_ptr, newest))


def tape_of(var: Any) -> int:
    """Return the place on the tape, an address, through which gradients of a taped tensor pass."""
    return int(native.graph().xmem_jittor_tape_of(var.var_ptr))


def maker_of(place: int) -> int:
    """Return the address of the operation behind a place on the tape."""
    return int(native.graph().xmem_jittor_maker_of(place))


def let_go(operation: int, taped: int, alive: Callable[[], Any]) -> None:
    """Take a taped tensor, by address, off an operation's inputs; its place on the tape stays.

    Args:
        operation: the operation's address.
        taped: the tensor's address.
        alive: returns None if the operation is gone.
    """
    if alive() is not None:
        native.graph().xmem_jittor_let_go(operation, taped)


def draws(outputs: Sequence[Any], newest: int) -> bool:
    """Say whether what was built after a node draws from Jittor's own stream of random numbers."""
    return bool(native.graph().xmem_jittor_draws(*native.addresses(outputs), newest))


def compares(outputs: Sequence[Any], newest: int) -> bool:
    """Say whether what was built after a node may compare its input with its output in backward."""
    return bool(native.graph().xmem_jittor_compares(*native.addresses(outputs), newest))


def refuse_second_derivatives(
    results: Sequence[Any], gradients: Sequence[Any], place: int, refuse: Callable[[], None]
) -> list[Any]:
    """Return gradients that cannot be differentiated with respect to what they depend on.

    Args:
        results: the gradients.
        gradients: what they were computed from; None where there is none.
        place: an output of the operation that is differentiated (`tape_of`).
        refuse: raises.
    """
    taped = [result.tape() for result in results]
    native.graph().xmem_jittor_refuse(
        place,
        *native.addresses([g for g in gradients if g is not None]),
        *native.addresses(taped),
        refuse,
    )
    return taped
