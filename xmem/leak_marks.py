"""What is alive at a step, as identities and numbers: no tensor is held between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmem.pooling import Graph, Pool

_GRAPHS = 64
_WALKED = 200_000
"""Graphs are looked at until so many tensors, or so many operations, have been."""


@dataclass(frozen=True)
class Mark:
    """What was alive at a step.

    Attributes:
        step: when.
        identities: of all tensors, by `id`.
        sizes: how many tensors had how many bytes.
        operations: how many operations the largest graph had.
    """

    step: int
    identities: dict[int, Any]
    sizes: Counter[int]
    operations: int

    def has(self, tensor: Any, pool: Pool) -> bool:
        """Say whether a tensor was alive."""
        before = self.identities.get(id(tensor))
        now = pool.identity_of(tensor)
        return before is not None and (before is now or bool(before == now))


def graphs_of(pool: Pool, tensors: Sequence[Any]) -> list[tuple[Any, Graph]]:
    """Return tensors with their graphs, the youngest first, within bounds."""
    found: list[tuple[Any, Graph]] = []
    walked = 0
    for tensor in reversed(tensors):
        graph = pool.graph_of(tensor)
        if graph is None:
            continue
        found.append((tensor, graph))
        walked += len(graph.operations)
        if len(found) == _GRAPHS or walked > _WALKED:
            break
    return found


def largest_graph(pool: Pool) -> int:
    """Return how many operations the largest graph of a live tensor has."""
    graphs = graphs_of(pool, pool.live_tensors())
    return max((len(graph.operations) for _, graph in graphs), default=0)


def mark(pool: Pool, step: int) -> Mark:
    """Note what is alive."""
    tensors = pool.live_tensors()
    graphs = graphs_of(pool, tensors)
    return Mark(
        step,
        {id(tensor): pool.identity_of(tensor) for tensor in tensors},
        Counter(pool.tensor_bytes(tensor) for tensor in tensors),
        max((len(graph.operations) for _, graph in graphs), default=0),
    )


def fingerprint(pool: Pool) -> Callable[[Any], Any]:
    """Return what changes when a tensor is changed in place together with its graph."""

    def look(value: Any) -> Any:
        try:
            graph = pool.graph_of(value)
        except (AttributeError, TypeError):  # no tensor
            return None
        return None if graph is None else graph.root

    return look
