"""Broken on purpose: tampered plans that are refused, solvers that the oracle fails."""

import dataclasses
import random

import pytest
from planner_chains import budget_at, draw_chain, load
from test_planner_solve import faults_against_the_oracle, planned

from xmem.errors import InfeasibleBudgetError, InvalidScheduleError
from xmem.planner import Op, least_budget_bytes, simulate, solve
from xmem.planner.bands import Bands
from xmem.planner.fronts import PythonEngine
from xmem.planner.problem import Problem


def plans():
    rand = random.Random(11)
    for chain in (load("resnet50_B4"), load("vgg16_B2"), draw_chain(rand, 9, 3, scale=1000)):
        for fraction in (0.05, 0.2, 0.5):
            budget = budget_at(chain, fraction, least_budget_bytes(chain, kernel=None))
            yield chain, solve(chain, budget, kernel=None)


PLANS = list(plans())


def tampered(plan, ops):
    return dataclasses.replace(plan, ops=tuple(ops))


@pytest.mark.parametrize(("chain", "plan"), PLANS)
def test_a_plan_as_it_is_passes(chain, plan):
    plan.check(chain)


@pytest.mark.parametrize(("chain", "plan"), PLANS)
@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"peak_bytes": p.peak_bytes - 1},
        lambda p: {"peak_bytes": p.peak_bytes + 1},
        lambda p: {"seconds": p.seconds * (1 - 1e-12)},
        lambda p: {"budget_bytes": p.peak_bytes - 1},
    ],
)
def test_a_false_promise_is_refused(chain, plan, change):
    with pytest.raises(InvalidScheduleError, match=r"promises|more than its budget"):
        dataclasses.replace(plan, **change(plan)).check(chain)


@pytest.mark.parametrize(("chain", "plan"), PLANS)
def test_every_missing_drop_is_refused(chain, plan):
    drops = [i for i, op in enumerate(plan.ops) if op.code.startswith("D")]
    assert drops
    for i in drops:
        with pytest.raises(InvalidScheduleError):
            tampered(plan, plan.ops[:i] + plan.ops[i + 1 :]).check(chain)


@pytest.mark.parametrize(("chain", "plan"), PLANS)
def test_every_missing_operation_is_refused(chain, plan):
    for i in range(len(plan.ops)):
        with pytest.raises(InvalidScheduleError):
            tampered(plan, plan.ops[:i] + plan.ops[i + 1 :]).check(chain)


@pytest.mark.parametrize(("chain", "plan"), PLANS)
def test_every_operation_that_comes_before_what_it_needs_is_refused(chain, plan):
    """A backward moved before what precedes it, which gives it its gradient or its stage."""
    for i, op in enumerate(plan.ops):
        if op.code == "B" and plan.ops[i - 1].code != "Da":
            swapped = (*plan.ops[: i - 1], op, plan.ops[i - 1], *plan.ops[i + 1 :])
            with pytest.raises(InvalidScheduleError, match=f"operation {i - 1}, {op}"):
                simulate(chain, swapped)


def test_a_drop_too_early_is_refused():
    chain, plan = PLANS[0]
    i = next(i for i, op in enumerate(plan.ops) if op.code == "N")
    early = (*plan.ops[: i + 1], Op("Da", plan.ops[i].index + 1), *plan.ops[i + 1 :])
    with pytest.raises(InvalidScheduleError):
        simulate(chain, early)


# ---------------------------------------------------------------- solvers
def loses_points(monkeypatch):
    """Every other point of a front goes."""
    right = PythonEngine._within

    def wrong(self, *arguments):
        sizes, excess = right(self, *arguments)
        return sizes[::2], excess[::2]

    monkeypatch.setattr(PythonEngine, "_within", wrong)


def forgets_the_gradient(monkeypatch):
    """A leaf counts its gradient as nothing."""
    right = Problem.leaf

    def wrong(self, s, j):
        less = self.a[s + 1] if s < self.n else 0
        return [(size - less, x, k) for size, x, k in right(self, s, j)]

    monkeypatch.setattr(Problem, "leaf", wrong)


def asks_too_much(monkeypatch):
    """The bands demand more of what is outside than must be paid."""
    right = Bands.before
    monkeypatch.setattr(Bands, "before", lambda self, number, room: 1.5 * right(self, number, room))


def never_keeps(monkeypatch):
    """The freedom that makes the family good is gone."""
    monkeypatch.setattr(Problem, "ends", lambda self, t: 1)
    right = Problem.branches
    monkeypatch.setattr(
        Problem,
        "branches",
        lambda self, *job: (b for b in right(self, *job) if b[5] != "keep"),
    )


@pytest.mark.parametrize("broken", [loses_points, forgets_the_gradient, asks_too_much, never_keeps])
def test_the_oracle_fails_a_broken_solver(broken, monkeypatch):
    broken(monkeypatch)

    def plan_of(chain, budget):
        try:
            return planned(chain, budget, gap=0, kernel=None)
        except (InvalidScheduleError, InfeasibleBudgetError):
            return None  # it has caught itself

    faults, optimal = faults_against_the_oracle(plan_of)
    assert faults or optimal < 0.985
