"""Nested lists, tuples and mappings: collect leaves of one type, take them out, put others in."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xmem.errors import UsageError


def leaves(tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Return the leaves of a type, in order; everything else is passed over.

    Args:
        tree: a leaf, or lists, tuples, sets, deques and mappings of such; None has no leaves.
        kind: the type of the leaves.
    """
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple, set, frozenset, deque)):
        return [leaf for item in tree for leaf in leaves(item, kind)]
    return []


@dataclass(frozen=True)
class Slot:
    """The place of a leaf in a template."""

    index: int


def take_apart(value: Any, kind: type | tuple[type, ...], found: list[Any]) -> Any:
    """Return the value with every leaf of a type in lists, tuples and dicts replaced by its Slot.

    Args:
        value: any value; what is neither such a leaf nor a container stays.
        kind: the type of the leaves.
        found: the leaves are appended here.
    """
    if isinstance(value, kind):
        found.append(value)
        return Slot(len(found) - 1)
    return rebuilt(value, lambda part: take_apart(part, kind, found))


def fill(template: Any, leaves: Sequence[Any]) -> Any:
    """Return the template with leaves in its Slots."""
    if type(template) is Slot:
        return leaves[template.index]
    return rebuilt(template, lambda part: fill(part, leaves))


def snapshot(tree: Any) -> Any:
    """Return copies of nested lists, tuples and dicts, with the same leaves.

    Whoever changes one of the containers later (appends to a list) does not change the snapshot.
    """
    if type(tree) in (list, tuple):
        return type(tree)(snapshot(part) for part in tree)
    if type(tree) is dict:
        return {key: snapshot(part) for key, part in tree.items()}
    return tree


def as_in(tree: Any, snapshot: Any) -> Any:
    """Return the containers themselves where they are as in a snapshot, else the snapshot's."""
    if unchanged(tree, snapshot):
        return tree
    alike = type(tree) is type(snapshot) and type(tree) in (list, tuple, dict)
    if not alike or len(tree) != len(snapshot):
        return snapshot
    if type(tree) is dict:
        return {key: as_in(tree.get(key), part) for key, part in snapshot.items()}
    return type(tree)(map(as_in, tree, snapshot))


def unchanged(tree: Any, snapshot: Any) -> bool:
    """Say whether nested containers hold the very leaves that a snapshot of them holds."""
    if type(tree) is not type(snapshot) or type(tree) not in (list, tuple, dict):
        return tree is snapshot
    if type(tree) is dict:
        same_keys = list(tree) == list(snapshot)
        return same_keys and all(unchanged(tree[key], snapshot[key]) for key in tree)
    return len(tree) == len(snapshot) and all(map(unchanged, tree, snapshot))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a list, tuple or dict with each part changed; the value itself if none changes."""
    if not isinstance(value, (list, tuple, dict)):
        return value
    before = list(value.values() if isinstance(value, dict) else value)
    after = [change(part) for part in before]
    if all(a is b for a, b in zip(after, before, strict=True)):
        return value
    if isinstance(value, dict):
        made = copy.copy(value)  # keeps a default factory and the like
        made.update(zip(value, after, strict=True))
        return made
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*after)
    return type(value)(after)


def optimizers_in(optimizer: Any) -> list[Any]:
    """Return the optimizers that were given: one, several in containers, or None for none.

    Raises:
        UsageError: one of them is no optimizer.
    """
    if isinstance(optimizer, dict):
        optimizer = list(optimizer.values())
    if isinstance(optimizer, (list, tuple, set)):
        return [one for held in optimizer for one in optimizers_in(held)]
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"optimizer={type(optimizer).__name__} has no param_groups; pass an optimizer, or a"
            " list of them"
        )
    return [] if optimizer is None else [optimizer]
