"""Names that a person knows: variables of functions that run, attributes, bounds of containers."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_BOUNDS = ("maxlen", "maxsize", "max_size", "max_len", "max_length", "max_entries", "capacity")
"""Attributes by which a container, or who has it, says how much it takes at most."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
OPTIMIZED = 0x1
"""The flag of code whose variables are not in a dict of their own (functions)."""


@dataclass(frozen=True)
class Owner:
    """Who holds tensors.

    Attributes:
        text: for people: "list `losses` (local of main, train.py:12)".
        type: of the holder: "list".
        count: how many entries it has, or None where it is no container.
        bound: how many it takes at most, as far as it says so.
        holder: the object that holds them; None for a variable.
        name: of the variable or attribute.
        code: of the function whose variable it is, or None.
    """

    text: str
    type: str
    count: int | None
    bound: int | None
    holder: Any
    name: str
    code: Any = None

    @property
    def is_bounded(self) -> bool:
        """Whether it says how much it takes, and has no more than that."""
        return self.bound is not None and (self.count is None or self.count <= self.bound)


@dataclass(frozen=True)
class Name:
    """A name that a person knows, with what comes after it on the way to the object."""

    name: str
    path: tuple[str, ...]
    where: str
    holder: Any = None
    code: Any = None

    @property
    def whole(self) -> str:
        """The name with the path."""
        return self.name + "".join(self.path)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


_NOBODY_ELSE = 3
"""References to a frame's copy of its variables: the frame, a variable here, the argument."""


def forget_variables(frame: FrameType) -> None:
    """Empty the copy of its variables that a function's frame keeps once they were looked at.

    Python 3.13 makes none. Where a person has it too (`settings = locals()`) it is theirs.
    """
    held = frame.f_locals if frame.f_code.co_flags & OPTIMIZED else None
    if type(held) is dict and sys.getrefcount(held) <= _NOBODY_ELSE:
        held.clear()


def file_of(path: str | None) -> str:
    """Return a file's name without its folder."""
    return Path(path).name if path else "?"


class Frames:
    """The variables of all functions that are running now; holds them for a search only."""

    def __init__(self) -> None:
        self.names: dict[int, Name] = {}
        self.untracked: list[Any] = []
        self.running: set[int] = set()
        running = list(sys._current_frames().values())
        while running:
            frame: FrameType | None = running.pop()
            while frame is not None:
                self.running.add(id(frame))
                if not _module_of(frame).startswith("xmem.leak"):
                    self._note(frame)
                frame = frame.f_back
        # No variable here is a frame now: this function's own would be a cycle that keeps tensors.

    def _note(self, frame: FrameType) -> None:
        code = frame.f_code
        in_function = bool(code.co_flags & OPTIMIZED)
        file = file_of(code.co_filename)
        where = f"global of {file}"
        if in_function:
            where = f"local of {code.co_name}, {file}:{code.co_firstlineno}"
        held = frame.f_locals
        for name, value in list(held.items()):
            if type(value) in (dict, tuple) and not gc.is_tracked(value):
                self.untracked.append(value)
            holder = None if in_function else held
            self.names.setdefault(
                id(value), Name(name, (), where, holder, code if in_function else None)
            )
        del held
        forget_variables(frame)


def name_of(function: Any) -> str:
    """Return a function's name with the classes and functions around it."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def of_object(attribute: str, path: tuple[str, ...], holder: Any) -> Name:
    """Return the name of an object's attribute."""
    return Name(attribute, path, f"attribute of {type(holder).__qualname__}", holder)


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute that an object has; None where it has not, or where asking fails.

    A `__getattr__` of the object's is not asked: it may answer for any name, or raise anything.
    """
    try:
        inspect.getattr_static(holder, name)
        return getattr(holder, name)
    except Exception:  # noqa: BLE001  a property of somebody's
        return None


def attribute_of(holder: Any, held: Any) -> str | None:
    """Return the attribute by which an object holds another."""
    own = _attribute(holder, "__dict__")
    if isinstance(own, dict):
        for name, value in own.items():
            if value is held:
                return str(name)
    for kind in type(holder).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if _attribute(holder, name) is held:
                return str(name)
    return None


def _variable_of(frame: FrameType, held: Any) -> str:
    found = next((name for name, value in frame.f_locals.items() if value is held), None)
    forget_variables(frame)
    return ".f_locals" if found is None else f".f_locals[{found!r}]"


def step_to(holder: Any, held: Any) -> str:
    """Return how an object is reached from what holds it."""
    if isinstance(holder, dict):
        key = next((k for k, value in holder.items() if value is held), "...")
        return f"[{key!r}]" if isinstance(key, (str, int)) and key != "..." else "[...]"
    if isinstance(holder, CONTAINERS):
        return "[...]"
    if isinstance(holder, FrameType):
        return _variable_of(holder, held)
    if isinstance(holder, TracebackType):
        return ".tb_next" if isinstance(held, TracebackType) else ".tb_frame"
    if isinstance(holder, BaseException) and held is holder.__traceback__:
        return ".__traceback__"
    if type(held) is dict and held is _attribute(holder, "__dict__"):
        return ".__dict__"
    attribute = attribute_of(holder, held)
    return "" if attribute is None else f".{attribute}"


def bound_of(*candidates: Any) -> int | None:
    """Return how much a container takes, as it or the object that has it says."""
    for each in candidates:
        if each is None or (isinstance(each, dict) and type(each) is dict):
            continue
        if type(each).__name__ == "_lru_cache_wrapper":
            maximum = each.cache_info().maxsize
            return maximum if isinstance(maximum, int) else None
        for name in _BOUNDS:
            value = _attribute(each, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
