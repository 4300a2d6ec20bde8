"""The solver in plain Python: one front for each job, inside a band of excess.

A front is a staircase: more bytes, less excess. `planner.cc` in xmem/native is the same algorithm
and returns the same fronts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import Protocol

from xmem.planner.bands import Bands, least_excess
from xmem.planner.problem import Branch, Key, Problem
from xmem.planner.schedule import Op

Front = tuple[list[int], list[float]]
"""Bytes, ascending, and the excess in ticks that they allow, descending."""

_NONE: Front = ([], [])
_MOST_KEPT = 400_000


class Engine(Protocol):
    """What finds the fronts: `PythonEngine` or `xmem.planner.kernel.NativeEngine`.

    Attributes:
        patience: after so many rounds without a schedule `least_bytes` is worth its time.
    """

    patience: int

    def least_excess(self) -> float:
        """Return a bound on the excess of every schedule; inf: no schedule can fit."""

    def solve(self, most: float, *, thinning: float, whole: int) -> tuple[float, bool]:
        """Find the fronts of all schedules whose excess is at most so much.

        Args:
            most: the excess, in whole ticks, or inf.
            thinning: of points that differ by no more than these ticks only the first stays.
            whole: fronts of no more than so many points are not thinned.

        Returns:
            The least excess found, or inf, and whether a point was thinned out.
        """

    def front(self) -> Front:
        """Return the front of the whole chain."""

    def ops(self) -> list[Op]:
        """Return the schedule of the least excess that was found last."""

    def least_bytes(self) -> int:
        """Return the least bytes, without a_0, of any schedule of the family."""


class PythonEngine:
    """See `Engine`."""

    patience = 12

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._fronts: list[Front] = []
        self._branches: dict[Key, list[Branch]] = {}
        self._thinned = False

    @cached_property
    def _bands(self) -> Bands:
        return Bands(self._problem)

    @cached_property
    def _jobs(self) -> list[tuple[int, int, int, Key, float, float]]:
        """Each job with what is paid outside it: by all stages, and without those before it."""
        problem, pre, bands, rows = self._problem, self._problem.pre, self._bands, []
        for s, t, j, key in problem.jobs():
            # Only a forward run over all of them can have led to such an end t.
            paid = (pre[t] if j else pre[t + 1]) - pre[s] if t < problem.n else 0.0
            after = bands.after[key // problem.width]
            rows.append((s, t, j, key, paid + max(bands.outside[key], after), paid + after))
        return rows

    def least_excess(self) -> float:
        """See `Engine`."""
        return least_excess(self._problem)

    def least_bytes(self) -> int:
        """See `Engine`."""
        return self._problem.least_bytes()

    def front(self) -> Front:
        """See `Engine`."""
        return self._fronts[self._problem.key(0, self._problem.n, 0)]

    def solve(self, most: float, *, thinning: float, whole: int) -> tuple[float, bool]:
        """See `Engine`."""
        width = self._problem.width
        self._fronts = [_NONE] * (self._problem.classes[-1][-1] + 1) * width
        self._thinned = False
        for s, t, j, key, outside, after in self._jobs:
            if outside <= most:
                points = self._points((s, t, j), key, most - outside)
                front = self._within(points, key // width, most - outside, most - after)
                if len(front[0]) > whole and thinning:
                    front = self._thin(front, thinning)
                self._fronts[key] = front
        least = self.front()[1]
        return (least[-1] if least else math.inf), self._thinned

    def _ways(self, job: tuple[int, int, int], key: Key, limit: float) -> Iterable[Branch]:
        """Return a job's branches; those of small problems are made once for all rounds."""
        if len(self._jobs) * self._problem.n > _MOST_KEPT:
            return self._problem.branches(*job, limit)
        if key not in self._branches:
            self._branches[key] = list(self._problem.branches(*job))
        return self._branches[key]

    def _points(self, job: tuple[int, int, int], key: Key, limit: float) -> list[tuple[int, float]]:
        """Return bytes and excess of everything that the branches of a job offer."""
        s, t, j = job
        if s == t:
            return [(size, x) for size, x, _ in self._problem.leaf(s, j)]
        points: list[tuple[int, float]] = []
        fronts, cap = self._fronts, self._problem.cap
        for need, held, x, first, second, _, _, _ in self._ways(job, key, limit):
            if x > limit:
                if second is None:
                    continue
                break  # what follows costs no less
            sizes, excess = fronts[first]
            if not sizes:
                continue
            if second is None:
                most = limit - x
                if excess[-1] <= most:
                    points += [
                        (m + held if m + held > need else need, z + x)
                        for m, z in zip(sizes, excess, strict=True)
                        if z <= most
                    ]
                continue
            front = fronts[second]
            if front[0] and x + excess[-1] + front[1][-1] <= limit:
                points += _sum(fronts[first], front, (need, held, x), (cap, limit))
        return points

    def _within(
        self, points: list[tuple[int, float]], number: int, limit: float, band: float
    ) -> Front:
        """Return the lower envelope of points, as far as it lies in the band."""
        points.sort()
        sizes: list[int] = []
        excess: list[float] = []
        bands, cap, best = self._bands, self._problem.cap, math.inf
        least_room, pays = bands.table(number)
        fits, easy = cap - least_room[0], band - pays[0]
        for size, x in points:
            if size > fits:
                break
            if (
                x < best
                and x <= limit
                and (x <= easy or x + bands.before(number, cap - size) <= band)
            ):
                sizes.append(size)
                excess.append(x)
                best = x
        return sizes, excess

    def _thin(self, front: Front, thinning: float) -> Front:
        """Leave out points that improve on the one before by no more than `thinning`."""
        sizes, excess = [], []
        best, end = math.inf, len(front[0]) - 1
        for i, (size, x) in enumerate(zip(*front, strict=True)):
            if x < best - thinning or i == end:
                sizes.append(size)
                excess.append(x)
                best = x
        self._thinned = self._thinned or len(sizes) <= end
        return sizes, excess

    def _at(self, key: Key, size: int) -> float:
        sizes, excess = self._fronts[key]
        i = bisect_right(sizes, size)
        return excess[i - 1] if i else math.inf

    def ops(self) -> list[Op]:
        """See `Engine`. Each job is done in the branch that is best at the bytes left."""
        problem, ops = self._problem, list[Op]()
        # What is left to do, last first; a stack of our own, since a chain may be long.
        stack: list[Op | tuple[int, int, int, int]] = [(0, problem.n, 0, problem.cap)]
        while stack:
            top = stack.pop()
            if isinstance(top, Op):
                ops.append(top)
                continue
            s, t, j, size = top
            if s == t:
                ops += self._leaf_ops(s, j, size)
                continue
            _, held, _, _, _, kind, q, k = self._best(s, t, j, size)
            if kind == "G":
                ops.append(Op("G", s, k))
                stack += [Op("B", s), (s + 1, t, j, size - held)]
                continue
            ops.append(Op("N", s))
            for i in range(s + 1, q):
                ops += [Op("N", i), Op("Da", i)]
            if kind == "split":
                stack += [(s, q - 1, 0, size), Op("Da", q), (q, t, j, size - held)]
            else:
                ops += [Op("G", q, k), Op("Da", q)]
                stack += [(s, q, k + 1, size), (q + 1, t, j, size - held)]
        return ops

    def _leaf_ops(self, s: int, j: int, size: int) -> list[Op]:
        if s == self._problem.n:
            return [Op("L")]
        if j:
            return [Op("B", s)]
        k = min((x, k) for need, x, k in self._problem.leaf(s, 0) if need <= size)[1]
        return [Op("G", s, k), Op("B", s)]

    def _best(self, s: int, t: int, j: int, size: int) -> Branch:
        best, found = math.inf, None
        for branch in self._problem.branches(s, t, j):
            need, held, x, first, second, *_ = branch
            if need <= size:
                value = x + self._at(first, size - held)
                value += 0.0 if second is None else self._at(second, size)
                if value < best:
                    best, found = value, branch
        assert found is not None
        return found


def _sum(
    first: Front, second: Front, own: tuple[int, int, float], limits: tuple[int, float]
) -> list[tuple[int, float]]:
    """Return the points of x + first(m - held) + second(m) for m from `need` up to `cap`."""
    (sizes, excess), (others, more) = first, second
    (need, held, x), (cap, limit) = own, limits
    i = k = 0
    ends, other_ends = len(sizes) - 1, len(others) - 1
    points: list[tuple[int, float]] = []
    size = max(sizes[0] + held, others[0], need)
    while size <= cap:
        while i < ends and sizes[i + 1] + held <= size:
            i += 1
        while k < other_ends and others[k + 1] <= size:
            k += 1
        value = x + excess[i] + more[k]
        if value <= limit:
            points.append((size, value))
        if i < ends:
            size = sizes[i + 1] + held
            if k < other_ends and others[k + 1] < size:
                size = others[k + 1]
        elif k < other_ends:
            size = others[k + 1]
        else:
            break
    return points
