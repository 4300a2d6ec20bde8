"""The whole trade-off of a chain, bytes against seconds, from one solve."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from xmem.planner.chain import Chain
from xmem.planner.kernel import open_engine
from xmem.planner.problem import enough_bytes, make_problem
from xmem.planner.solver import WHOLE

_GAP = 1e-3


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

    Args:
        chain: what is to be planned.
        gap: see `Frontier`; 0 is exact, and slow beyond about 30 unequal stages.
        kernel: as in `solve`.
    """
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
