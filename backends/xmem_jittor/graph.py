"""Questions to Jittor's graph, and tensors behind handles: the Python side of `native/graph.cc`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
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
