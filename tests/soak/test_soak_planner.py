"""Long campaigns of the planner: exhaustive searches, two solvers, gaps and budgets."""

import itertools
import random

import pytest
from planner_chains import best_of_all, budget_at, draw_chain, family, store_all_peak
from test_planner_solve import planned

from xmem.planner import bounds, frontier, least_budget_bytes, solve

pytestmark = pytest.mark.soak


def drawn(rand, most):
    kinds = rand.choice([None, None, 1, 2, 3])
    scale = rand.choice([1, 2**10, 2**20])
    return draw_chain(
        rand, rand.randint(1, most), rand.choice([1, 1, 2, 3]), kinds=kinds, scale=scale
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_family_has_nothing_better(seed):
    rand = random.Random(seed)
    for _ in range(60):
        chain = drawn(rand, 4)
        points = family(chain)
        found = frontier(chain, gap=0)
        for budget in {p for p, _ in points}:
            best = min(t for p, t in points if p <= budget)
            # Times are rounded to 2**-40 of a step
            assert solve(chain, budget, gap=0).seconds == pytest.approx(best, rel=1e-10)
            assert found.seconds(budget) == pytest.approx(best, rel=1e-10)


def test_nearly_all_plans_are_the_best_of_all_schedules():
    equal = count = missed = 0
    for seed in range(250):
        rand = random.Random(seed)
        n, options = rand.choice([(7, 1), (6, 1), (5, 1), (5, 2), (4, 2), (4, 3)])
        chain = draw_chain(rand, n, options, kinds=rand.choice([None, 2]))
        budget = budget_at(chain, rand.uniform(-0.1, 0.9), least_budget_bytes(chain))
        best, plan = best_of_all(chain, budget), planned(chain, budget, gap=0)
        if plan is None:
            missed += best is not None
            continue
        count += 1
        assert best <= plan.seconds * (1 + 1e-12)
        assert bounds(chain, budget).least_seconds <= best * (1 + 1e-9)
        equal += plan.seconds <= best * (1 + 1e-9)
    print(f"{count} plans, {equal} the best of all; {missed} budgets missed")
    assert equal >= 0.98 * count
    assert missed <= 0.02 * count


@pytest.mark.parametrize("seed", range(40))
def test_python_and_kernel_agree(seed):
    rand = random.Random(1000 + seed)
    for _ in range(10):
        chain = drawn(rand, 32)
        least = least_budget_bytes(chain, kernel="native")
        for fraction in (0.02, 0.1, 0.3, 0.7):
            budget = budget_at(chain, fraction, least)
            gap = rand.choice([0, 1e-4, 1e-3, 1e-2])
            plans = [planned(chain, budget, gap=gap, kernel=k) for k in (None, "native")]
            assert plans[0] == plans[1], (seed, chain, budget, gap)


@pytest.mark.parametrize("seed", range(20))
def test_gaps_hold_and_budgets_help(seed):
    rand = random.Random(2000 + seed)
    for n in (20, 40, 60):
        chain = draw_chain(rand, n, 1, scale=2**20)
        least, most, step = (
            least_budget_bytes(chain),
            store_all_peak(chain),
            chain.store_all_seconds,
        )
        budgets = sorted(rand.randint(least, most) for _ in range(6))
        best = [solve(chain, b, gap=0, kernel="native") for b in budgets]
        for sooner, later in itertools.pairwise(best):
            assert later.seconds <= sooner.seconds * (1 + 1e-10)
        for budget, known in zip(budgets, best, strict=True):
            rotor = solve(chain, budget, gap=0, kernel="native", keeps=False)
            assert known.seconds <= rotor.seconds * (1 + 1e-10)
            for gap in (1e-3, 1e-2):
                plan = solve(chain, budget, gap=gap, kernel="native")
                assert plan.seconds <= known.seconds + gap * step
                assert plan.seconds - plan.gap * step <= known.seconds * (1 + 1e-10)
