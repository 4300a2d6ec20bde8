"""Tell growth that goes on from noise, from caches that fill up and from spikes.

Figures of a training loop are exact (bytes that an allocator counted, numbers of live tensors), so
a leak shows as a straight line, and the test can be strict. A series is looked at in windows of 1,
2, 4, ... samples, each by its minimum: what a step borrows and gives back is no growth, and a
sawtooth that garbage collection cuts down is flat. In the finest windows the line has to be exact;
in wide ones, where batch sizes vary and not every step leaks, nearly all windows have to lie near
it. The slope is the median of all pairwise slopes (P. K. Sen, "Estimates of the regression
coefficient based on Kendall's tau", Journal of the American Statistical Association 63, 1968), so
single outliers do not bend it.

A cache that grows by the same amount in each step and is not full yet looks like a leak, to
anybody; who knows its bound can say so (`xmem.leak_owners` looks for one).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

WINDOWS = 14
"""How many windows a line is judged by; 14 samples of one step each end well before step 20."""
_OUTLIERS = 2
_EXACT = 0.02
"""How far from an exact line a window may lie, as a share of the growth in one window."""
_NEAR = 0.5
"""The same for windows of many samples, where noise and irregular steps are averaged."""
_WIDE = 8
"""From this many samples a window counts as wide. Narrower ones have to be exact."""
_STEADY = 0.8
"""The later half grows at least by this share of the earlier: what saturates slows down."""
_RISING = 5
"""So many samples that rise by one amount are suspicious."""

Point = tuple[int, float]


@dataclass(frozen=True)
class Trend:
    """Growth that goes on.

    Attributes:
        per_step: by how much a step makes the figure larger.
        since_step: where the line begins, as far as samples are kept.
        window: how many samples the windows have in which it was seen.
    """

    per_step: float
    since_step: int
    window: int


def judge(points: Sequence[Point], window: int) -> Trend | None:
    """Return the line that points lie on, if that is growth that goes on.

    Args:
        points: of consecutive windows, (step, minimum of the window); steps increase.
        window: how many samples are in a window.
    """
    if len(points) < WINDOWS:
        return None
    slope = _slope(points)
    if slope <= 0:
        return None
    half = len(points) // 2
    if _slope(points[half:]) < _STEADY * _slope(points[:half]):
        return None
    start = median(value - slope * step for step, value in points)
    tolerance = _EXACT if window < _WIDE else _NEAR
    allowed = tolerance * slope * median(b[0] - a[0] for a, b in pairwise(points))
    fits = [abs(value - start - slope * step) <= allowed for step, value in points]
    if sum(fits) < len(points) - _OUTLIERS or not all(fits[-3:]):
        return None
    return Trend(slope, points[fits.index(True)][0], window)


def _slope(points: Sequence[Point]) -> float:
    return median((d - b) / (c - a) for (a, b), (c, d) in combinations(points, 2))


class Series:
    """A figure over steps; keeps 14 windows of each width and nothing else."""

    def __init__(self) -> None:
        self._levels: list[deque[Point]] = []
        self._halves: list[Point | None] = []
        self._trends: dict[int, Trend] = {}

    def add(self, step: int, value: float) -> None:
        """Note a sample; steps increase."""
        point: Point | None = (step, value)
        level = 0
        while point is not None:
            if level == len(self._levels):
                self._levels.append(deque(maxlen=WINDOWS))
                self._halves.append(None)
            self._levels[level].append(point)
            self._judge(level)
            half, self._halves[level] = self._halves[level], point
            if half is None:
                return
            self._halves[level] = None
            point = (half[0], min(half[1], point[1]))
            level += 1

    def _judge(self, level: int) -> None:
        found = judge(list(self._levels[level]), 1 << level)
        if found is None:
            self._trends.pop(level, None)
        else:
            before = self._trends.get(level)
            since = found.since_step if before is None else before.since_step
            self._trends[level] = Trend(found.per_step, since, found.window)

    def trend(self) -> Trend | None:
        """Return the growth that goes on now, as the narrowest windows that show it have it."""
        return self._trends[min(self._trends)] if self._trends else None

    def rising(self) -> bool:
        """Say whether the last samples rise by one amount: reason to look closer, not more."""
        if self._trends:
            return True
        if not self._levels or len(self._levels[0]) < _RISING:
            return False
        last = list(self._levels[0])[-_RISING:]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(last)]
        return min(slopes) > 0 and max(slopes) - min(slopes) <= _EXACT * max(slopes)

    def climbs(self, samples: int) -> bool:
        """Say whether each of the latest samples is above the one before it."""
        last = list(self._levels[0])[-samples:] if self._levels else []
        return all(b[1] > a[1] for a, b in pairwise(last))
