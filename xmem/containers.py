"""Nested lists, tuples and mappings: collect their leaves of one type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def leaves(tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Return the leaves of a type, in order; everything else is passed over.

    Args:
        tree: a leaf, or lists, tuples, sets and mappings of such; None has no leaves.
        kind: the type of the leaves.
    """
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple, set, frozenset)):
        return [leaf for item in tree for leaf in leaves(item, kind)]
    return []
