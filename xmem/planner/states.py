"""What can be held at a time, and what can be done next: the states of the exhaustive search.

Nothing is lost by dropping late: if an operation fits, whatever is held can still be dropped after
it. So drops are not steps of their own. They come right before an operation that would not fit,
and only sets count that would not do with one element less. Two drops are free: of what nobody
will read again, and of an a_{i+1} by itself when stage i is kept (if what is kept were dropped
later, the stage need not have been kept). For the same reason a stage that is kept is run once
more only after it is dropped. So the output of a stage is either not held, or held by itself, or
held in what the stage keeps: one of K+2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xmem.planner.chain import Chain
from xmem.planner.problem import Problem, make_problem, ticks
from xmem.planner.schedule import Op
from xmem.planner.skips import gradient_bytes, read_values

NOTHING, ALONE, KEPT = 0, 1, 2
"""How the output of a stage is held; KEPT + k: in what the stage keeps as option k."""


class State(NamedTuple):
    """What is held, beside the batch.

    Attributes:
        outputs: of each stage, how it is held.
        gradient: the j whose delta_j is alive; n+1 before the loss.
    """

    outputs: tuple[int, ...]
    gradient: int


class Move(NamedTuple):
    """An operation with the drops before and after it.

    Attributes:
        ops: in order.
        excess: what it adds to the excess, in ticks.
        after: the state that it leads to.
    """

    ops: tuple[Op, ...]
    excess: float
    after: State


class Way(NamedTuple):
    """An option in bytes and ticks.

    Its excess is charged in part where the stage is kept, in part at its backward or where it is
    dropped; no part is negative.
    """

    abar: int
    tf: int
    tb: int
    keeping: float
    backward: float
    dropping: float
    excess: float


@dataclass(frozen=True)
class Space:
    """A chain and a budget, as the search sees them.

    Attributes:
        chain: the stages, and their skips.
        budget: bytes, the batch included.
    """

    chain: Chain
    budget: int

    @cached_property
    def problem(self) -> Problem:
        """The same without skips, with times in ticks."""
        return make_problem(self.chain, self.budget)

    @cached_property
    def ways(self) -> tuple[tuple[Way, ...], ...]:
        """The options of each stage."""
        rows = []
        for stage, choices in zip(self.chain.stages, self.problem.options, strict=True):
            row = []
            for option, o in zip(stage.options, choices, strict=True):
                b = ticks(option.backward_seconds, self.problem.tick)
                base = o.f + b - o.excess
                late = min(b, base)
                row.append(
                    Way(o.abar, o.tf, o.tb, o.f + late - base, b - late, base - late, o.excess)
                )
            rows.append(tuple(row))
        return tuple(rows)

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """For each stage, the j of what it reads."""
        return read_values(self.chain)

    @cached_property
    def gradients(self) -> list[int]:
        """Bytes of all gradients at each gradient position; none before the loss."""
        sizes = zip(self.chain.value_bytes, gradient_bytes(self.chain), strict=True)
        return [*(delta + more for delta, more in sizes), 0]

    def start(self) -> State:
        """Return the state before a step."""
        n = self.problem.n
        return State((NOTHING,) * n, n + 1)

    def held(self, state: State) -> int:
        """Return the bytes held in a state."""
        a, ways = self.problem.a, self.ways
        size = a[0] + self.gradients[state.gradient]
        for i, held in enumerate(state.outputs):
            if held == ALONE:
                size += a[i + 1]
            elif held:
                size += ways[i][held - KEPT].abar
        return size

    def moves(self, state: State) -> list[Move]:
        """Return what can be done next: one move only where no other can be better."""
        outputs, gradient = state
        n, a, free = self.problem.n, self.problem.a, self.budget - self.held(state)
        found: list[Move] = []
        if gradient == n + 1:
            if outputs[-1]:
                for dropped, kept, paid in self._room(state, a[n] - free, (n,), None):
                    found.append(self._move(dropped, Op("L"), paid, State(kept, n)))
        elif outputs[gradient - 1] >= KEPT and self._there(outputs, gradient - 1):
            i = gradient - 1
            way = self.ways[i][outputs[i] - KEPT]
            for dropped, kept, paid in self._room(state, way.tb - free, self.reads[i], i):
                after = State((*kept[:i], NOTHING, *kept[i + 1 :]), i)
                found.append(self._move(dropped, Op("B", i), paid + way.backward, after))
                if not dropped and not way.backward:
                    # It costs nothing. Does it also leave as much room as anything else?
                    if self.gradients[i] <= self.gradients[i + 1]:
                        return found
                    if self.gradients[i] <= self.gradients[i + 1] + way.abar:
                        return found + self._without(state, i)
        for i in range(min(gradient, n)):
            if self._there(outputs, i):
                found += self._forwards(state, i, free)
        return found

    def _without(self, state: State, i: int) -> list[Move]:
        """Return what can be done next if what stage i keeps is dropped first."""
        outputs, gradient = state
        paid = self.ways[i][outputs[i] - KEPT].dropping
        bare = State((*outputs[:i], NOTHING, *outputs[i + 1 :]), gradient)
        drop = Op("Ds", i)
        return [
            Move((drop, *move.ops), paid + move.excess, move.after) for move in self.moves(bare)
        ]

    def _there(self, outputs: tuple[int, ...], i: int) -> bool:
        return all(outputs[j - 1] for j in self.reads[i])

    def _forwards(self, state: State, i: int, free: int) -> Iterator[Move]:
        outputs, gradient = state
        a, held = self.problem.a, outputs[i]
        first: tuple[Op, ...]
        if held >= KEPT:
            way = self.ways[i][held - KEPT]
            free, start, first = free + way.abar, way.dropping, (Op("Ds", i),)
        else:
            start, first = 0.0, ()
        bare = State((*outputs[:i], NOTHING, *outputs[i + 1 :]), gradient)
        if held != ALONE and i + 1 < gradient:
            need = a[i + 1] + self.problem.tng[i]
            for dropped, kept, paid in self._room(bare, need - free, self.reads[i], None):
                after = State((*kept[:i], ALONE, *kept[i + 1 :]), gradient)
                excess = start + paid + self.problem.fng[i]
                yield self._move((*first, *dropped), Op("N", i), excess, after)
        if held == ALONE:
            free, first = free + a[i + 1], (Op("Da", i + 1),)
        for k, way in enumerate(self.ways[i]):
            if held == KEPT + k:
                continue
            need = way.abar + way.tf
            for dropped, kept, paid in self._room(bare, need - free, self.reads[i], None):
                after = State((*kept[:i], KEPT + k, *kept[i + 1 :]), gradient)
                excess = start + paid + way.keeping
                yield self._move((*first, *dropped), Op("G", i, k), excess, after)

    def _room(
        self, state: State, lacking: int, reads: tuple[int, ...], stays: int | None
    ) -> Iterator[tuple[tuple[Op, ...], tuple[int, ...], float]]:
        """Yield the least sets of drops that give the bytes that are lacking.

        Args:
            state: what is held.
            lacking: bytes; 0 or less: nothing need be dropped.
            reads: the j of what must not be dropped.
            stays: a stage whose activations must not be dropped, or None.
        """
        outputs = state.outputs
        if lacking <= 0:
            yield (), outputs, 0.0
            return
        items = []
        for i, held in enumerate(outputs):
            if held and i + 1 not in reads and i != stays:
                size = self.problem.a[i + 1] if held == ALONE else self.ways[i][held - KEPT].abar
                if size:
                    items.append((size, i))
        items.sort(reverse=True)
        for chosen in _least_sets(items, lacking):
            kept, paid, ops = list(outputs), 0.0, []
            for i in sorted(chosen):
                if outputs[i] == ALONE:
                    ops.append(Op("Da", i + 1))
                else:
                    ops.append(Op("Ds", i))
                    paid += self.ways[i][outputs[i] - KEPT].dropping
                kept[i] = NOTHING
            yield tuple(ops), tuple(kept), paid

    def _move(self, before: tuple[Op, ...], op: Op, excess: float, after: State) -> Move:
        """Make a move, and drop what nobody will read again after it."""
        outputs, gradient = after
        # a_j is read for the last time by B(j).
        useless = [i for i, held in enumerate(outputs) if held == ALONE and gradient <= i + 1]
        if useless:
            kept = list(outputs)
            for i in useless:
                kept[i] = NOTHING
            after = State(tuple(kept), gradient)
        drops = (Op("Da", i + 1) for i in useless)
        return Move((*before, op, *drops), excess, after)


def _least_sets(items: list[tuple[int, int]], lacking: int) -> Iterator[tuple[int, ...]]:
    """Yield the sets of items that reach a size and would not without any one of theirs."""
    rest = [0] * (len(items) + 1)
    for at in range(len(items) - 1, -1, -1):
        rest[at] = rest[at + 1] + items[at][0]

    def grow(at: int, total: int, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        # Items fall in size: the last one chosen is the least, so the set is minimal.
        for k in range(at, len(items)):
            if total + rest[k] < lacking:
                return
            size, i = items[k]
            if total + size >= lacking:
                yield (*chosen, i)
            else:
                yield from grow(k + 1, total + size, (*chosen, i))

    return grow(0, 0, ())
