"""The search over all schedules whatever, for chains of few stages: A* over what is held.

The way to go is bounded from below at the next backward B(m): what has to be run to reach it and
cannot be held then is run forward once more, and a knapsack, relaxed to fractions, says how much
can be held (as in bands.py). Peter Hart, Nils Nilsson, Bertram Raphael, "A Formal Basis for the
Heuristic Determination of Minimum Cost Paths", IEEE Transactions on Systems Science and
Cybernetics, 1968.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from xmem.planner.chain import Chain
from xmem.planner.problem import Choice
from xmem.planner.schedule import Op
from xmem.planner.states import KEPT, NOTHING, Move, Space, State

MOST_STAGES = 10
"""Longer chains have too many states for an exhaustive search."""
MOST_MOVES = 600_000
"""After so many moves the search is given up."""

_BITS = 64


@dataclass(frozen=True)
class Searched:
    """What the search came to.

    Attributes:
        ops: the fastest schedule; None: there is none below the limit, or none was found in time.
        excess: in ticks, of that schedule; without one, no schedule has less.
        whole: the search has not been given up.
        moves: how many were looked at.
    """

    ops: list[Op] | None
    excess: float
    whole: bool
    moves: int


def fastest(
    chain: Chain, budget_bytes: int, *, most: float = math.inf, moves: int = MOST_MOVES
) -> Searched:
    """Return the fastest schedule of a chain that fits a budget, of whatever family.

    Args:
        chain: the stages, with their skips.
        budget_bytes: the most that may be held.
        most: the excess, in ticks, from which on a schedule is of no interest.
        moves: how many may be looked at before the search is given up.
    """
    space = Space(chain, budget_bytes)
    ahead = Ahead(space)
    start = space.start()
    costs = {start: 0.0}
    came: dict[State, tuple[State, Move]] = {}
    queue = [(ahead.least(start), 0, start, 0.0)] if space.held(start) <= budget_bytes else []
    count = looked = 0
    while queue:
        bound, _, state, cost = heapq.heappop(queue)
        if cost > costs[state]:
            continue
        if bound >= most:
            return Searched(None, most, True, looked)
        if state.gradient == 0:
            return Searched(_ops(came, state), cost, True, looked)
        if looked > moves:
            return Searched(None, bound, False, looked)
        for move in space.moves(state):
            looked += 1
            total = cost + move.excess
            if total < most and total < costs.get(move.after, math.inf):
                costs[move.after] = total
                least = max(total + ahead.least(move.after), bound)
                if least < most:
                    came[move.after] = state, move
                    count -= 1  # of equals the latest first: it is the farthest
                    heapq.heappush(queue, (least, count, move.after, total))
    return Searched(None, most, True, looked)


def feasible(chain: Chain, budget_bytes: int, *, states: int) -> list[Op] | None:
    """Return any schedule that fits a budget, or None: there is none.

    Raises:
        TimeoutError: neither is known after so many states.
    """
    space = Space(chain, budget_bytes)
    start = space.start()
    ahead = Ahead(space)
    came: dict[State, tuple[State, Move]] = {}
    stack, looked = [start], 0
    # By gradient, those seen that hold most: from these every other can be had by drops.
    seen: list[list[int]] = [[] for _ in range(space.problem.n + 2)]
    if space.held(start) > budget_bytes:
        return None
    while stack:
        state = stack.pop()
        if state.gradient == 0:
            return _ops(came, state)
        looked += 1
        if looked > states:
            raise TimeoutError(f"{states} states")
        for move in reversed(space.moves(state)):
            held, most = _bits(move.after.outputs), seen[move.after.gradient]
            if any(not held & ~other for other in most):
                continue
            if ahead.least(move.after) < math.inf:
                most[:] = [other for other in most if other & ~held]
                most.append(held)
                came[move.after] = state, move
                stack.append(move.after)
    return None


def _bits(outputs: tuple[int, ...]) -> int:
    """Return a bit for each way in which each output is held."""
    bits = 0
    for i, held in enumerate(outputs):
        if held:
            bits |= 1 << (i * _BITS + held)
    return bits


def _ops(came: dict[State, tuple[State, Move]], state: State) -> list[Op]:
    moves = []
    while state in came:
        state, move = came[state]
        moves.append(move)
    return [op for move in reversed(moves) for op in move.ops]


@dataclass
class Ahead:
    """The bound on the excess that is still to come.

    Attributes:
        space: the chain and the budget.
    """

    space: Space
    _items: list[list[tuple[float, int, float, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._items = [self._table(m) for m in range(self.space.problem.n)]

    def _table(self, m: int) -> list[tuple[float, int, float, int, int]]:
        """Return (efficiency, bytes, ticks saved, stage, how it is held), the best first.

        At B(m), of holding what must be run before it (NOTHING), and of not dropping what is kept.
        """
        problem, rows = self.space.problem, []
        for i in range(m):
            less = problem.a[i + 1] if i + 1 in self.space.reads[m] else 0
            for size, saved in _hull(problem.options[i], problem.again[i], less):
                rows.append((size, saved, i, NOTHING))
            for k, way in enumerate(self.space.ways[i]):
                if way.dropping:
                    rows.append((max(way.abar - less, 0), way.dropping, i, KEPT + k))
        return sorted((-saved / max(size, 1e-9), size, saved, i, h) for size, saved, i, h in rows)

    def least(self, state: State) -> float:
        """Return a bound on the excess of every way to go on; inf: there is none."""
        outputs, gradient = state
        space = self.space
        problem, reads = space.problem, space.reads
        if gradient == 0:
            return 0.0
        m = min(gradient, problem.n) - 1
        room = space.budget - problem.a[0] - space.gradients[m + 1]
        room -= min(way.abar + way.tb for way in space.ways[m])
        room -= sum(problem.a[j] for j in reads[m])
        if room < 0:
            return math.inf
        required, total, todo = set(), 0.0, list(reads[m])
        while todo:
            i = todo.pop() - 1
            if outputs[i] == NOTHING and i not in required:
                required.add(i)
                total += problem.again[i]
                todo += reads[i]
        for i in range(m):
            if outputs[i] >= KEPT:
                total += space.ways[i][outputs[i] - KEPT].dropping
        if not total:
            return 0.0
        for _, size, saved, i, how in self._items[m]:
            if (i in required) if how == NOTHING else outputs[i] == how:
                if size > room:
                    return max((total - saved * room / size) // 1, 0.0)
                room -= size
                total -= saved
        return max(total, 0.0)


def _hull(options: tuple[Choice, ...], again: float, less: int) -> list[tuple[int, float]]:
    """Return the concave hull of what holding a stage saves; see `bands.hull`."""
    points = [(max(o.abar - less, 0), again - o.excess) for o in options if again > o.excess]
    at, saved = 0, 0.0
    steps: list[tuple[int, float]] = []
    while True:
        better = [(size, value) for size, value in points if value > saved]
        if not better:
            return steps
        size, value = max(better, key=lambda p: (p[1] - saved) / max(p[0] - at, 1e-9))
        steps.append((max(size - at, 0), value - saved))
        at, saved = max(at, size), value
