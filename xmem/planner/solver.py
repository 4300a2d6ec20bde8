"""The search: the fastest schedule of a chain that fits a budget, with a proof of how good it is.

Only schedules of an excess up to E are looked for, which keeps fronts short. E grows from the bound
of every schedule until, on coarse fronts, one is found. Its own excess is then an E that loses
nothing, and a last round with it is the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from xmem.errors import InfeasibleBudgetError, InvalidScheduleError, UsageError
from xmem.planner.bridged import Opener, Solver, least_bridged_bytes, plan_bridged
from xmem.planner.chain import Chain
from xmem.planner.fronts import Engine
from xmem.planner.kernel import open_engine
from xmem.planner.limits import heaviest_stage, knapsack_excess
from xmem.planner.plan import Plan
from xmem.planner.problem import Problem, make_problem
from xmem.planner.schedule import Op
from xmem.planner.skips import gradient_bytes

DEFAULT_GAP = 1e-4
"""Of a step. Options that differ by microseconds give millions of points that differ by less."""

_FIRST = 0.002
"""The first E, above the bound, as a share of a step; it grows by `_GROWTH` each round."""
_GROWTH = 1.5
_FURTHEST = 2.0**20
_COARSE = 0.02, 4.0
"""How far fronts are thinned while E grows, as a share of E's distance from the bound: the first,
or the second divided by the number of stages, since what is lost adds up along a chain."""
WHOLE = 512
"""In the proof, fronts of up to so many points stay whole: most are, and then the gap is 0."""


@dataclass(frozen=True)
class Found:
    """What the search came to.

    Attributes:
        ops: the schedule.
        excess: its excess in ticks, or a little more.
        loss: no schedule of the family has an excess lower by more than these ticks.
    """

    ops: list[Op]
    excess: float
    loss: float


def solve(
    chain: Chain,
    budget_bytes: int,
    *,
    gap: float = DEFAULT_GAP,
    kernel: str | None = "auto",
    keeps: bool = True,
) -> Plan:
    """Return the fastest schedule that fits a budget.

    Of a chain with skips it is the fastest of all schedules, up to 10 stages (unless the search
    is given up); beyond, the plan's `gap` is its distance from the bound of every schedule.

    Args:
        chain: what is to be planned.
        budget_bytes: the most that may be held at any time, the batch included, parameters, their
            gradients and optimizer state not.
        gap: by what share of a step the plan may be slower than the best of its family; 0: not
            at all, which can take long where stages have several options. The plan's own `gap`
            says what was reached.
        kernel: "auto", "native" (C++) or None (plain Python); the plan is the same.
        keeps: whether a stage may be kept without its input, which is made again just before its
            backward. Without this freedom the plan is the optimum of rotor (see docs/planner.md).
            Chains with skips are planned with every freedom.

    Raises:
        InfeasibleBudgetError: nothing fits; it has the least budget that does.
        UsageError: the budget or the gap makes no sense.
    """
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool):
        raise UsageError(f"budget_bytes={budget_bytes!r}: a budget is a whole number of bytes")
    if not 0 <= gap < math.inf:
        raise UsageError(f"gap={gap!r} is no share of a step; give 0 or more, e.g. 1e-4")
    if chain.skips:
        return _solve_bridged(chain, budget_bytes, gap, kernel)
    problem = make_problem(chain, budget_bytes, keeps=keeps)
    engine = open_engine(problem, kernel)
    found = _search(engine, problem, gap)
    if found is None:
        least = engine.least_bytes() + problem.a[0]
        raise _infeasible(chain, budget_bytes, least)
    bound = (problem.base + knapsack_excess(problem)) * problem.tick
    best = (problem.base + found.excess - found.loss) * problem.tick
    plan = _plan(chain, budget_bytes, found.ops, bound)
    if found.loss:
        behind = max(plan.seconds - max(best, bound), 0.0) / plan.store_all_seconds
        plan = replace(plan, gap=min(behind, gap))
    _certify(plan, chain)
    return plan


def _solve_bridged(chain: Chain, budget_bytes: int, gap: float, kernel: str | None) -> Plan:
    found = plan_bridged(chain, budget_bytes, *_tools(gap, kernel))
    if found is None:
        least = max(least_budget_bytes(chain, kernel=kernel), budget_bytes + 1)
        raise _infeasible(chain, budget_bytes, least)
    problem = make_problem(chain, budget_bytes)
    knapsack = (problem.base + knapsack_excess(problem)) * problem.tick
    plan = _plan(chain, budget_bytes, found.ops, max(found.least_seconds, knapsack))
    # In ticks seconds are a little less: a plan that is proven is not behind by that.
    behind = plan.seconds - plan.bound_seconds if not found.proven else 0.0
    whole = plan.store_all_seconds
    plan = replace(plan, gap=behind / whole if whole else 0.0)
    _certify(plan, chain)
    return plan


def _tools(gap: float, kernel: str | None) -> tuple[Opener, Solver]:
    """Return what opens and solves the problems of `bridged`."""

    def solver(engine: Engine, problem: Problem) -> list[Op] | None:
        found = _search(engine, problem, gap)
        return found.ops if found else None

    return lambda problem: open_engine(problem, kernel), solver


def least_budget_bytes(chain: Chain, *, kernel: str | None = "auto", keeps: bool = True) -> int:
    """Return the least budget that has a plan, the batch included; `keeps` as in `solve`.

    Of a chain with skips it is exact up to 10 stages. Beyond, `solve` may have plans for less.
    """
    if chain.skips:
        return least_bridged_bytes(chain, *_tools(DEFAULT_GAP, kernel))
    problem = make_problem(chain, chain.value_bytes[0], keeps=keeps)
    return open_engine(problem, kernel).least_bytes() + chain.value_bytes[0]


def store_all_peak_bytes(chain: Chain) -> int:
    """Return the peak of a step that keeps everything, by each stage's first option."""
    stages = range(len(chain.stages))
    kept = [Op("G", i) for i in stages]
    return _tally(chain, [*kept, Op("L"), *(Op("B", i) for i in reversed(stages))])[1]


