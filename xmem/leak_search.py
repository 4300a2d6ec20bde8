"""What became of the memory that grows: from two marks in time to suspects.

A mark is taken when a figure rises suspiciously, and another some steps later. Tensors that came
between the two and are alive now have been kept. If there are none, a graph or a single tensor has
grown. Whatever is found has to grow once more before it is reported.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xmem.leak_marks import Mark, graphs_of
from xmem.leak_names import Owner
from xmem.leak_owners import Search
from xmem.leak_records import Leak, texts_of

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.leak_records import LeakKind
    from xmem.pooling import Graph, Pool
    from xmem.slopes import Trend

_SAMPLE = 24
"""So many of the kept tensors are asked for their holders."""
_HELD_HERE_ONLY = 2
"""References to an owner's holder that nobody else has: the owner's, and the argument."""


@dataclass
class Suspect:
    """Something that may be leaking, to be confirmed a step later.

    Attributes:
        kind: of leak.
        owner: who holds it, or None.
        bytes_per_step: by the tensors found, or None where these do not tell.
        root: the number of the operation behind it, for graphs.
        size: how many operations its graph had.
        text: in place of the owner's.
        is_gone: nobody holds the holder any more.
        entries: how many entries the holder had, or None where it is no container.
    """

    kind: LeakKind
    owner: Owner | None
    bytes_per_step: int | None = None
    root: int | None = None
    size: int = 0
    text: str = ""
    is_gone: bool = False
    entries: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.entries = None if self.owner is None else self.owner.count

    def still_grows(self) -> bool:
        """Say whether a container has more entries than it had; of others this is not known."""
        if self.is_gone:
            return False
        if self.owner is None or self.entries is None:
            return True
        return len(self.owner.holder) > self.entries

    def let_go(self) -> None:
        """Forget a holder that is kept by this case alone, and with it what it holds."""
        if self.owner is None or self.owner.holder is None:
            return
        if sys.getrefcount(self.owner.holder) <= _HELD_HERE_ONLY:
            self.owner, self.is_gone = None, True


class Case:
    """A look at what was kept between two marks.

    Attributes:
        suspects: what may be leaking.
        bounded: owners that grow and take only so much.
        due: the step at which it has to show itself again.
        figure: that grows.
        trend: how.
        value: of the figure, when the case was opened.
        bytes_per_step: by which allocated bytes grow; 0 where they do not.
    """

    figure: str
    trend: Trend
    value: int
    bytes_per_step: float

    def __init__(self, backend: Backend, marks: Sequence[Mark], step: int, *, due: int) -> None:
        self._pool = backend.pool
        self._measure = backend.measure
        self._first, self._second = marks
        self._step = step
        self._graphs: list[Suspect] = []
        self._others: list[Suspect] = []
        self.due = due
        self.suspects: list[Suspect] = []
        self.bounded: list[Owner] = []

    def find(self, model: Any, optimizer: Any) -> None:
        """Look for suspects: garbage, containers, graphs, a tensor; in this order."""
        garbage = self.garbage()
        if garbage is not None:
            self.suspects = [garbage]
            return
        held = self.containers()
        self.bounded = [s.owner for s in held if s.owner is not None and s.owner.is_bounded]
        held = [s for s in held if s.owner is None or not s.owner.is_bounded]
        self._graphs = self.graphs(model, optimizer)
        if self.bytes_per_step:
            self._others = [self.grown_tensor() or Suspect("unexplained", None)]
        if self.bounded:
            self._others = [s for s in self._others if s.kind != "unexplained"]
        self.suspects = held or self._graphs or self._others

    def let_go(self) -> None:
        """Forget what its program has dropped: a list of an epoch that is over, say."""
        for suspect in (*self.suspects, *self._graphs, *self._others):
            suspect.let_go()

    def confirmed(self, value: int, step: int) -> list[Suspect]:
        """Return the suspects that have grown since the case was opened.

        Args:
            value: of the figure, now.
            step: now.
        """
        if step == self._step:  # the block has ended meanwhile
            return []
        held = [s for s in self.suspects if s.entries is not None and s.still_grows()]
        if held or all(s.is_gone for s in self.suspects):
            return held
        least = 0.5 * self.trend.per_step * (step - self._step)
        if self.trend.window == 1 and value - self.value < least:
            return []
        garbage = [s for s in self.suspects if s.kind == "reference cycles"]
        held = [s for s in self.suspects if s.root is None and s.owner is not None]
        held = [s for s in held if s.entries is None and s.kind != "growing tensor"]
        if garbage or held:
            return garbage or held
        going_on = carried(self._pool, self._graphs)
        return self._others if going_on is None else [going_on]

    def leak(self, suspect: Suspect, step: int, made_at: str | None, *, alone: bool) -> Leak:
        """Return the record of a confirmed suspect; what grows is its, if it is the only one."""
        explanation, remedy = texts_of(suspect.kind)
        per_step = suspect.bytes_per_step
        if per_step is None or (alone and self.bytes_per_step):
            per_step = round(self.bytes_per_step)
        owner = suspect.owner
        count = None if owner is None or owner.count is None else len(owner.holder)
        return Leak(
            kind=suspect.kind,
            bytes_per_step=per_step,
            since_step=self.trend.since_step,
            found_at_step=step,
            owner=suspect.text or ("" if owner is None else owner.text),
            holder_type="" if owner is None else owner.type,
            tensor_count=count,
            made_at=made_at,
            explanation=explanation,
            remedy=remedy,
            figure=self.figure,
        )

    def _kept(self) -> list[Any]:
        pool, first, second = self._pool, self._first, self._second
        return [t for t in pool.live_tensors() if second.has(t, pool) and not first.has(t, pool)]

    def garbage(self) -> Suspect | None:
        """Collect garbage; say so if that is what kept the tensors."""
        kept = self._kept()
        before = len(kept)
        if before < 2:
            return None
        sizes = sum(self._pool.tensor_bytes(t) for t in kept)
        text = self._held_by(kept)
        kept.clear()
        gc.collect()
        if len(self._kept()) * 2 > before:
            return None
        per_step = sizes // max(1, self._second.step - self._first.step)
        return Suspect("reference cycles", None, per_step, text=text)

    def _held_by(self, kept: list[Any]) -> str:
        """Say what holds a tensor, in words."""
        sample = _spread(kept)[:4]
        with Search(kept, sample) as search:
            for tensor in sample:
                owner = search.owner_of(tensor)
                if owner is not None:
                    return owner.text
            holders = {type(h).__name__ for held in search.holders(sample).values() for h in held}
        return f"objects of type {', '.join(sorted(holders))}" if holders else ""

    def containers(self) -> list[Suspect]:
        """Find what holds the kept tensors."""
        kept = self._kept()
        if len(kept) < 2:
            return []
        sample = _spread(kept)
        found: list[Suspect] = []
        steps = max(1, self._second.step - self._first.step)
        with Search(kept, sample) as search:
            for holder, members in search.common(sample):
                owner = search.owner_of(holder, members[0])
                if owner is None:
                    continue
                share = len(members) / len(sample)
                each = sum(self._pool.tensor_bytes(t) for t in members) / len(members)
                bytes_per_step = round(each * share * len(kept) / steps)
                found.append(Suspect(self._kind_of(members), owner, bytes_per_step))
        return found

    def _kind_of(self, members: Sequence[Any]) -> LeakKind:
        graphs = [graph for t in members if (graph := self._pool.graph_of(t)) is not None]
        if len(graphs) * 2 < len(members):
            return "growing container"
        waiting = [graph for graph in graphs if graph.is_pending]
        return "pending operations" if len(waiting) * 2 > len(graphs) else "retained graph"

    def graphs(self, model: Any, optimizer: Any) -> list[Suspect]:
        """Find tensors whose graph has grown since the first mark, the largest first."""
        graphs = graphs_of(self._pool, self._pool.live_tensors())
        graphs = [entry for entry in graphs if len(entry[1].operations) > self._first.operations]
        if not graphs:
            return []
        graphs.sort(key=lambda entry: -len(entry[1].operations))
        owned = self._measure.owned(model, optimizer, None)
        gradients = {id(gradient) for gradient in owned.get("gradient", ())}
        with Search(graphs, *graphs) as search:
            search.holders([tensor for tensor, _ in graphs[:_SAMPLE]])  # in one walk
            return [
                self._suspect(
                    tensor, graph, search.owner_of(tensor), id(tensor) in gradients, model
                )
                for tensor, graph in graphs[:_SAMPLE]
            ]

    def _suspect(
        self, tensor: Any, graph: Graph, owner: Owner | None, is_gradient: bool, model: Any
    ) -> Suspect:
        kind: LeakKind = "accumulation without a cut"
        text = ""
        if is_gradient:
            text = "`grad` of a parameter" + (
                "" if model is None else f" of {type(model).__name__}"
            )
        elif graph.is_pending:
            kind = "pending operations"
        elif math.prod(tensor.shape) <= 1:
            kind = "retained graph"
        return Suspect(kind, owner, root=graph.root, size=len(graph.operations), text=text)

    def grown_tensor(self) -> Suspect | None:
        """Find the one tensor that has become larger."""
        least = 0.5 * self.bytes_per_step * (self._step - self._first.step)
        pool, sizes = self._pool, self._first.sizes
        new = [t for t in pool.live_tensors() if not self._first.has(t, pool)]
        grown = [t for t in new if pool.tensor_bytes(t) > least and not sizes[pool.tensor_bytes(t)]]
        if not grown:
            return None
        with Search(new, grown) as search:
            owner = search.owner_of(max(grown, key=pool.tensor_bytes))
        return None if owner is None else Suspect("growing tensor", owner)


def carried(pool: Pool, suspects: Sequence[Suspect]) -> Suspect | None:
    """Return the graph that goes on from step to step, of those that were large a step ago.

    It is the largest that is part of a graph now: what was only computed from it is not.
    """
    graphs = [graph for _, graph in graphs_of(pool, pool.live_tensors())]
    now = max(graphs, key=lambda graph: len(graph.operations), default=None)
    if now is None:
        return None
    inside = [s for s in suspects if s.root in now.operations]
    return max(inside, key=lambda suspect: suspect.size, default=None)


def _spread(tensors: list[Any]) -> list[Any]:
    """Return at most so many, from all over the list."""
    every = -(-len(tensors) // _SAMPLE)
    return tensors[::every]
