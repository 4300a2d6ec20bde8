"""What lies behind a function: the modules and the generators that it can reach by itself.

A function is checkpointed as it is given: a module, a bound method, a closure, a partial. Parts of
its state belong to the recomputation too (buffers, training flags, random streams), and are found
here. Frameworks are told apart by the types that are asked for.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Names:
    """Variables in a function's code and in that of functions inside it.

    Attributes:
        globals: those that are global, or may be.
        written: of them and of those of outer functions, those that it assigns to.
    """

    globals: tuple[str, ...]
    written: frozenset[str]


_known: dict[int, tuple[weakref.ref[CodeType], Names]] = {}


def names_in(code: CodeType) -> Names:
    """Find them, once for each code object."""
    known = _known.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    read, written, pending = set(), set(), [code]
    while pending:
        part = pending.pop()
        pending.extend(const for const in part.co_consts if isinstance(const, CodeType))
        for step in dis.get_instructions(part):
            if step.opname.endswith("_GLOBAL"):
                read.add(step.argval)
            if step.opname in ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"):
                written.add(step.argval)
    found = Names(tuple(sorted(read)), frozenset(written))
    number = id(code)
    _known[number] = weakref.ref(code, lambda _: _known.pop(number, None)), found
    return found
