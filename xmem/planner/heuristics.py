"""Layouts by rule of thumb, to hold plans against.

All keep a stage as its option 0 (everything), cut the chain into segments and hold the inputs of
these; a segment is run again just before its backward, all but the last, whose backward follows
its forward at once.

"sqrt": Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training Deep Nets with Sublinear
Memory Cost", 2016.
"interval": T = sqrt(2 M / C), after the rule for checkpoints of long computations: John W. Young,
"A First Order Approximation to the Optimum Checkpoint Interval", Communications of the ACM, 1974.
At the first layer of a segment M is the bytes that it hands on and C its seconds, both divided by
their means over the chain; T, rounded, is the number of layers in the segment. Where all layers are
alike T is 1.4, so every layer is a segment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from xmem.errors import InfeasibleBudgetError, UsageError, unknown
from xmem.planner.chain import Chain
from xmem.planner.schedule import Op
from xmem.planner.simulation import simulate
from xmem.planner.skips import live

HEURISTICS = ("none", "every", "sqrt", "uniform", "interval")


def heuristic(chain: Chain, name: str, *, budget_bytes: int | None = None) -> tuple[Op, ...]:
    """Return a layout by rule of thumb, as a schedule.

    Args:
        chain: the stages.
        name: "none" (store all), "every" (each stage is a segment), "sqrt" (about sqrt(n) segments
            of like length), "uniform" (as many segments of like length as is fastest within the
            budget) or "interval" (see the module).
        budget_bytes: for "uniform"; None: no limit.

    Raises:
        InfeasibleBudgetError: no uniform layout fits the budget.
        UsageError: there is no such rule.
    """
    n = len(chain.stages)
    if name == "uniform":
        return _best_uniform(chain, budget_bytes)
    if name == "interval":
        return segmented(chain, _interval_starts(chain))
    segments = {"none": 1, "every": n, "sqrt": max(round(math.sqrt(n)), 1)}.get(name)
    if segments is None:
        raise UsageError(unknown("heuristic", name, HEURISTICS))
    return segmented(chain, uniform_starts(n, segments))


def uniform_starts(n: int, segments: int) -> list[int]:
    """Return the first stages of segments of like length, longer ones first."""
    return [-(-n * i // segments) for i in range(segments)]


def segmented(chain: Chain, starts: Sequence[int]) -> tuple[Op, ...]:
    """Return the schedule of a chain that is cut into segments.

    What a skip brings from one segment into another is held from the first forward on.

    Args:
        chain: the stages.
        starts: the first stage of each segment, ascending, from 0.
    """
    n = len(chain.stages)
    ops: list[Op] = []
    for start, end in itertools.pairwise(starts):
        ops.append(Op("N", start))
        for i in range(start + 1, end):
            ops += [Op("N", i), Op("Da", i)]
    for start, end in reversed(list(itertools.pairwise([*starts, n]))):
        ops += [Op("G", i) for i in range(start, end)]
        ops += [Op("L")] if end == n else []
        ops += [Op("B", i) for i in reversed(range(start, end))]
        ops += [Op("Da", start)] if start else []
    return tuple(live(chain, ops)) if chain.skips else tuple(ops)


def _best_uniform(chain: Chain, budget_bytes: int | None) -> tuple[Op, ...]:
    n = len(chain.stages)
    layouts = [segmented(chain, uniform_starts(n, k)) for k in range(1, n + 1)]
    played = [(*simulate(chain, ops), k) for k, ops in enumerate(layouts)]
    fitting = [p for p in played if budget_bytes is None or p[1] <= budget_bytes]
    if fitting:
        return layouts[min(fitting)[2]]
    least = min(peak for _, peak, _ in played)
    raise InfeasibleBudgetError(
        f"no uniform layout of {chain.name!r} fits {budget_bytes} bytes: the least is {least}."
        " `solve` may have a plan for less.",
        budget_bytes=budget_bytes or 0,
        minimum_bytes=least,
    )


def _interval_starts(chain: Chain) -> list[int]:
    sizes = chain.value_bytes[1:]
    times = [stage.options[0].forward_seconds for stage in chain.stages]
    n = len(times)
    mean_size, mean_time = sum(sizes) / n, math.fsum(times) / n
    starts, at = [], 0
    while at < n:
        starts.append(at)
        size = sizes[at] / mean_size if mean_size else 1.0
        time = times[at] / mean_time if mean_time else 1.0
        layers = math.sqrt(2 * size / time) if time else float(n)
        at += max(round(min(layers, n)), 1)
    return starts
