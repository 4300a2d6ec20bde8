"""Schedules of every kind, played on Jittor: gradients, forward counts, bytes and marks."""

import itertools
import random
import statistics

import numpy as np
import pytest
from chain import normal
from plan_runs import (
    begun_in_marks,
    counts,
    distances,
    drawn,
    every,
    keeping_all,
    linear,
    loss_of,
    measured_peak,
    mixed,
    peaks_by_operation,
    peaks_in_marks,
    planned,
    profiled,
    stays,
    with_tail,
)

from xmem.errors import CompositionError
from xmem.planner import least_budget_bytes, parse_ops, simulate, solve
from xmem.records import HEAD, REST, TAIL

# Jittor adds up in a single float32 on a CPU, and fuses sums of convolutions and of BatchNorm one
# way where they feed running statistics and another way where they are made again.
ROUNDING = 5e-6


@pytest.fixture(scope="module")
def chains(backend):
    """Return, by the number of stages: a model, its batch, its profile, its plain gradients."""
    import jittor as jt

    found = {}
    for n in (4, 6, 8):
        jt.set_global_seed(0)
        np.random.seed(0)
        stages, x = mixed(n)
        model = planned(backend.plans, stages)
        plain = backend.plans.step(model, x, loss_of, gradients=True)
        model.ops, model.traced = every(n), True
        for _ in range(2):  # the first one compiles
            backend.plans.step(model, x, loss_of)
        found[n] = model, x, profiled(model.run, model.ops), plain
    return found


@pytest.mark.parametrize("n", [4, 6, 8])
def test_any_schedule_gives_the_gradients_of_a_plain_step_and_runs_what_it_says(backend, chains, n):
    model, x, chain, plain = chains[n]
    for seed in range(8):
        model.ops = drawn(random.Random(100 * n + seed), n)
        model.traced = True
        step = backend.plans.step(model, x, loss_of, gradients=True)
        shown = n, seed, model.ops
        assert model.run.forwards == counts(model.ops, n), shown
        assert max(distances(step.gradients, plain.gradients).values()) <= ROUNDING, shown
        assert step.loss == pytest.approx(plain.loss, rel=1e-6)
        predicted = simulate(chain, with_tail(model.ops, n))[1]
        assert measured_peak(model.run) <= predicted, shown
        assert measured_peak(model.run) >= predicted * 0.995, shown


@pytest.mark.parametrize("n", [4, 6, 8])
def test_plans_take_what_they_promise(backend, chains, n):
    model, x, chain, plain = chains[n]
    least = least_budget_bytes(chain)
    whole = simulate(chain, with_tail(keeping_all(n), n))[1]
    off = []
    for fraction in (0, 0.1, 0.25, 0.5, 0.8):
        plan = solve(chain, int(least + fraction * (whole - least)), keeps=True)
        model.ops = tuple(op for op in plan.ops if op.index < n or op.code in ("L", "Da"))
        model.traced = True
        traced = backend.plans.step(model, x, loss_of)
        measured = measured_peak(model.run)
        off.append(measured / plan.peak_bytes - 1)
        assert measured <= plan.budget_bytes, (fraction, measured, plan.budget_bytes)
        model.traced = False
        step = backend.plans.step(model, x, loss_of, gradients=True)
        assert step.peak_bytes <= traced.peak_bytes
        assert model.run.forwards == counts(model.ops, n)
        assert max(distances(step.gradients, plain.gradients).values()) <= ROUNDING
    assert statistics.median(map(abs, off)) <= 0.005, off


def test_all_schedules_of_linear_layers_are_bit_equal(backend):
    stages, x = linear(), normal(16, 24)
    model = planned(backend.plans, stages)
    plain = backend.plans.step(model, x, loss_of, gradients=True)
    model.ops = keeping_all(5)
    first = backend.plans.step(model, x, loss_of, gradients=True)
    # Without boundaries Jittor fuses what it can, with other rounding.
    assert max(distances(first.gradients, plain.gradients).values()) <= 1e-6
    assert first.loss == plain.loss
    for ops in (
        every(5),
        parse_ops("N0 G1.0 Da1 N2 G3.0 N4 L Da5 G4.0 B4 B3 Da3 N0 Ds1 N1 G2.0 B2 G1.0 B1 G0.0 B0"),
        drawn(random.Random(1), 5),
    ):
        model.ops = ops
        step = backend.plans.step(model, x, loss_of, gradients=True)
        assert max(distances(step.gradients, first.gradients).values()) == 0
        assert step.loss == first.loss


