"""What no schedule can beat, of whatever family: bytes, and seconds at a budget."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from xmem.planner.bands import Item, items_at_last, least_excess, room_at_last
from xmem.planner.chain import Chain
from xmem.planner.problem import Problem, make_problem
from xmem.planner.skips import gradient_bytes, read_values

_MOST_POINTS = 4096


@dataclass(frozen=True)
class Bounds:
    """The limits of a chain.

    Attributes:
        least_peak_bytes: every schedule holds as much at some time, the batch included.
        least_seconds: every schedule that fits the budget takes as long; None: none can fit it.
    """

    least_peak_bytes: int
    least_seconds: float | None


def bounds(chain: Chain, budget_bytes: int) -> Bounds:
    """Return what no schedule of a chain can beat.

    Bytes: the heaviest stage, by its lightest option. Seconds: at the last backward only some
    stages can be held, and all others will be run forward once more: a knapsack.

    Args:
        chain: the stages.
        budget_bytes: what a schedule may hold, the batch included.
    """
    problem = make_problem(chain, budget_bytes)
    excess = knapsack_excess(problem)
    least = least_peak_bytes(chain)
    if math.isinf(excess) or budget_bytes < least:
        return Bounds(least, None)
    return Bounds(least, (problem.base + excess) * problem.tick)


def least_peak_bytes(chain: Chain) -> int:
    """Return the bytes of the heaviest stage: its forward or its backward, by its best option."""
    a = chain.value_bytes
    return a[0] + max(_stage_peaks(chain))


def heaviest_stage(chain: Chain) -> int:
    """Return the number of the stage that sets `least_peak_bytes`."""
    peaks = _stage_peaks(chain)
    return peaks.index(max(peaks))


def _stage_peaks(chain: Chain) -> list[int]:
    a, peaks = chain.value_bytes, []
    reads, skipped = read_values(chain), gradient_bytes(chain)
    for i, stage in enumerate(chain.stages):
        kept = min(o.kept_bytes + o.forward_extra_bytes for o in stage.options)
        forward = min(a[i + 1] + stage.temporary_bytes, kept)
        backward = min(o.kept_bytes + o.backward_extra_bytes for o in stage.options) + a[i + 1]
        peaks.append(sum(a[j] for j in reads[i]) + max(forward, backward + skipped[i + 1]))
    return peaks


def knapsack_excess(problem: Problem) -> float:
    """Return the bound on the excess of every schedule, with whole stages held or not.

    A front over bytes and ticks saved, cut by the relaxed bound; that bound itself if the front
    grows beyond a few thousand points.
    """
    relaxed, room = least_excess(problem), room_at_last(problem)
    if math.isinf(relaxed):
        return math.inf
    items = items_at_last(problem)
    tail = problem.a[problem.n - 1]
    order = list(dict.fromkeys(i for _, _, i in items))
    incumbent = _greedy(items, room)
    points: list[tuple[int, float]] = [(0, 0.0)]
    for done, i in enumerate(order, 1):
        less = tail if i == problem.n - 2 else 0
        ways = [
            (max(o.abar - less, 0), problem.again[i] - o.excess)
            for o in problem.options[i]
            if problem.again[i] > o.excess
        ]
        grown = [(m + size, v + saved) for m, v in points for size, saved in ways]
        grown = sorted(points + [z for z in grown if z[0] <= room], key=lambda z: (z[0], -z[1]))
        incumbent = max([incumbent, *(v for _, v in grown)])
        points = _useful(grown, _Rest(items, set(order[done:])), room, incumbent)
        if len(points) > _MOST_POINTS:
            return relaxed
    return max(relaxed, sum(problem.again[: problem.n - 1]) - incumbent)


def _greedy(items: list[Item], room: int) -> float:
    """Return the ticks that holding the most efficient steps saves, each as it fits."""
    total, stopped = 0.0, set()
    for size, saved, i in items:
        if size <= room and i not in stopped:
            room -= size
            total += saved
        else:
            stopped.add(i)
    return total


class _Rest:
    """The relaxed bound on what some stages can still save."""

    def __init__(self, items: list[Item], stages: set[int]) -> None:
        self._items = [item for item in items if item[2] in stages]
        self._sizes, self._saved = [0], [0.0]
        for size, saved, _ in self._items:
            self._sizes.append(self._sizes[-1] + size)
            self._saved.append(self._saved[-1] + saved)

    def most(self, room: int) -> float:
        k = bisect_right(self._sizes, room) - 1
        if k == len(self._items):
            return self._saved[k]
        size, saved, _ = self._items[k]
        return self._saved[k] + saved * (room - self._sizes[k]) / size


def _useful(
    points: list[tuple[int, float]], rest: _Rest, room: int, incumbent: float
) -> list[tuple[int, float]]:
    kept, best = [], -1.0
    for size, saved in points:
        if saved > best:
            best = saved
            if saved + rest.most(room - size) > incumbent:
                kept.append((size, saved))
    return kept
