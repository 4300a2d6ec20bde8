"""The recursion that is solved: jobs, and the branches in which each can be done.

A job R(s,t,j) is "a_s is held by the caller: bring the gradient from a_{t+1} down to a_s". With
j = 0 stages s..t are all to be run (t = n: the loss as well). With j = k+1 abar_{t,k} is there
already, but a_t is not, so stages s..t-1 are run to make it again. Every byte of a job counts as
its own, except a_s: also the abar_{t,k} that it finds. docs/planner.md has the argument.

Times are whole ticks of a power of two seconds, rounded down, and kept in doubles that hold whole
numbers: every sum is exact, so equal plans have equal times, in whatever order they are added up,
here and in C++. A tick is at most 2**-40 of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from xmem.planner.chain import Chain, Stage

Key = int
"""A front: the class of (s,t) times `Problem.width`, and j."""


class Choice(NamedTuple):
    """An option in bytes and ticks; `excess` is f + b, less those of the stage's fastest option."""

    abar: int
    tf: int
    tb: int
    f: float
    excess: float


Branch = tuple[int, int, float, Key, Key | None, str, int, int]
"""One way to do a job of several stages: (need, held, x, first, second, kind, q, k).

A plain tuple, since a NamedTuple takes a third of the solver's time to make.

| part | what it is |
|---|---|
| need | the bytes without which it cannot be done |
| held | those that are held beside `first` |
| x | its own excess, in ticks |
| first | the front of the job that comes first: R(q,t,j) for a split, else R(q+1,t,j) |
| second | the front of the job that follows: R(s,q-1,0) for a split, R(s,q,k+1) for a keep |
| kind | G: keep stage q = s as option k |
| | split: run s..q-1 forward, keep a_q |
| | keep: run s..q-1 forward, keep stage q as option k, and drop a_q: the job that follows makes
it again, just before B(q) |
"""


@dataclass(frozen=True)
class Problem:
    """A chain and a budget, as the solver sees them.

    Attributes:
        n: the number of stages.
        a: bytes of the values a_0 .. a_n.
        tng: temporary bytes of forwards that keep nothing.
        fng: their ticks.
        options: by stage.
        base: ticks of a step in which every stage runs once, by its fastest option.
        cap: bytes of the budget, without a_0.
        tick: seconds of a tick.
        keeps: whether the branch "keep" exists; without it the optimum is rotor's.
        pins: bytes held beside the chain (pinned skips): while stage i is run for the loss, i = 0
            .. n, and then while delta_j is alive, j = 0 .. n. Empty: none.
    """

    n: int
    a: tuple[int, ...]
    tng: tuple[int, ...]
    fng: tuple[float, ...]
    options: tuple[tuple[Choice, ...], ...]
    base: float
    cap: int
    tick: float
    keeps: bool = True
    pins: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @cached_property
    def before_loss(self) -> tuple[int, ...]:
        """Bytes of pins while stage i is run for the loss."""
        return self.pins[0] or (0,) * (self.n + 1)

    @cached_property
    def after_loss(self) -> tuple[int, ...]:
        """Bytes of pins while delta_j is alive."""
        return self.pins[1] or (0,) * (self.n + 1)

    @cached_property
    def pre(self) -> tuple[float, ...]:
        """Ticks of running stages 0 .. i-1 forward."""
        return (0.0, *accumulate(self.fng))

    @cached_property
    def width(self) -> int:
        """How many j there are at most."""
        return 1 + max(map(len, self.options))

    @cached_property
    def again(self) -> tuple[float, ...]:
        """The least ticks that it costs to run a stage forward once more (w)."""
        pairs = zip(self.fng, self.options, strict=True)
        return tuple(min(fng, *(o.f for o in options)) for fng, options in pairs)

    @cached_property
    def classes(self) -> list[list[int]]:
        """A number for each (s,t): equal ones have equal stages s..t and equal bytes of a_s.

        Their fronts are the same but for what is outside the job. a_s is outside, but the bounds
        (bands.py) need it.
        """
        types: dict[object, int] = {}
        kinds = [
            types.setdefault(
                (
                    *(self.a[i + 1], self.tng[i], self.fng[i], self.options[i]),
                    *(self.before_loss[i], self.after_loss[i + 1]),
                ),
                i,
            )
            for i in range(self.n)
        ]
        kinds.append(self.n)
        numbers: dict[tuple[object, int], int] = {}
        rows = [[0] * (self.n + 1) for _ in range(self.n + 1)]
        for s, row in enumerate(rows):
            before: object = (self.a[s],)
            for t in range(s, self.n + 1):
                before = row[t] = numbers.setdefault((before, kinds[t]), len(numbers))
        return rows

    def key(self, s: int, t: int, j: int) -> Key:
        """Return the front of R(s,t,j)."""
        return self.classes[s][t] * self.width + j

    def ends(self, t: int) -> int:
        """Return how many j there are for an end t."""
        return 1 + (len(self.options[t]) if self.keeps and t < self.n else 0)

    def jobs(self) -> Iterator[tuple[int, int, int, Key]]:
        """Yield one job (s, t, j) for each front, with its key, those it needs before it."""
        seen = set()
        for s in range(self.n, -1, -1):
            for t in range(s, self.n + 1):
                number = self.classes[s][t]
                if number not in seen:
                    seen.add(number)
                    for j in range(self.ends(t)):
                        yield s, t, j, number * self.width + j

    def leaf(self, s: int, j: int) -> list[tuple[int, float, int]]:
        """Return the bytes, the excess and the option of each way to do R(s,s,j)."""
        if s == self.n:
            return [(self.a[s] + self.after_loss[s], 0.0, 0)]
        delta, options = self.a[s + 1] + self.after_loss[s + 1], self.options[s]
        if j:
            o = options[j - 1]
            return [(o.abar + delta + o.tb, o.excess, 0)]
        # The backward finds the gradient delta_{s+1}, and a gradient has the bytes of its value.
        return [(o.abar + delta + max(o.tf, o.tb), o.excess, k) for k, o in enumerate(options)]

    def branches(self, s: int, t: int, j: int, most: float = math.inf) -> Iterator[Branch]:
        """Yield the ways to do R(s,t,j), s < t, those only that cost no more than `most` ticks."""
        a, n, cap, classes, width = self.a, self.n, self.cap, self.classes, self.width
        # What the job finds: the kept abar_t, and the gradient.
        found = (self.options[t][j - 1].abar if j else 0) + (a[t + 1] if t < n else 0)
        pins = (self.after_loss[t + 1],) * n if t < n else self.before_loss
        below, start = classes[s], self.pre[s]
        delta = a[s + 1] + self.after_loss[s + 1]
        for k, o in enumerate(self.options[s]):
            need = max(found + pins[s] + o.abar + o.tf, delta + o.abar + o.tb)
            yield need, o.abar, o.excess, classes[s + 1][t] * width + j, None, "G", s, k
        need = found + pins[s] + a[s + 1] + self.tng[s]
        for q in range(s + 1, t + 1):
            x = self.pre[q] - start
            if need > cap or x > most:
                return
            yield need, a[q], x, classes[q][t] * width + j, below[q - 1] * width, "split", q, 0
            if q < n:
                if q < t and self.keeps:
                    first, second = classes[q + 1][t] * width + j, below[q] * width + 1
                    for k, o in enumerate(self.options[q]):
                        higher = max(need, found + pins[q] + a[q] + o.abar + o.tf)
                        yield higher, o.abar, x, first, second + k, "keep", q, k
                need = max(need, found + pins[q] + a[q] + a[q + 1] + self.tng[q])

    def least_bytes(self) -> int:
        """Return the least bytes, without a_0, of any schedule of the family."""
        free = replace(self, cap=2**62)
        least: dict[Key, int] = {}
        for s, t, j, key in free.jobs():
            if s == t:
                least[key] = min(size for size, _, _ in free.leaf(s, j))
                continue
            least[key] = min(
                max(need, least[first] + held, 0 if second is None else least[second])
                for need, held, _, first, second, *_ in free.branches(s, t, j)
            )
        return least[free.key(0, free.n, 0)]


