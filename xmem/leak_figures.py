"""The figures that a watch for leaks reads at a step: cheap ones, and one that it reads rarely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmem import leak_marks
from xmem.slopes import WINDOWS, Series, Trend

if TYPE_CHECKING:
    from xmem.pooling import Pool

BYTES = "allocated_bytes"
GRAPH = "graph_operations"
_BURST = 3
_FIRST_GAP = 32
_LARGEST_GAP = 1024
"""A graph without tensors shows in no other figure. Where the framework does not count operations,
graphs are looked at in a burst of 3 samples, again after 32, 96, 224, ..., and longer if they grow.
"""


class Figures:
    """Figures over steps, each with its trend."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._series: dict[str, Series] = {}
        self._samples = 0
        self._burst = 0
        self._gap = _FIRST_GAP

    def sample(self, step: int) -> None:
        """Read all."""
        if self._looks_at_graphs():
            self._series.setdefault(GRAPH, Series()).add(step, self.read(GRAPH))
        self._samples += 1
        for name, value in self._read().items():
            self._series.setdefault(name, Series()).add(step, value)

    def _read(self) -> dict[str, int]:
        counts = self._pool.live_counts()
        stats = self._pool.stats()
        found = {BYTES: stats.allocated_bytes, **counts}
        if "live_vars" not in counts and None not in (stats.allocation_count, stats.free_count):
            found["allocations"] = (stats.allocation_count or 0) - (stats.free_count or 0)
        return found

    def read(self, name: str) -> int:
        """Return one figure as it is now."""
        return leak_marks.largest_graph(self._pool) if name == GRAPH else self._read()[name]

    def _looks_at_graphs(self) -> bool:
        if "live_ops" in self._series:
            return False
        since = self._samples - self._burst
        if since >= self._gap:
            self._burst = self._samples
            self._gap = min(2 * self._gap, _LARGEST_GAP)
            since = 0
        if since == 0:
            self._series.pop(GRAPH, None)
            return "live_ops" not in self._pool.live_counts()
        series = self._series.get(GRAPH)
        return series is not None and (since < _BURST or series.climbs(min(since, WINDOWS)))

    def is_rising(self) -> bool:
        """Say whether any is suspicious."""
        return any(series.rising() for series in self._series.values())

    def trends(self) -> dict[str, Trend]:
        """Return the growth that goes on, by figure."""
        return {n: t for n, s in self._series.items() if (t := s.trend()) is not None}
