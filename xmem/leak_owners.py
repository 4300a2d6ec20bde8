"""Who holds a tensor: through Python's references to a name that a person knows.

The garbage collector tells which objects hold an object. Two things it does not tell are looked at
here: the variables of functions that are running, and dicts and tuples without anything that could
be in a cycle, which it leaves out (Jittor's tensors are such things).
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Sequence
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from xmem.leak_names import (
    CONTAINERS,
    Frames,
    Name,
    Owner,
    attribute_of,
    bound_of,
    file_of,
    name_of,
    of_object,
    step_to,
)

_DEPTH = 8
"""So many references away a name is looked for: a kept exception has a traceback of some links."""
_BREADTH = 200
"""So many objects are looked at, at one distance."""
_GROUPS = 3
_OURS = ("xmem.leak", "xmem.pooling")
"""Modules whose objects hold tensors and names for the search itself."""


class Search:
    """A search for holders at one moment: a `with` block, after which it holds nothing."""

    def __init__(self, *not_holders: Any) -> None:
        """Take `not_holders`: containers of the caller's that hold what is looked for."""
        self._frames = Frames()
        self._known: dict[int, list[Any]] = {}
        # By id, and kept: another object must not get the id of one that is gone.
        self._mine: dict[int, Any] = {}
        self._is_mine(self._mine, self._known, self._frames.names, self._frames.untracked)
        self._is_mine(*not_holders)

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *error: object) -> None:
        frames = self._frames
        for each in (self._known, self._mine, frames.names, frames.untracked, frames.running):
            each.clear()

    def _is_mine(self, *containers: Any) -> None:
        for each in containers:
            self._mine[id(each)] = each

    def holders(self, objects: Sequence[Any]) -> dict[int, list[Any]]:
        """Return what holds each object, by its id."""
        missing = [each for each in objects if id(each) not in self._known]
        for each in missing:
            fresh: list[Any] = []
            self._known[id(each)] = fresh
            self._is_mine(fresh)
        if missing:
            self._is_mine(missing, objects)
            self._look({id(each) for each in missing}, missing)
        return {id(each): self._known[id(each)] for each in objects}

    def _look(self, wanted: set[int], missing: list[Any]) -> None:
        tracked = all(gc.is_tracked(each) for each in missing)
        candidates = gc.get_referrers(*missing) if tracked else gc.get_objects()
        self._is_mine(candidates)
        seen: set[tuple[int, int]] = set()
        for holder in candidates:
            kind = type(holder)
            if id(holder) in self._mine or _is_ours(kind):
                continue
            if kind is FrameType and id(holder) in self._frames.running:
                continue
            for part in gc.get_referents(holder):
                if id(part) in wanted:
                    self._add(part, holder, seen)
                elif type(part) in (dict, tuple) and not gc.is_tracked(part):
                    self._look_into(part, wanted, seen)
        if not tracked:
            for part in self._frames.untracked:
                self._look_into(part, wanted, seen)

    def _look_into(self, part: Any, wanted: set[int], seen: set[tuple[int, int]]) -> None:
        for inner in part.values() if type(part) is dict else part:
            if id(inner) in wanted:
                self._add(inner, part, seen)

    def _add(self, held: Any, holder: Any, seen: set[tuple[int, int]]) -> None:
        key = (id(held), id(holder))
        if key not in seen and id(holder) not in self._mine:
            seen.add(key)
            self._known[id(held)].append(holder)

    def name(self, target: Any, *, stop: Any = None) -> Name | None:
        """Return the nearest name of an object, or its path inside `stop`."""
        waiting: deque[tuple[Any, tuple[str, ...]]] = deque([(target, ())])
        self._is_mine(waiting)
        seen = {id(target)}
        while waiting and len(seen) < _BREADTH:
            each, path = waiting.popleft()
            known = self._frames.names.get(id(each)) if stop is None else None
            if known is not None:
                return Name(known.name, path, known.where, known.holder, known.code)
            if len(path) == _DEPTH:
                continue
            for holder in self.holders([each])[id(each)]:
                if holder is stop:
                    return Name("", (step_to(holder, each), *path), "")
                found = None if stop is not None else self._root(holder, each, path)
                if found is not None:
                    return found
                if id(holder) not in seen and not isinstance(holder, (ModuleType, type)):
                    seen.add(id(holder))
                    waiting.append((holder, (step_to(holder, each), *path)))
        return None

    def _root(self, holder: Any, held: Any, path: tuple[str, ...]) -> Name | None:
        """Return a name if this holder gives one."""
        if isinstance(holder, CellType):
            return self._closure(holder, path)
        if isinstance(holder, GeneratorType) and holder.gi_frame is not None:
            for name, value in holder.gi_frame.f_locals.items():
                if value is held:
                    return Name(name, path, f"local of the generator {holder.__name__}")
        if type(holder).__name__ == "_lru_cache_wrapper":
            return Name(name_of(holder), path, "kept by functools.lru_cache", holder)
        if type(holder) is dict:
            return self._variable(holder, held, path)
        if isinstance(holder, CONTAINERS) and not hasattr(holder, "__dict__"):
            return None
        attribute = attribute_of(holder, held)
        return None if attribute is None else of_object(attribute, path, holder)

    def _variable(self, variables: dict[Any, Any], held: Any, path: tuple[str, ...]) -> Name | None:
        key = next((k for k, value in variables.items() if value is held), None)
        if not isinstance(key, str):
            return None
        module = sys.modules.get(str(variables.get("__name__")))
        if module is not None and vars(module) is variables:
            name = module.__name__
            file = file_of(getattr(module, "__file__", None))
            at = file if name == "__main__" else f"module {name}"
            return Name(key, path, f"global of {at}", variables)
        for holder in self.holders([variables])[id(variables)]:
            if isinstance(holder, type):
                return Name(f"{holder.__name__}.{key}", path, "class attribute", holder)
            if not isinstance(holder, CONTAINERS) and getattr(holder, "__dict__", 0) is variables:
                return of_object(key, path, holder)
        return None

    def _closure(self, cell: CellType, path: tuple[str, ...]) -> Name | None:
        for around in self.holders([cell])[id(cell)]:
            for function in self.holders([around])[id(around)]:
                if isinstance(function, FunctionType) and function.__closure__:
                    for name, each in zip(
                        function.__code__.co_freevars, function.__closure__, strict=True
                    ):
                        if each is cell:
                            where = f"closure variable of {function.__qualname__}"
                            return Name(name, path, where)
        return None

    def owner_of(self, holder: Any, member: Any = None) -> Owner | None:
        """Name an object that holds tensors, or a tensor."""
        found = self.name(holder)
        if found is None:
            return None
        inside = None if member is None else self.name(member, stop=holder)
        text = f"{type(holder).__name__} `{found.whole}` ({found.where})"
        if inside is not None and len(inside.path) > 1:
            text += f", in `{found.whole}{inside.whole}`"
        count = len(holder) if isinstance(holder, CONTAINERS) else None
        container = holder if count is not None else found.holder
        bound = bound_of(holder, found.holder)
        kind = type(holder).__name__
        return Owner(text, kind, count, bound, container, found.name.split(".")[-1], found.code)

    def common(self, tensors: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
        """Return the nearest object that most tensors have in common, and then of those left."""
        above = self.holders(tensors)
        # What only a graph holds comes with what holds the graph.
        left = [each for each in tensors if above[id(each)]]
        groups: list[tuple[Any, list[Any]]] = []
        self._is_mine(above, left, groups)
        for _ in range(_GROUPS):
            holder, members = self._shared(left)
            if holder is None:
                break
            groups.append((holder, members))
            self._is_mine(members, groups[-1])
            inside = {id(member) for member in members}
            left[:] = [each for each in left if id(each) not in inside]
        return groups

    def _shared(self, tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
        frontier: dict[int, list[Any]] = {id(each): [each] for each in tensors}
        for _ in range(_DEPTH):
            objects = {id(each): each for reached in frontier.values() for each in reached}
            if not objects or len(tensors) < 2:
                break
            self._is_mine(objects, frontier, *frontier.values())
            above = self.holders(list(objects.values())[:_BREADTH])
            by_holder: dict[int, tuple[Any, set[int]]] = {}
            upper: dict[int, list[Any]] = {}
            for tensor, reached in frontier.items():
                found = {id(h): h for each in reached for h in above.get(id(each), ())}
                upper[tensor] = [h for h in found.values() if not isinstance(h, ModuleType)]
                self._is_mine(found, upper[tensor])
                for number, holder in found.items():
                    entry = by_holder.setdefault(number, (holder, set()))
                    self._is_mine(entry)
                    entry[1].add(tensor)
            self._is_mine(upper, by_holder)
            shared = [entry for entry in by_holder.values() if len(entry[1]) * 2 >= len(tensors)]
            shared = [entry for entry in shared if len(entry[1]) >= 2]
            self._is_mine(shared)
            if shared:
                holder, ids = max(shared, key=lambda entry: len(entry[1]))
                return holder, [each for each in tensors if id(each) in ids]
            frontier = upper
        return None, []


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith(_OURS)