def make_problem(
    chain: Chain,
    budget_bytes: int,
    *,
    keeps: bool = True,
    pins: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> Problem:
    """Return the problem of a chain and a budget; skips count only as pins, if at all."""
    tick = _tick(chain)
    fng = tuple(ticks(s.forward_seconds, tick) for s in chain.stages)
    options, base = [], 0.0
    for stage in chain.stages:
        choices, fastest = _choices(stage, tick)
        options.append(choices)
        base += fastest
    return Problem(
        n=len(chain.stages),
        a=chain.value_bytes,
        tng=tuple(s.temporary_bytes for s in chain.stages),
        fng=fng,
        options=tuple(options),
        base=base,
        cap=min(budget_bytes, enough_bytes(chain) + max(map(sum, pins))) - chain.value_bytes[0],
        tick=tick,
        keeps=keeps,
        pins=pins,
    )


def enough_bytes(chain: Chain) -> int:
    """Return a budget that no schedule can exceed: everything is held, at the worst instant."""
    return (
        sum(chain.value_bytes)
        + sum(s.size_bytes for s in chain.skips)
        + sum(
            s.temporary_bytes
            + max(o.kept_bytes + o.forward_extra_bytes + o.backward_extra_bytes for o in s.options)
            for s in chain.stages
        )
    )


def _choices(stage: Stage, tick: float) -> tuple[tuple[Choice, ...], float]:
    rows = [
        (o, ticks(o.forward_seconds, tick), ticks(o.backward_seconds, tick)) for o in stage.options
    ]
    base = min(f + b for _, f, b in rows)
    return tuple(
        Choice(o.kept_bytes, o.forward_extra_bytes, o.backward_extra_bytes, f, f + b - base)
        for o, f, b in rows
    ), base


def _tick(chain: Chain) -> float:
    """Return a tick such that no schedule lasts 2**53 ticks: stage i runs at most i+1 times."""
    longest = math.fsum(
        max(s.forward_seconds, *(o.forward_seconds + o.backward_seconds for o in s.options))
        for s in chain.stages
    )
    times = len(chain.stages) + 2
    return math.ldexp(1.0, max(math.frexp(longest * times)[1] - 52, -1000))


def ticks(seconds: float, tick: float) -> float:
    """Return seconds in whole ticks, rounded down."""
    return float(math.floor(seconds / tick))
