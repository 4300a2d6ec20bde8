"""The solver against what is known: the oracle, exhaustive searches, real chains, itself."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_chains import (
    best_of_all,
    budget_at,
    chains,
    draw_chain,
    family,
    load,
    oracle,
    store_all_peak,
)

from xmem.errors import InfeasibleBudgetError, NativeBuildError, UsageError, XmemWarning
from xmem.native.build import find_compiler
from xmem.planner import (
    bounds,
    frontier,
    kernel,
    least_budget_bytes,
    simulate,
    solve,
)

NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(find_compiler() is None, reason="there is no compiler here")
)
KERNELS = [None, NATIVE]
SLOW = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def planned(chain, budget, **options):
    """Return the plan, or None where the budget is infeasible."""
    try:
        return solve(chain, budget, **options)
    except InfeasibleBudgetError as error:
        if error.budget_bytes != budget or error.minimum_bytes <= budget:
            raise
        return None


def faults_against_the_oracle(plan_of):
    """Return what a solver does wrong on the oracle, and in how many instances it is optimal."""
    faults, optimal = [], []
    for chain, known in oracle():
        plan = plan_of(chain, known["budget"])
        if plan is None or known["any"] is None:
            if (plan is None) != (known["any"] is None):
                faults.append((chain.name, known["budget"], "feasibility"))
            continue
        seconds, peak = simulate(chain, plan.ops)
        if (seconds, peak) != (plan.seconds, plan.peak_bytes) or peak > known["budget"]:
            faults.append((chain.name, known["budget"], "promise"))
        if known["persistent"] is not None and seconds > known["persistent"] * (1 + 1e-9):
            faults.append((chain.name, known["budget"], "slower than persistent"))
        if not plan.bound_seconds <= known["any"] * (1 + 1e-9) <= seconds * (1 + 2e-9):
            faults.append((chain.name, known["budget"], "order"))
        optimal.append(seconds <= known["any"] * (1 + 1e-9))
    return faults, sum(optimal) / max(len(optimal), 1)


@pytest.mark.parametrize("gap", [0, 1e-4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_agrees_with_the_oracle(kernel, gap):
    faults, optimal = faults_against_the_oracle(lambda c, b: planned(c, b, gap=gap, kernel=kernel))
    assert not faults
    assert optimal >= 0.985


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_its_freedom_it_is_the_persistent_optimum(kernel):
    for chain, known in oracle():
        if known["persistent"] is None:
            continue
        plan = solve(chain, known["budget"], gap=0, kernel=kernel, keeps=False)
        assert plan.seconds == pytest.approx(known["persistent"], rel=1e-9), chain.name


# ---------------------------------------------------------------- exhaustive searches
def budgets_of(chain):
    return st.integers(chain.value_bytes[0], store_all_peak(chain) + 2)


@SLOW
@given(st.data())
def test_it_is_never_better_than_the_best_of_all_schedules(data):
    chain = data.draw(chains())
    budget = data.draw(budgets_of(chain))
    best, plan, limit = (
        best_of_all(chain, budget),
        planned(chain, budget, gap=0, kernel=None),
        bounds(chain, budget),
    )
    assert plan is None or best is not None
    if best is not None:
        assert limit.least_peak_bytes <= budget
        assert limit.least_seconds <= best * (1 + 1e-9)
    if plan is not None:
        assert best <= plan.seconds
        assert plan.bound_seconds <= best * (1 + 1e-9)


@settings(SLOW, max_examples=60)
@given(st.data())
def test_it_is_the_best_of_its_family_at_every_budget(data):
    chain = data.draw(chains(most=5, states=1100))
    points = sorted(family(chain))
    found = frontier(chain, gap=0, kernel=None)
    assert found.gap == 0
    assert found.points[0][0] == points[0][0] == least_budget_bytes(chain, kernel=None)
    budgets = {p for p, _ in points} | {p - 1 for p, _ in points}
    for budget in data.draw(st.lists(st.sampled_from(sorted(budgets)), min_size=4, max_size=4)):
        fitting = [t for p, t in points if p <= budget]
        plan = planned(chain, budget, gap=0, kernel=None)
        assert (plan is None) == (not fitting)
        assert found.seconds(budget) == (min(fitting) if fitting else None)
        if plan is not None:
            assert (plan.seconds, plan.gap) == (min(fitting), 0)


# ---------------------------------------------------------------- two solvers, one plan
@pytest.mark.skipif(find_compiler() is None, reason="there is no compiler here")
@SLOW
@given(st.data())
def test_python_and_kernel_return_the_same_plans(data):
    rand = random.Random(data.draw(st.integers(0, 2**32)))
    n, options = data.draw(st.integers(1, 18)), data.draw(st.integers(1, 3))
    kinds = data.draw(st.sampled_from([None, 1, 2, 3]))
    chain = draw_chain(rand, n, options, kinds=kinds, scale=data.draw(st.sampled_from([1, 2**20])))
    least = least_budget_bytes(chain, kernel=None)
    assert least == least_budget_bytes(chain, kernel="native")
    budget = budget_at(chain, data.draw(st.sampled_from([-0.01, 0, 0.1, 0.3, 0.7])), least)
    gap = data.draw(st.sampled_from([0, 1e-4, 1e-2]))
    assert planned(chain, budget, gap=gap, kernel=None) == planned(
        chain, budget, gap=gap, kernel="native"
    )


def no_compiler():
    raise NativeBuildError("there is no compiler", command="g++", output="")


def test_without_a_compiler_a_long_chain_is_planned_in_python_with_a_warning(monkeypatch):
    no_compiler.cache_info = kernel.load.cache_info
    monkeypatch.setattr(kernel, "load", no_compiler)
    monkeypatch.setattr(kernel, "_compiles", kernel._compiles.__wrapped__)
    chain = load("rand_n50")
    budget = store_all_peak(chain)
    with pytest.warns(XmemWarning, match="there is no compiler"):
        plan = solve(chain, budget)
    assert plan == solve(chain, budget, kernel=None)
    with pytest.raises(NativeBuildError):
        solve(chain, budget, kernel="native")


@pytest.mark.skipif(find_compiler() is None, reason="there is no compiler here")
@pytest.mark.parametrize("name", ["rand_n10", "rand_n24", "resnet50_B4", "unet3d_b16_S48"])
def test_python_and_kernel_find_the_same_fronts(name):
    chain = load(name)
    assert frontier(chain, gap=0, kernel=None) == frontier(chain, gap=0, kernel="native")
    assert frontier(chain, gap=0.3, kernel=None) == frontier(chain, gap=0.3, kernel="native")


@pytest.mark.parametrize("seed", [162, 393, 419, 521])
def test_it_holds_where_equal_stages_follow_unequal_ones(seed):
    """Equal stages share fronts, and their bands count the value before them: it must be equal.

    With these seeds a plan is lost otherwise.
    """
    chain = draw_chain(random.Random(seed), 5, 1, kinds=2)
    points = family(chain)
    for fraction in (0.05, 0.2):
        budget = budget_at(chain, fraction, min(p for p, _ in points))
        plan = solve(chain, budget, gap=0, kernel=None)
        assert plan.seconds == min(t for p, t in points if p <= budget)


# ---------------------------------------------------------------- guarantees
@pytest.mark.parametrize("gap", [1e-3, 1e-2, 0.1])
def test_a_gap_is_kept_and_reported(gap, monkeypatch):
    # Fronts this small would stay whole, and the gap would be 0.
    monkeypatch.setattr("xmem.planner.solver.WHOLE", 0)
    rand, thinned = random.Random(5), 0
    for options in (1, 2, 3):
        chain = draw_chain(rand, 14, options, scale=2**20)
        least = least_budget_bytes(chain, kernel=None)
        for fraction in (0.02, 0.1, 0.3):
            budget = budget_at(chain, fraction, least)
            best = solve(chain, budget, gap=0, kernel=None)
            plan = solve(chain, budget, gap=gap, kernel=None)
            step = chain.store_all_seconds
            assert best.gap == 0
            assert best.seconds <= plan.seconds <= best.seconds + gap * step
            assert plan.gap <= gap
            assert plan.seconds - plan.gap * step <= best.seconds * (1 + 1e-9)
            thinned += plan.gap > 0
    assert thinned


@pytest.mark.parametrize("gap", [1e-3, 1e-1])
def test_a_frontier_keeps_its_gap_at_every_budget(gap, monkeypatch):
    monkeypatch.setattr("xmem.planner.tradeoff.WHOLE", 0)
    chain = draw_chain(random.Random(8), 9, 3, scale=2**20)
    best, found = (frontier(chain, gap=g, kernel=None) for g in (0, gap))
    assert best.gap == 0
    assert found.gap == gap
    assert len(found.points) < len(best.points)
    assert found.points[0][0] == best.points[0][0]
    for budget, seconds in best.points:
        assert seconds <= found.seconds(budget) <= seconds + gap * chain.store_all_seconds


def seconds_by_budget(chain, budgets, **options):
    plans = [planned(chain, b, kernel=None, **options) for b in sorted(budgets)]
    return [math.inf if p is None else p.seconds for p in plans]


@SLOW
@given(st.data())
def test_more_budget_never_gives_a_slower_plan(data):
    chain = data.draw(chains())
    budgets = data.draw(st.lists(budgets_of(chain), min_size=2, max_size=6))
    found = seconds_by_budget(chain, budgets)
    assert all(later <= sooner for sooner, later in itertools.pairwise(found))


@pytest.mark.parametrize("seed", range(6))
def test_more_budget_never_gives_a_slower_plan_of_a_long_chain(seed):
    rand = random.Random(seed)
    chain = draw_chain(rand, 16, 1 + seed % 3, scale=2**20)
    least, most = least_budget_bytes(chain, kernel=None), store_all_peak(chain)
    found = seconds_by_budget(chain, [rand.randint(least, most) for _ in range(12)])
    # Times are rounded to 2**-40 of a step
    assert all(later <= sooner * (1 + 1e-10) for sooner, later in itertools.pairwise(found))


def test_a_frontier_is_reached_point_by_point():
    chain = load("resnet50_B4")
    found = frontier(chain, kernel=None)
    assert found.points == tuple(sorted(found.points))
    for budget, seconds in found.points[:: len(found.points) // 8]:
        plan = solve(chain, budget, kernel=None)
        assert plan.seconds == pytest.approx(seconds, rel=1e-10)
        before = planned(chain, budget - 1, kernel=None)
        assert before is None or before.seconds > plan.seconds


def test_an_infeasible_budget_says_what_would_do():
    chain = load("vgg16_B2")
    with pytest.raises(InfeasibleBudgetError, match="What helps") as caught:
        solve(chain, 1000)
    error = caught.value
    assert error.budget_bytes == 1000
    assert str(error.minimum_bytes) in str(error)
    assert "'conv1'" in str(error)  # the heaviest stage
    assert solve(chain, error.minimum_bytes).peak_bytes == error.minimum_bytes
    with pytest.raises(InfeasibleBudgetError):
        solve(chain, error.minimum_bytes - 1)


def test_all_the_memory_there_is_stores_all():
    chain = load("vgg16_B2")
    plan = solve(chain, 10**30)
    assert plan.seconds == plan.bound_seconds == chain.store_all_seconds
    assert (plan.overhead, plan.gap) == (0, 0)
    assert plan.peak_bytes == store_all_peak(chain)


def test_free_stages_are_planned_too():
    chain = load("rand_n10")
    stages = tuple(
        dataclasses.replace(
            s,
            forward_seconds=0.0,
            options=tuple(
                dataclasses.replace(o, forward_seconds=0.0, backward_seconds=0.0) for o in s.options
            ),
        )
        for s in chain.stages
    )
    free = dataclasses.replace(chain, stages=stages)
    plan = solve(free, least_budget_bytes(free), kernel=None)
    assert (plan.seconds, plan.overhead, plan.gap) == (0, 0, 0)


@pytest.mark.parametrize(
    "wrong", [{"gap": -1}, {"gap": float("nan")}, {"kernel": "cuda"}, {"budget_bytes": 1.5}]
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(UsageError):
        solve(load("rand_n10"), **{"budget_bytes": 10**9, **wrong})


def test_a_plan_names_the_options_it_uses():
    chain = draw_chain(random.Random(2), 10, 3, scale=2**20)
    plan = solve(chain, budget_at(chain, 0.2, least_budget_bytes(chain)), kernel=None)
    last = {op.index: op.option for op in plan.ops if op.code == "G"}
    assert plan.options == tuple(
        chain.stages[i].options[last[i]].name for i in range(len(chain.stages))
    )
    assert len(set(plan.options)) > 1