def _search(engine: Engine, problem: Problem, gap: float) -> Found | None:
    lowest = engine.least_excess()
    if math.isinf(lowest):
        return None
    jobs = 2 * problem.n + 1
    thinning = math.floor(gap * problem.base / jobs)
    above = max(math.ceil(_FIRST * problem.base), 1)
    rounds = 0
    while True:
        coarse = max(thinning, math.floor(min(_COARSE[0], _COARSE[1] / problem.n) * above))
        # Bounds are rounded, so they may be too high by a tick or two.
        excess, thinned = engine.solve(lowest + above + 2, thinning=coarse, whole=0)
        rounds += 1
        if excess < math.inf:
            break
        if rounds == engine.patience and engine.least_bytes() > problem.cap:
            return None
        if above > _FURTHEST * max(problem.base, 1):
            raise InvalidScheduleError(
                "a bug in the planner, or a chain whose backwards need fewer bytes than the"
                " gradients that they make (see docs/planner.md): no plan is found below 2**20"
                " times the time of a step, though the least budget is met"
            )
        above = math.ceil(above * _GROWTH)
    ops = engine.ops()
    if excess == 0 or not thinned:
        return Found(ops, excess, 0.0)
    lower, thinned = engine.solve(excess + 2, thinning=thinning, whole=WHOLE)
    if lower < excess:
        ops, excess = engine.ops(), lower
    return Found(ops, excess, jobs * thinning if thinned else 0.0)


def _plan(chain: Chain, budget_bytes: int, ops: Iterable[Op], bound: float) -> Plan:
    ops = tuple(ops)
    seconds, peak, kept = _tally(chain, ops)
    return Plan(
        chain_name=chain.name,
        budget_bytes=budget_bytes,
        ops=ops,
        seconds=seconds,
        peak_bytes=peak,
        store_all_seconds=chain.store_all_seconds,
        bound_seconds=min(bound, seconds),
        gap=0.0,
        options=tuple(s.options[k].name for s, k in zip(chain.stages, kept, strict=True)),
        option_names=tuple(tuple(o.name for o in s.options) for s in chain.stages),
        stage_names=tuple(s.name for s in chain.stages),
        store_all_peak_bytes=store_all_peak_bytes(chain),
    )


def _certify(plan: Plan, chain: Chain) -> None:
    try:
        plan.check(chain)
    except InvalidScheduleError as error:
        raise InvalidScheduleError(
            f"a bug in the planner, please report it with the chain: {error}"
        ) from error


def _tally(chain: Chain, ops: Iterable[Op]) -> tuple[float, int, list[int]]:
    """Return a schedule's seconds and peak, and the option of each stage at its backward."""
    a, stages = chain.value_bytes, chain.stages
    held = peak = a[0]
    kept = [0] * len(stages)
    skipped = gradient_bytes(chain)
    seconds = []
    for op in ops:
        i = op.index
        if op.code == "N":
            above, after = a[i + 1] + stages[i].temporary_bytes, a[i + 1]
            seconds.append(stages[i].forward_seconds)
        elif op.code == "G":
            option = stages[i].options[op.option]
            kept[i] = op.option
            above, after = option.kept_bytes + option.forward_extra_bytes, option.kept_bytes
            seconds.append(option.forward_seconds)
        elif op.code == "B":
            option = stages[i].options[kept[i]]
            above = option.backward_extra_bytes
            after = a[i] + skipped[i] - a[i + 1] - skipped[i + 1] - option.kept_bytes
            seconds.append(option.backward_seconds)
        elif op.code == "L":
            above = after = a[-1]
        else:
            after = -(a[i] if op.code == "Da" else stages[i].options[kept[i]].kept_bytes)
            above = after
        peak = max(peak, held + above)
        held += after
    return math.fsum(seconds), peak, kept


def _infeasible(chain: Chain, budget_bytes: int, minimum: int) -> InfeasibleBudgetError:
    i = heaviest_stage(chain)
    advice = [f"give {minimum} bytes", "make the batch smaller"]
    if max(len(s.options) for s in chain.stages) == 1:
        advice.append("let stages be packed or offloaded (compress=, offload= of xmem.profile)")
    advice.append(f"split stage {i} ({chain.stages[i].name!r}), which needs most by itself")
    return InfeasibleBudgetError(
        f"no plan of {chain.name!r} fits {budget_bytes} bytes: the least is {minimum}, however much"
        f" is recomputed. What helps: {'; '.join(advice)}.",
        budget_bytes=budget_bytes,
        minimum_bytes=minimum,
    )
