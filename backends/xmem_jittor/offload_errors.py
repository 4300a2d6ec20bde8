"""Jittor's RuntimeError becomes an `OffloadError` where bytes could not be stored or read.

Operations run where a value is waited for, far from the block that made them. So the calls that
execute are wrapped (`executing.py`) for as long as a depot lives that operations use. Other ways
into the executor raise Jittor's own error, with the reason in its text; so does a function that was
looked up before the first depot was there: `jt.sync(step())` looks `sync` up before `step` runs.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from xmem.errors import OffloadError
from xmem.offload.depot import Depot
from xmem_jittor import executing, native

_depots: dict[int, weakref.ref[Depot]] = {}  # by address
_MARK = "xmem offload: "
"""How the operations' errors begin."""
_told = [0, 0, 0]  # failures that have been raised, of the libraries


def tell_of(depot: Depot) -> None:
    """Let errors of a depot's operations be ours for as long as it lives."""
    if depot.address in _depots:
        return
    if not _depots:
        executing.be_around(_converting)
    _depots[depot.address] = weakref.ref(depot)
    weakref.finalize(depot, _forget, depot.address).atexit = False


def _forget(address: int) -> None:
    _depots.pop(address, None)
    if not _depots:
        executing.go_away(_converting)


def converted(error: RuntimeError) -> OffloadError | None:
    """Return what a depot failed with, once; None where this error is another one."""
    if _MARK not in str(error):
        return None
    for which, ask in enumerate(
        (
            native.away().xmem_jittor_away_failure,
            native.streaming().xmem_jittor_move_failure,
            native.allocator().xmem_jittor_late_missed,
        )
    ):
        found = (ctypes.c_longlong * 4)()
        ask(found)
        count, code, nbytes, address = found
        known = _depots.get(address)
        depot = None if known is None else known()
        if count == _told[which] or depot is None:
            continue
        _told[which] = count
        return depot.error(code, nbytes, reading="read back" in str(error))
    return None


def _converting(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        found = converted(error)
        if found is None:
            raise
        raise found from error
