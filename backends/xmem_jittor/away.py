"""Tensors whose bytes are in a depot until backward: the Python side of `native/away.cc`.

An operation stores a tensor where the lazy graph gets to it, behind the forward, and another one
reads it into a new tensor before the backward: copies made by Python would come too early or hold
what they copy. They are operations of Jittor's own kind, so nothing is compiled for them.

What cannot be stored keeps its memory, and the execution raises, once for a depot: Jittor's
RuntimeError becomes an `OffloadError` (`offload_errors.py`). The work that is pending can be
executed then. On a GPU bytes pass through pinned memory, in operations that wait for their copies;
none of it has been run.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache
from typing import Any

import jittor as jt

from xmem.native import depot as depots
from xmem.offload.depot import Depot
from xmem.saving import Away
from xmem_jittor import native, offload_errors


class _Functions(ctypes.Structure):
    """A depot as native code calls it."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("depot", "holder", "put", "get", "drop", "will_need")
    ]

    @classmethod
    def of(cls, depot: Depot) -> _Functions:
        """Return those of a depot."""
        return cls(depot.address, id(depot), *_addresses())


@lru_cache(maxsize=1)
def _addresses() -> list[int]:
    library = depots.load()
    return [
        native.address_of(getattr(library, f"xmem_depot_{name}"))
        for name in ("put", "get", "drop", "will_need")
    ]


class Stored:
    """A tensor in a depot, for as long as this or an operation that reads it is there.

    Args:
        var: the tensor.
        away: where it goes.

    Attributes:
        done: a tensor that is there when it has been stored.
        nbytes: its bytes.
    """

    def __init__(self, var: Any, away: Away) -> None:
        offload_errors.tell_of(away.depot)
        library, store, done = native.away(), _Functions.of(away.depot), ctypes.c_longlong()
        self.nbytes = int(var.nbytes)
        self._held = library.xmem_jittor_away_store(
            var.var_ptr,
            ctypes.byref(store),
            away.depot.new_number(),
            away.prefetch_bytes,
            ctypes.byref(done),
        )
        weakref.finalize(self, library.xmem_jittor_away_let_go, self._held).atexit = False
        self.done = _wrapped(done.value)

    def loaded(self) -> Any:
        """Return the tensor, read where the graph gets here."""
        return _wrapped(native.away().xmem_jittor_away_load(self._held, self.done.var_ptr))


def _wrapped(address: int) -> Any:
    var = jt.wrap_var_addr(address)
    native.away().xmem_jittor_away_taken()
    return var
