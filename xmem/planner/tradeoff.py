"""The whole trade-off of a chain, bytes against seconds, from one solve."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from xmem.planner.chain import Chain
from xmem.planner.kernel import open_engine
from xmem.planner.problem import enough_bytes, make_problem
from xmem.planner.solver import WHOLE, least_budget_bytes, solve, store_all_peak_bytes

_GAP = 1e-3
_SAMPLES = 40
"""Into so many parts the budgets of a chain with skips are divided."""


@dataclass(frozen=True)
class Frontier:
    """Which budget allows which time.

    Attributes:
        points: (budget in bytes, seconds of a step), more bytes and fewer seconds one by one. The
            first budget is the least that has a plan, the last allows the fastest options.
        gap: by what share of a step a point may be slower than the best plan of its budget.
    """

    points: tuple[tuple[int, float], ...]
    gap: float

    def seconds(self, budget_bytes: int) -> float | None:
        """Return the time that a budget allows; None: it is below the least."""
        i = bisect_right(self.points, (budget_bytes, math.inf))
        return self.points[i - 1][1] if i else None


def frontier(chain: Chain, *, gap: float = _GAP, kernel: str | None = "auto") -> Frontier:
    """Return the trade-off of a chain.

    Each point is reached by a schedule: `solve` at its budget returns a plan that is no slower
    but for the gap of both. No plan of the family at that budget is faster by more than `gap` of a
    step. The first budget is exact: below it nothing fits. Seconds are rounded to 2**-40 of a step.

    Of a chain with skips there are up to some tens of points, each from a `solve` of its own: a
    budget between two may allow a faster plan than the point below it.

    Args:
        chain: what is to be planned.
        gap: see `Frontier`; 0 is exact, and slow beyond about 30 unequal stages.
        kernel: as in `solve`.
    """
    if chain.skips:
        return _sampled(chain, gap, kernel)
    problem = make_problem(chain, enough_bytes(chain))
    engine = open_engine(problem, kernel)
    jobs = 2 * problem.n + 1
    thinning = math.floor(gap * problem.base / jobs)
    _, thinned = engine.solve(math.inf, thinning=thinning, whole=WHOLE)
    sizes, excess = engine.front()
    points = zip(sizes, excess, strict=True)
    return Frontier(
        points=tuple((m + problem.a[0], (problem.base + x) * problem.tick) for m, x in points),
        gap=gap if thinned else 0.0,
    )


def _sampled(chain: Chain, gap: float, kernel: str | None) -> Frontier:
    least = least_budget_bytes(chain, kernel=kernel)
    most = enough_bytes(chain)
    step = max((store_all_peak_bytes(chain) - least) // _SAMPLES, 1)
    points: list[tuple[int, float]] = []
    budget, reached = most, 0.0
    while True:
        plan = solve(chain, budget, gap=gap, kernel=kernel)
        reached = max(reached, plan.gap)
        # Plans for less that turn out no slower replace those for more.
        points = [p for p in points if p[1] < plan.seconds]
        points.append((plan.peak_bytes, plan.seconds))
        if plan.peak_bytes <= least:
            return Frontier(points=tuple(reversed(points)), gap=reached)
        budget = max(plan.peak_bytes - step, least)
