"""Parameters whose values lie in a depot: the Python side of `native/streaming.cc`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import jittor as jt

from xmem.native import depot as depots
from xmem.offload.depot import Depot
from xmem.sizes import format_size
from xmem_jittor import native, ran_out

_NO_ROOM = -100  # of streaming.cc


class Store(ctypes.Structure):
    """A depot as native code calls it."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("depot", "holder", "put", "get", "drop", "will_need", "map", "unmap")
    ]


def store_of(depot: Depot) -> Store:
    """Return what native code calls; tensors that are away keep the depot."""
    # At the end of the process tensors may be freed after whatever Python closes then.
    depot._close.atexit = False
    library = depots.load()
    functions = [
        native.address_of(getattr(library, f"xmem_depot_{name}"))
        for name in ("put", "get", "drop", "will_need", "map", "unmap")
    ]
    return Store(depot.address, id(depot), *functions)


def is_away(var: Any) -> bool:
    """Say whether a tensor's value lies in a depot, also if it has been brought in."""
    return bool(native.streaming().xmem_jittor_where(var.var_ptr))


def is_brought_in(var: Any) -> bool:
    """Say whether a tensor that lies in a depot is in the pool now."""
    return int(native.streaming().xmem_jittor_where(var.var_ptr)) == 2


def is_computed(var: Any) -> bool:
    """Say whether a tensor has its value."""
    return not native.recovering().xmem_jittor_is_pending(var.var_ptr)


def send(var: Any, depot: Depot, store: Store) -> None:
    """Move a tensor, which is computed, to a depot.

    Raises:
        OffloadError: it could not be stored; it stays where it is.
    """
    number = depot.new_number()
    code = native.streaming().xmem_jittor_send(var.var_ptr, ctypes.byref(store), number)
    if code:
        raise depot.error(code, var.nbytes)


def bring_back(var: Any, depot: Depot) -> None:
    """Give a tensor memory of the pool for good.

    Raises:
        OffloadError: it could not be read.
        OutOfMemoryError: it does not fit on the device; it stays where it is.
    """
    code = native.streaming().xmem_jittor_bring_back(var.var_ptr)
    if code == _NO_ROOM:
        raise ran_out.JittorOutOfMemoryError(
            f"out of memory: {format_size(var.nbytes)} that lie in a depot do not fit on the device"
            " and stay there. Raise the limit (xmem.pool.configure(limit=...)), or free tensors,"
            " and call undo() again"
        )
    if code:
        raise depot.error(code, var.nbytes, reading=True)


def coming(
    gate: Any, parameters: Sequence[Any], *, back: bool = True, ahead: Sequence[Any] = ()
) -> Any:
    """Return a tensor that is there when parameters have been brought in.

    Args:
        gate: the tensor; what is returned has its memory and passes gradients on to it.
        parameters: tensors that lie in a depot.
        back: they go when the gradient has come here.
        ahead: of these the system is told that they will be read soon.
    """
    return _moving(gate, parameters, ahead, comes=True, back=back)


def going(
    gate: Any, parameters: Sequence[Any], *, back: bool = True, ahead: Sequence[Any] = ()
) -> Any:
    """Return a tensor that is there when parameters have gone; in backward they come. See above."""
    return _moving(gate, parameters, ahead, comes=False, back=back)


def _moving(
    gate: Any, parameters: Sequence[Any], ahead: Sequence[Any], *, comes: bool, back: bool
) -> Any:
    library = native.streaming()
    address = library.xmem_jittor_move(
        gate.var_ptr, *native.addresses(parameters), *native.addresses(ahead), comes, back
    )
    made = jt.wrap_var_addr(address)
    library.xmem_jittor_move_taken()
    return made


class Streamed(NamedTuple):
    """What is away, over all models.

    Attributes:
        away_bytes: of parameters in depots.
        here_bytes: of these in the pool now.
        peak_here_bytes: at most since this was asked for last.
        read_bytes: read in so far.
        pieces: tensors that are away, with their views.
    """

    away_bytes: int
    here_bytes: int
    peak_here_bytes: int
    read_bytes: int
    pieces: int


def streamed() -> Streamed:
    """Return what is away."""
    found = (ctypes.c_longlong * 5)()
    native.streaming().xmem_jittor_streamed(found)
    return Streamed(*found)
