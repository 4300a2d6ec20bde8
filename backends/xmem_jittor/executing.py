"""Who wants to be around Jittor's executions: the calls that execute are wrapped, once for all.

Patched while anybody wants to be there, on Jittor 1.3.11: `jt.sync`, `jt.sync_all`,
`jt.fetch_sync`, and of `jt.Var` `sync`, `fetch_sync`, `numpy`, `item` and `data`. Other ways into
the executor (the shape of a result that depends on values, eager execution) are not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jittor as jt

Around = Callable[[Callable[[], Any]], Any]
"""Makes the call that it is given, and returns what that returns."""

_FUNCTIONS = ("sync", "sync_all", "fetch_sync")
_METHODS = ("sync", "fetch_sync", "numpy", "item")
_PROPERTIES = ("data",)
_around: list[Around] = []
_originals: list[tuple[Any, str, Any]] = []


def be_around(function: Around) -> None:
    """Let a function make the calls that execute, outside of those that do so already."""
    if not _around:
        _wrap()
    _around.append(function)


def go_away(function: Around) -> None:
    """Let a function be around no more; the last one leaves the calls as Jittor's own."""
    if function not in _around:
        return
    _around.remove(function)
    if not _around:
        while _originals:
            place, name, original = _originals.pop()
            setattr(place, name, original)


def _wrap() -> None:
    for place, names in ((jt, _FUNCTIONS), (jt.Var, _METHODS)):
        for name in names:
            _replace(place, name, _wrapped(getattr(place, name)))
    for name in _PROPERTIES:
        original = getattr(jt.Var, name)
        _replace(jt.Var, name, property(_wrapped(original.__get__), original.__set__))


def _replace(place: Any, name: str, wrapped: Any) -> None:
    _originals.append((place, name, getattr(place, name)))
    setattr(place, name, wrapped)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def executed(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, *args, **kwargs)
        for function in list(_around):
            call = functools.partial(function, call)
        return call()

    return executed
