"""What a schedule must pay for outside a job: the bounds that keep fronts short.

While a job runs, a stage that is neither in it nor held will be run forward once more. Which ones
can be held beside the job is a knapsack; its relaxation to fractions (Dantzig, 1957) is a bound
that every completion of the job obeys. All values are ticks, rounded down.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from xmem.planner.problem import Key, Problem

Item = tuple[int, float, int]
"""Bytes that are held, ticks that they save, of which stage."""


def hull(problem: Problem, i: int, less: int) -> list[Item]:
    """Return the concave hull of what holding stage i saves, as steps of falling efficiency.

    Args:
        problem: the stages.
        i: the stage.
        less: bytes of what it keeps that are paid for elsewhere.
    """
    points = [
        (max(o.abar - less, 0), problem.again[i] - o.excess)
        for o in problem.options[i]
        if problem.again[i] > o.excess
    ]
    at, saved = 0, 0.0
    steps: list[Item] = []
    while True:
        best, chosen = -1.0, None
        for size, value in points:
            if value > saved:
                slope = (value - saved) / max(size - at, 1e-9)
                if slope > best:
                    best, chosen = slope, (size, value)
        if chosen is None:
            return steps
        steps.append((max(chosen[0] - at, 0), chosen[1] - saved, i))
        at, saved = max(at, chosen[0]), chosen[1]


def by_efficiency(items: Iterable[Item]) -> list[Item]:
    """Sort steps, those that save most for a byte first."""
    return sorted(items, key=lambda item: -item[1] / max(item[0], 1e-9))


def room_at_last(problem: Problem) -> int:
    """Return what stages before the last may hold at its backward; negative: there is no room.

    a_{n-1} is taken off: it is there, by itself or inside abar_{n-2}.
    """
    last = min(o.abar + o.tb for o in problem.options[-1])
    return problem.cap - last - problem.a[-1] - _tail(problem)


def items_at_last(problem: Problem) -> list[Item]:
    """Return the steps of all stages before the last, as they count against `room_at_last`."""
    n, tail = problem.n, _tail(problem)
    return by_efficiency(
        item for i in range(n - 1) for item in hull(problem, i, tail if i == n - 2 else 0)
    )


def _tail(problem: Problem) -> int:
    return problem.a[problem.n - 1] if problem.n > 1 else 0


def least_excess(problem: Problem) -> float:
    """Return a bound on the excess of every schedule, of any family, or inf: there is none."""
    room = room_at_last(problem)
    return _pay(problem, items_at_last(problem), (problem.n, problem.n), room)


def _pay(problem: Problem, items: list[Item], job: tuple[int, int], room: int) -> float:
    """Return what the stages outside s..t but the last pay, if `room` bytes of them are held."""
    if room < 0:
        return math.inf
    s, t = job
    last = problem.n - 1
    total = sum(problem.again[: min(s, last)]) + sum(problem.again[t + 1 : last])
    for size, saved, i in items:
        if s <= i <= t:
            continue
        if size > room:
            return (total - saved * room / size) // 1
        room -= size
        total -= saved
    return total


@dataclass
class Bands:
    """The bounds of one problem, by class of (s,t).

    Attributes:
        problem: the stages and the budget.
        low: for each class its least s, where it is bound least.
        after: what stages above t pay, for the class's greatest t.
        outside: what stages below s and above t pay together, for each front.
    """

    problem: Problem
    low: dict[int, int] = field(default_factory=dict)
    after: dict[int, float] = field(default_factory=dict)
    outside: dict[Key, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem, n = self.problem, self.problem.n
        self._before = [self._table(s) for s in range(n + 1)]
        items, room = items_at_last(problem), room_at_last(problem)
        suffix = [_pay(problem, items, (0, t), room) for t in range(n)] + [0.0]
        for s in range(n, -1, -1):
            for t in range(s, n + 1):
                number = problem.classes[s][t]
                self.low[number] = s
                self.after[number] = min(suffix[t], self.after.get(number, math.inf))
                for j in range(problem.ends(t)):
                    value = self._together(items, room, (s, t), j) if t < n else 0.0
                    key = number * problem.width + j
                    self.outside[key] = min(value, self.outside.get(key, math.inf))

    def _table(self, s: int) -> tuple[list[int], list[float]]:
        """Tabulate what the stages below s pay, by the bytes held beside a job that starts at s.

        a_s is among these bytes: by itself, or inside abar_{s-1}, which then counts less.
        """
        problem, n, items = self.problem, self.problem.n, []
        if s < n:
            for i in range(s):
                items += hull(problem, i, problem.a[s] if i == s - 1 else 0)
        else:
            items += [item for i in range(n - 1) for item in hull(problem, i, 0)]
        sizes = [problem.a[s] if s else 0]
        ticks = [float(sum(problem.again[: min(s, n - 1)]))]
        for size, saved, _ in by_efficiency(items):
            sizes.append(sizes[-1] + size)
            ticks.append(ticks[-1] - saved)
        return sizes, ticks

    def _together(self, items: list[Item], room: int, job: tuple[int, int], j: int) -> float:
        problem, t = self.problem, job[1]
        paid = _pay(problem, items, job, room)
        if not j or t == problem.n - 1:
            return paid
        # abar_t, which the job finds, is held at the last backward, or t is run once more.
        tail = _tail(problem) if t == problem.n - 2 else 0
        held = _pay(problem, items, job, room - problem.options[t][j - 1].abar + tail)
        return min(paid + problem.again[t], held)

    def table(self, number: int) -> tuple[list[int], list[float]]:
        """Return what stages below a job pay, falling, and from how much room on."""
        return self._before[self.low[number]]

    def before(self, number: int, room: int) -> float:
        """Return what stages below a job pay, if it leaves `room` bytes; inf: a_s has no room."""
        sizes, ticks = self.table(number)
        k = bisect_right(sizes, room) - 1
        if k < 0:
            return math.inf
        if k + 1 == len(sizes):
            return ticks[k]
        share = (ticks[k] - ticks[k + 1]) * (room - sizes[k]) / (sizes[k + 1] - sizes[k])
        return (ticks[k] - share) // 1
