"""Tensors in nested containers, and modules behind functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import jittor as jt

from xmem.containers import leaves


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a template."""

    index: int


def take_apart(value: Any, found: list[Any]) -> Any:
    """Return the value with every tensor in lists, tuples and dicts replaced by its Slot.

    Args:
        value: any value; what is neither tensor nor container stays.
        found: the tensors are appended here.
    """
    if isinstance(value, jt.Var):
        found.append(value)
        return Slot(len(found) - 1)
    if isinstance(value, dict):
        return type(value)((key, take_apart(part, found)) for key, part in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(take_apart(part, found) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(take_apart(part, found) for part in value)
    return value


def fill(template: Any, tensors: Sequence[Any]) -> Any:
    """Return the template with tensors in its Slots."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if isinstance(template, dict):
        return type(template)((key, fill(part, tensors)) for key, part in template.items())
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*(fill(part, tensors) for part in template))
    if isinstance(template, list | tuple):
        return type(template)(fill(part, tensors) for part in template)
    return template


def tensors_in(held: Any) -> Iterator[Any]:
    """Yield the tensors in nested containers; whatever else is in them is passed over."""
    yield from leaves(held, jt.Var)


def modules_in(held: Any) -> Iterator[Any]:
    """Yield the modules in nested containers, outermost only."""
    yield from leaves(held, jt.Module)


def modules_behind(function: Callable[..., Any]) -> list[Any]:
    """Return the modules that a function is, belongs to, closes over or names globally."""
    found: dict[int, Any] = {}
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for module in modules_in(value):
            found[id(module)] = module
        if not isinstance(value, jt.Module):
            pending.extend(_behind(value))
            for named in _globals(value):
                found.update((id(module), module) for module in modules_in(named))
    return list(found.values())


def _behind(value: Any) -> Iterator[Any]:
    """Yield what a function can reach by itself."""
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
        return
    owner = getattr(value, "__self__", None)
    if isinstance(owner, jt.Module):
        yield owner
        return
    code = getattr(value, "__code__", None)
    if not isinstance(code, CodeType):
        return
    if owner is not None:
        yield vars(owner) if hasattr(owner, "__dict__") else None
    for cell in getattr(value, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue
        yield content
    yield getattr(value, "__defaults__", None) or ()


def _globals(value: Any) -> Iterator[Any]:
    """Yield the global variables that a function names; not what lies behind those again."""
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        known = getattr(value, "__globals__", {})
        yield from (known[name] for name in code.co_names if name in known)