@pytest.mark.parametrize(
    "text",
    [
        "N0 N1 Da1 G2.0 Da2 G3.0 N4 L Da5 G4.0 B4 B3 N0 N1 Da1 B2 Da2 N0 G1.0 B1 Da1 G0.0 B0",
        "G0.0 N1 N2 Da2 G3.0 Da3 G4.0 L B4 N1 N2 Da2 B3 Da3 G1.0 G2.0 B2 B1 B0",
        "N0 G1.0 Da1 N2 N3 Da3 G4.0 Da4 L G2.0 N3 B4 Da4 G3.0 B3 B2 N0 B1 Da1 G0.0 B0",
    ],
)
def test_stages_that_are_kept_without_their_input_hold_what_the_model_says(backend, text):
    """Views inside a stage lose their memory, too, and the value that others hold does not."""
    from jittor import nn

    class Reshaped(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(32, 64)

        def execute(self, x):
            return self.layer(x.reshape((-1, 32))).reshape((x.shape[0], -1))

    stages = [nn.Linear(64, 64), nn.LayerNorm(64), Reshaped(), nn.LayerNorm(128), Reshaped()]
    x = normal(512, 64)
    model = planned(backend.plans, stages)
    plain = backend.plans.step(model, x, loss_of, gradients=True)
    model.traced = True
    for ops in (every(5), every(5), parse_ops(text)):
        model.ops = ops
        step = backend.plans.step(model, x, loss_of, gradients=True)
        if ops == every(5):
            chain, loss_bytes = profiled(model.run, ops), stays(model.run)
    assert max(distances(step.gradients, plain.gradients).values()) <= 1e-6
    expected = peaks_by_operation(chain, model.ops)
    begun = begun_in_marks(model.run, loss_bytes)
    for number, most in peaks_in_marks(model.run, loss_bytes).items():
        shown = number, str(model.ops[number]), most, expected[number]
        # What is dropped goes when the next operation begins.
        assert most == max(expected[number], begun[number]), shown


def test_marks_tile_the_step_and_name_its_parts(backend, chains):
    model, x, _, _ = chains[4]
    model.ops, model.traced = every(4), True
    step = backend.plans.step(model, x, loss_of)
    marks = model.run.marks()
    named = [m.op if m.op < 0 else str(model.ops[m.op]) for m in marks]
    sweep = ["N0", "N1", "N2", "N3"]
    back = ["G3.0", "B3", "G2.0", "B2", "G1.0", "B1", "G0.0", "B0"]
    assert named == [HEAD, *sweep, TAIL, *back, REST]
    for before, after in itertools.pairwise(marks):
        assert before.after_bytes == after.before_bytes
        assert before.gradient_bytes <= after.gradient_bytes
        assert after.seconds >= 0
    assert max(m.peak_bytes for m in marks) == step.peak_bytes
    assert marks[-1].gradient_bytes == step.gradient_bytes
    model.traced = False
    backend.plans.step(model, x, loss_of)
    with pytest.raises(CompositionError, match="not traced"):
        model.run.marks()


def test_gradients_of_what_comes_before_and_after_the_chain_are_counted_apart(backend):
    from jittor import nn

    head, tail = nn.Linear(24, 24), nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24))
    model = planned(backend.plans, linear(3), head=head, tail=tail)
    model.ops, model.traced = every(3), True
    for _ in range(2):
        step = backend.plans.step(model, normal(16, 24), loss_of)
    marks = {m.op: m for m in model.run.marks()}
    layer, norm = (24 * 24 + 24) * 4, 2 * 24 * 4
    first_back = min(k for k in marks if k > model.ops.index(parse_ops("L")[0]))
    assert marks[TAIL].gradient_bytes == 0
    assert marks[first_back].gradient_bytes == layer + norm
    assert marks[REST].gradient_bytes == layer + norm + 3 * layer
    assert step.gradient_bytes == layer + norm + 4 * layer
    grown = marks[first_back].before_bytes - marks[TAIL].before_bytes
    assert grown >= layer + norm, "gradients of the tail are there when its gradient is"
