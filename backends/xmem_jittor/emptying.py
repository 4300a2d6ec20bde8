"""A tensor's memory, dropped under a graph that reads it again, and given back before it does.

See `native/emptying.cc`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem_jittor import native
from xmem_jittor.ordering import anchor, calling

_EMPTY = '((void (*)(void*))(size_t)data["empty"])(in1);'
_REFILL = '((void (*)(void*, void*))(size_t)data["refill"])(in1, in2);'


@dataclass(frozen=True, eq=False)
class Emptied:
    """A tensor without memory.

    Attributes:
        views: it and the tensors that shared its memory.
        done: there when it has lost it.
    """

    views: list[Any]
    done: Any


def empty(var: Any, end: Any) -> Emptied:
    """Let a tensor and its views lose their memory when the graph gets here.

    Args:
        var: where a graph that is kept begins.
        end: where it ends; it and what is made of it keep their memory, also if they are views.
    """
    return empty_views(var, [end], anchor())


def empty_views(var: Any, ends: Sequence[Any], done: Any) -> Emptied:
    """Let a tensor and its views lose their memory when the graph gets here.

    Args:
        var: where a graph that is kept begins.
        ends: where it ends; they and what is made of them keep their memory, also if they are
            views.
        done: there when nothing reads the tensor before backward any more.
    """
    views = views_before(var, ends)
    for view in views:
        done = calling(done, _EMPTY, {"empty": _address("empty")}, view)
    return Emptied(views, done)


def views_before(var: Any, ends: Sequence[Any]) -> list[Any]:
    """Return a tensor and those that share its memory, without `ends` and what is made of them."""
    capacity = 64
    while True:
        found = (ctypes.c_longlong * capacity)()
        count = native.saving().xmem_jittor_views_before(
            var.var_ptr, *native.addresses(ends), found, capacity
        )
        if count <= capacity:
            return [jt.wrap_var_addr(address) for address in found[:count]]
        capacity = count


def refill(emptied: Emptied, source: Any) -> Any:
    """Let the emptied share another one's memory; returns what its readers wait for."""
    done = emptied.done
    for view in emptied.views:
        done = calling(done, _REFILL, {"refill": _address("refill")}, view, source)
    return done


def _address(name: str) -> int:
    return native.address_of(getattr(native.emptying(), f"xmem_jittor_{name}"))
