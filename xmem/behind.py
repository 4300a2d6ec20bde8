"""What lies behind a function: the modules and the generators that it can reach by itself.

A function is checkpointed as it is given: a module, a bound method, a closure, a partial. Parts of
its state belong to the recomputation too (buffers, training flags, random streams), and are found
here. Frameworks are told apart by the types that are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from xmem.containers import leaves


def behind(function: Callable[..., Any], kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the objects of some kinds that a function is, belongs to, closes over or names.

    Args:
        function: any callable.
        kinds: the types to look for, e.g. a framework's module class.

    Returns:
        Each object once. What lies inside a found object is not searched.
    """
    found: dict[int, Any] = {}
    pending: list[Any] = [function, *_attributes(function)]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        hits = leaves(value, kinds)
        for hit in hits:
            found[id(hit)] = hit
        if not isinstance(value, kinds):
            pending.extend(_reached(value))
            for named in _globals(value):
                found.update((id(hit), hit) for hit in leaves(named, kinds))
    return list(found.values())


def _attributes(function: Any) -> list[Any]:
    """Return the attributes of a callable that is an object, for want of a function's closure."""
    plain = hasattr(function, "__code__") or hasattr(function, "__self__")
    if plain or isinstance(function, (type, functools.partial)):
        return []
    return [getattr(function, "__dict__", None)]


def _reached(value: Any) -> Iterator[Any]:
    """Yield what a function can reach by itself."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
        return
    if isinstance(value, (list, tuple, dict)):
        yield from value.values() if isinstance(value, dict) else value
        return
    owner = getattr(value, "__self__", None)
    code = getattr(value, "__code__", None)
    if owner is not None and not isinstance(owner, type):
        yield owner
        yield getattr(owner, "__dict__", None)
    if not isinstance(code, CodeType):
        return
    for cell in getattr(value, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue
    yield getattr(value, "__defaults__", None) or ()


def _globals(value: Any) -> Iterator[Any]:
    """Yield the global variables that a function names; not what lies behind those again."""
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        known = getattr(value, "__globals__", {})
        yield from (known[name] for name in code.co_names if name in known)
