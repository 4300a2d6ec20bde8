"""Where the graph of a forward is cut into stages (torch.fx, PyTorch 2.13).

What a node is decides where it runs:

* a view of a tensor, and a parameter or buffer, is made anew by every stage that reads it;
* what depends on the model's inputs and no parameter (masks, positions) runs outside of stages,
  like an input; so do sizes and types of tensors that are there between stages;
* all else is work. Work is cut, in the graph's order, so that each stage hands on one tensor that
  it has made: as many stages with modules as there can be, then as few as can be that have none,
  then functions as far as can be before modules.

Work that changes a tensor in place is in the stage that made it. What only a block does inside is
not seen: a block that changes its own input in place must be in a list with the one before.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node
from torch.fx.proxy import TraceError

from xmem_torch.graphs import Traced
from xmem_torch.nodes import Kinds

_RANDOM = re.compile("rand|normal|bernoulli|dropout|multinomial|exponential|uniform|poisson")


@dataclass(frozen=True)
class Cut:
    """A graph cut into stages.

    Attributes:
        stages: the work of each, in order.
        times: the nodes that run outside of stages, each with how many stages run before it.
        kinds: what each node is.
    """

    stages: Sequence[Sequence[Node]]
    times: Mapping[Node, int]
    kinds: Kinds


def cut(traced: Traced, module: Any) -> Cut:
    """Cut a traced forward into stages.

    Raises:
        TraceError: there is no work, or it changes what no stage has made.
    """
    kinds = Kinds(traced, module)
    if not kinds.work:
        raise TraceError("a forward that calls nothing with parameters")
    whole: set[int] = set()  # places where there must be no cut
    kinds.keep_together(whole)
    while True:
        bounds = _best_bounds(kinds, whole)
        home = {n: i for i, (a, b) in enumerate(bounds) for n in kinds.work[a:b]}
        refused = _sizes_out_of_reach(kinds, home, bounds, whole)
        if not refused:
            break
        whole |= refused
    stages = [kinds.work[a:b] for a, b in bounds]
    return Cut(stages, _times(kinds, stages, home), kinds)


def _times(
    kinds: Kinds, stages: Sequence[Sequence[Node]], home: dict[Node, int]
) -> dict[Node, int]:
    """Return after how many stages each node runs that runs outside of them."""
    order = {n: i for i, n in enumerate(kinds.nodes)}
    lasts = [order[stage[-1]] for stage in stages]
    times: dict[Node, int] = {}
    for node in kinds.nodes:
        readers = {home.get(u) for u in kinds.readers(node)}
        if kinds.plain(node):
            made = [home[root] for root in kinds.roots(node, through_plain=True) if root in home]
            if not made or node in kinds.returned or readers - {max(made)}:
                times[node] = max(made) + 1 if made else 0
        elif node in kinds.apart:
            time = bisect.bisect(lasts, order[node])
            inside = time < len(stages) and order[stages[time][0]] < order[node]
            if inside and _RANDOM.search(str(node)):
                # Outside it would draw its numbers earlier than it should.
                if readers != {time}:
                    raise TraceError("a forward draws random numbers that several stages read")
            else:
                times[node] = time
    return times


def _sizes_out_of_reach(
    kinds: Kinds, home: dict[Node, int], bounds: Sequence[tuple[int, int]], whole: set[int]
) -> set[int]:
    """Return cuts that part a size from a tensor inside a stage, which is gone by then."""
    refused: set[int] = set()
    for node in filter(kinds.plain, kinds.nodes):
        roots = [r for r in kinds.roots(node) if r in home]
        for root in roots:
            end = bounds[home[root]][1]
            outside = [u for u in kinds.readers(node) if home.get(u) != home[root]]
            if outside and kinds.end_of(root) < end:
                until = max(kinds.place.get(u, len(kinds.work) - 1) for u in outside)
                refused.update(range(kinds.place[root] + 1, until + 1))
    return refused - whole


Cost = tuple[int, int, int, int]


def _best_bounds(kinds: Kinds, whole: set[int]) -> list[tuple[int, int]]:
    """Choose the cuts by dynamic programming over the place of the last one."""
    count = len(kinds.work)
    ends = [kinds.end_of(node) for node in kinds.work]
    sources = [kinds.sources_of(node) for node in kinds.work]
    heavy = [node.op == "call_module" for node in kinds.work]
    best: list[tuple[Cost, int] | None] = [((0, 0, 0, 0), -1), *[None] * count]
    for start in range(count):
        reached = best[start]
        if reached is None:
            continue
        alive: set[int] = set()
        new = set[int]()
        modules = after = enough = 0
        for stop in range(start + 1, count + 1):
            at = stop - 1
            origin = sources[at]
            if origin is None or all(o in new for o in origin):
                new.add(at)
            alive = {a for a in alive if ends[a] > at}
            if ends[at] > at:
                alive.add(at)
            modules += heavy[at]
            after = 0 if heavy[at] else after + (modules > 0)
            one = len(alive) == 1 and alive <= new
            if stop < count and (stop in whole or not one):
                continue
            many = stop == count and not one
            tail = 0 if stop == count else after
            step = (-(modules > 0), int(many), int(modules == 0), tail)
            total = tuple(a + b for a, b in zip(reached[0], step, strict=True))
            known = best[stop]
            if known is None or total < known[0]:
                best[stop] = total, start
            enough = enough or modules
            if enough and modules > enough and stop < count and best[count] is not None:
                break
    bounds: list[tuple[int, int]] = []
    stop = count
    while stop:
        found = best[stop]
        assert found is not None
        bounds.append((found[1], stop))
        stop = found[1]
    return bounds[::-1]
