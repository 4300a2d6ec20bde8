"""What a function keeps from one call to the next, other than what it returns.

A checkpointed function may put what it computes into a list of its closure, into an attribute, into
a global variable. Looked at are the variables that the function and the functions it calls by name
close over or name, their defaults, the attributes of modules and of objects, and the lists, dicts
and deques in them, nested a little. Not sets: the tensors that this is for (Jittor's) cannot be in
one. Of variables only those are compared that the code assigns to.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any

from xmem.behind import names_in
from xmem.containers import leaves

Kinds = type | tuple[type, ...]

_CONTAINERS = (list, dict, deque)
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})
_NOTHING_IN = _PLAIN | {type, ModuleType, BuiltinFunctionType}
_DEPTH = 5
_MISSING = object()


class _Keyed:
    """Values under keys: a dict, attributes, global variables.

    Args:
        held: where they are.
        label: what to call the place.
        bound: the keys are names of variables or attributes.
        keys: those to look at; None for all.
    """

    def __init__(
        self, held: Any, label: str, *, bound: bool, keys: Sequence[str] | None = None
    ) -> None:
        self.held, self.label, self.bound, self.keys = held, label, bound, keys
        self.before = self.read()

    def read(self) -> dict[Any, Any]:
        """Return what is there now."""
        if self.keys is None:
            return dict(self.held)
        return {key: self.held[key] for key in self.keys if key in self.held}

    def changes(self, kinds: Kinds) -> dict[Any, tuple[Any, Any]]:
        """Return what was and is under keys where that changed and held or holds such a leaf."""
        before, now = self.before, self.read()
        if len(before) == len(now) and all(map(operator.is_, before.values(), now.values())):
            return {}
        pairs = ((k, (before.get(k, _MISSING), now.get(k, _MISSING))) for k in {**before, **now})
        return {k: p for k, p in pairs if p[0] is not p[1] and leaves(p, kinds)}

    def put(self, changes: Mapping[Any, tuple[Any, Any]]) -> Callable[[], None]:
        """Put back what was there; returns what puts there what is there now."""
        now = self.read()
        self._write((key, was) for key, (was, _) in changes.items())
        return lambda: self._write((key, now.get(key, _MISSING)) for key in changes)

    def _write(self, values: Iterable[tuple[Any, Any]]) -> None:
        for key, value in values:
            if value is not _MISSING:
                self.held[key] = value
            elif key in self.held:
                del self.held[key]


class _Cells(dict[str, Any]):
    """The variables of a closure, as a dict of their values that writes to them."""

    def __init__(self, names: Sequence[str], cells: Sequence[Any]) -> None:
        super().__init__(zip(names, cells, strict=True))

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # type: ignore[index]
        except KeyError:
            return False
        return True

    def __getitem__(self, name: str) -> Any:
        try:
            return super().__getitem__(name).cell_contents
        except ValueError:  # a variable that is not assigned yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        super().__getitem__(name).cell_contents = value

    def __delitem__(self, name: str) -> None:
        del super().__getitem__(name).cell_contents


class _Items:
    """The items of a list or a deque; see `_Keyed`."""

    bound = False

    def __init__(self, held: Any, label: str) -> None:
        self.held, self.label = held, label
        self.before = list(held)

    def changes(self, kinds: Kinds) -> dict[Any, tuple[Any, Any]]:
        """Return what was and what is there, if it changed and held or holds such a leaf."""
        before, now = self.before, list(self.held)
        if len(before) == len(now) and all(map(operator.is_, before, now)):
            return {}
        if {*map(type, before), *map(type, now)} <= _PLAIN or not leaves((before, now), kinds):
            return {}
        return {None: (before, now)}

    def put(self, _changes: object) -> Callable[[], None]:
        """Put back what was there; returns what puts there what is there now."""
        now = list(self.held)
        self._write(self.before)
        return lambda: self._write(now)

    def _write(self, values: Iterable[Any]) -> None:
        self.held.clear()
        self.held.extend(values)


@dataclass(frozen=True)
class Found:
    """A leaf that the function has put somewhere.

    Attributes:
        leaf: the leaf.
        place: what to call the place.
        bound: it is a variable or an attribute itself, and not an item of a container.
    """

    leaf: Any
    place: str
    bound: bool


class Kept:
    """Where a function may keep leaves of some kinds, and what is there before it runs.

    Args:
        roots: the function, and whatever else it is given.
        modules: that it reaches, with all that are inside them.
        kinds: of the leaves.
        forward: the name of a module's method that computes.
    """

    def __init__(
        self, roots: Sequence[Any], modules: Sequence[Any], kinds: Kinds, *, forward: str
    ) -> None:
        self._kinds = kinds
        self._places: list[_Keyed | _Items] = []
        self._changed: list[tuple[_Keyed | _Items, dict[Any, tuple[Any, Any]]]] = []
        self._seen: set[int] = {id(module) for module in modules}
        self._done: set[int] = set()
        for module in modules:
            self._attributes(module, _DEPTH)
            computes = getattr(type(module), forward, None)
            if isinstance(getattr(computes, "__code__", None), CodeType):
                self._look(computes, "", _DEPTH)
        for root in roots:
            self._look(root, "an argument", _DEPTH)

    def ran(self) -> list[Found]:
        """Return what the function has put somewhere; only what changed is remembered from now."""
        self._changed = [
            (place, changes) for place in self._places if (changes := place.changes(self._kinds))
        ]
        self._places = []
        return self.found()

    def found(self) -> list[Found]:
        """Return what is in the places that changed and was not there before."""
        return [
            Found(leaf, self._called(place, key), place.bound and leaf is now)
            for place, _ in self._changed
            for key, (was, now) in place.changes(self._kinds).items()
            for leaf in _new(was, now, self._kinds)
        ]

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Let the places that changed hold inside the block what they held at first."""
        undo = [place.put(changes) for place, changes in self._changed]
        try:
            yield
        finally:
            for put_back in reversed(undo):
                put_back()

    def release(self) -> None:
        """Let go of all that was kept."""
        self._places, self._changed = [], []

    @staticmethod
    def _called(place: _Keyed | _Items, key: Any) -> str:
        return f"{place.label}{key}" if place.bound else place.label

    def _look(self, value: Any, label: str, depth: int) -> None:
        if type(value) in _PLAIN or isinstance(value, self._kinds) or depth < 0:
            return
        if id(value) in self._seen or isinstance(value, (type, ModuleType)):
            return
        self._seen.add(id(value))
        if isinstance(value, tuple):
            self._look_at(value, label, depth)
        elif isinstance(value, _CONTAINERS):
            keyed = isinstance(value, dict)
            place = _Keyed(value, label, bound=False) if keyed else _Items(value, label)
            self._places.append(place)
            self._look_at(value.values() if isinstance(value, dict) else value, label, depth)
        elif isinstance(value, functools.partial):
            self._look_at((value.func, value.args, value.keywords), label, depth)
        elif isinstance(getattr(value, "__code__", None), CodeType):
            self._function(value, depth)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._attributes(value, depth - 1)

    def _look_at(self, values: Iterable[Any], label: str, depth: int) -> None:
        if not set(map(type, values)) <= _PLAIN:
            for value in values:
                self._look(value, label, depth - 1)

    def _attributes(self, owner: Any, depth: int) -> None:
        name = f"{type(owner).__name__}."
        self._places.append(_Keyed(owner.__dict__, name, bound=True))
        for key, value in owner.__dict__.items():
            if type(value) not in _PLAIN:
                self._look(value, name + str(key), depth - 1)

    def _function(self, function: Any, depth: int) -> None:
        self._look(getattr(function, "__self__", None), "", depth)
        function = getattr(function, "__func__", function)
        if id(function) in self._done:
            return
        self._done.add(id(function))
        named = names_in(function.__code__)
        self._look(function.__defaults__, "a default", depth)
        self._look(function.__kwdefaults__, "a default", depth)
        self._variables(function, function.__globals__, named.globals, depth)
        if function.__closure__:
            cells = _Cells(function.__code__.co_freevars, function.__closure__)
            self._variables(function, cells, function.__code__.co_freevars, depth)

    def _variables(
        self, function: Any, held: dict[str, Any], names: Sequence[str], depth: int
    ) -> None:
        label = f"{function.__qualname__}'s variable "
        written = names_in(function.__code__).written
        rebound = [name for name in names if name in written] if written else []
        if rebound:
            self._places.append(_Keyed(held, label, bound=True, keys=rebound))
        for name in names:
            value = held[name] if name in held else None  # noqa: SIM401  cells have no get
            if type(value) not in _NOTHING_IN and id(value) not in self._seen:
                self._look(value, label + name, depth - 1)


def _new(was: Any, now: Any, kinds: Kinds) -> list[Any]:
    known = {id(leaf) for leaf in leaves(was, kinds)}
    return [leaf for leaf in leaves(now, kinds) if id(leaf) not in known]
