"""Plans of chains with skips.

Up to `search.MOST_STAGES` stages all schedules are searched. Of longer chains two formulations are
solved without skips, and their schedules translated (`skips.live`), played, and the fastest taken:

* pinned: what a skip takes is a constant beside the chain, from the source's forward to its
  backward. Which sources are kept anyway, and need no pin, is tried out.
* carried: every value between source and target takes the skip along, as do the gradients.

Both count bytes twice here and there. So where a schedule turns out to hold less than the budget,
the formulation is solved again with as much more, and with less where it holds more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xmem.planner.chain import Chain
from xmem.planner.fronts import Engine
from xmem.planner.limits import least_peak_bytes
from xmem.planner.problem import Problem, make_problem, ticks
from xmem.planner.schedule import Op
from xmem.planner.search import MOST_STAGES, fastest, feasible
from xmem.planner.simulation import simulate
from xmem.planner.skips import carried, last_targets, live, pins

Opener = Callable[[Problem], Engine]
Solver = Callable[[Engine, Problem], list[Op] | None]
"""Returns the fastest schedule of a problem, or None: nothing fits."""

_ROUNDS = 6
_SUBSETS = 3
"""Up to so many sources every set of pins is tried; beyond, all and none."""
_FEASIBLE_STATES = 5_000


@dataclass(frozen=True)
class Bridged:
    """What was found.

    Attributes:
        ops: the schedule.
        least_seconds: no schedule whatever is faster.
        proven: it is the fastest of all schedules.
    """

    ops: list[Op]
    least_seconds: float
    proven: bool


@dataclass(frozen=True)
class _Formulation:
    """A chain without skips that stands for one with skips."""

    chain: Chain
    pins: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    keeps: bool = True

    def problem(self, budget: int) -> Problem:
        return make_problem(self.chain, max(budget, 0), keeps=self.keeps, pins=self.pins)


def plan_bridged(chain: Chain, budget: int, open_engine: Opener, solver: Solver) -> Bridged | None:
    """Return the fastest schedule of a chain with skips, or None: none fits, or none is found.

    Args:
        chain: the stages and their skips.
        budget: bytes, the batch included.
        open_engine: opens a problem without skips.
        solver: solves it.
    """
    best = _best_formulated(chain, budget, open_engine, solver)
    if len(chain.stages) > MOST_STAGES:
        return Bridged(best, 0.0, proven=False) if best else None
    problem = make_problem(chain, budget)
    most = _excess(problem, chain, best) if best else math.inf
    found = fastest(chain, budget, most=most)
    if found.ops is None and best is None:
        return None
    least = (problem.base + found.excess) * problem.tick
    return Bridged(found.ops or best or [], least, found.whole)


def least_bridged_bytes(chain: Chain, open_engine: Opener, solver: Solver) -> int:
    """Return the least budget that has a plan.

    Of chains that are searched it is exact, unless they have a great many options.
    """
    high = min(
        simulate(chain, ops)[1]
        for formulation in _formulations(chain)
        for ops in _translated(chain, _solved(formulation, 0, open_engine, solver)[1])
    )
    if len(chain.stages) > MOST_STAGES:
        return high
    low, tight = least_peak_bytes(chain) - 1, True
    while high - low > 1:
        # What was found last may be the least already; it seldom is between the two.
        at = high - 1 if tight else (low + high) // 2
        try:
            ops = feasible(chain, at, states=_FEASIBLE_STATES)
        except TimeoutError:
            return high
        if ops is None:
            low = at
        else:
            high = simulate(chain, ops)[1]
        tight = not tight
    return high


def _formulations(chain: Chain) -> Iterator[_Formulation]:
    alone = Chain(chain.name, chain.stages, chain.value_bytes)
    sources = sorted(last_targets(chain))
    counts = range(len(sources), -1, -1) if len(sources) <= _SUBSETS else (len(sources), 0)
    for count in counts:
        for pinned in itertools.combinations(sources, count):
            yield _Formulation(alone, pins(chain, pinned))
    yield _Formulation(carried(chain, whole=True))
    yield _Formulation(carried(chain, whole=False), keeps=False)


def _translated(chain: Chain, ops: Sequence[Op]) -> list[list[Op]]:
    """Return what a schedule of the chain alone can become: with skips remade, and with none."""
    return [live(chain, ops), live(chain, ops, pinned=last_targets(chain))]


def _best_formulated(
    chain: Chain, budget: int, open_engine: Opener, solver: Solver
) -> list[Op] | None:
    best: tuple[float, int] | None = None
    found: list[Op] | None = None
    for formulation in _formulations(chain):
        asked, seen = budget, set()
        for _ in range(_ROUNDS):
            asked, ops = _solved(formulation, asked, open_engine, solver)
            played = [(simulate(chain, o), o) for o in _translated(chain, ops)]
            for cost, o in played:
                if cost[1] <= budget and (best is None or cost < best):
                    best, found = cost, o
            seen.add(asked)
            asked += budget - min(peak for (_, peak), _ in played)
            if asked in seen:
                break
    return found


def _solved(
    formulation: _Formulation, asked: int, open_engine: Opener, solver: Solver
) -> tuple[int, list[Op]]:
    """Return the fastest schedule of a formulation, at its least budget if it needs that much."""
    problem = formulation.problem(asked)
    ops = solver(open_engine(problem), problem)
    if ops is not None:
        return asked, ops
    least = open_engine(problem).least_bytes() + problem.a[0]
    problem = formulation.problem(least)
    return least, solver(open_engine(problem), problem) or []


def _excess(problem: Problem, chain: Chain, ops: Sequence[Op]) -> float:
    """Return the excess of a schedule in ticks."""
    kept: dict[int, int] = {}
    total = -problem.base
    for op in ops:
        stage = chain.stages[op.index]
        if op.code == "N":
            total += problem.fng[op.index]
        elif op.code == "G":
            kept[op.index] = op.option
            total += problem.options[op.index][op.option].f
        elif op.code == "B":
            total += ticks(stage.options[kept[op.index]].backward_seconds, problem.tick)
    return total
