"""Schedules played on Jittor: gradients, forward counts, bytes, and what a run leaves behind."""

import gc
import itertools
import random
import statistics

import numpy as np
import pytest
from chain import error, gradients, learnt, normal, trained
from plan_runs import (
    begun_in_marks,
    counts,
    distances,
    drawn,
    every,
    keeping_all,
    loss_of,
    measured_peak,
    mixed,
    peaks_by_operation,
    peaks_in_marks,
    planned,
    profiled,
    stays,
    unit_chain,
    with_tail,
)

import xmem
from xmem.errors import CompositionError
from xmem.planner import least_budget_bytes, parse_ops, simulate, solve
from xmem.records import HEAD, REST, TAIL, Recompute

# Jittor adds up in a single float32 on a CPU, and fuses sums of convolutions and of BatchNorm one
# way where they feed running statistics and another way where they are made again.
ROUNDING = 5e-6


def linear(depth=5, width=24):
    """Return stages, all alike."""
    from jittor import nn

    return [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]


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


# ---------------------------------------------------------------------- schedules of every kind
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


# ---------------------------------------------------------------------- what must work
PLANS = {
    "every": "N0 N1 N2 N3 L Da4 G3.0 B3 Da3 G2.0 B2 Da2 G1.0 B1 Da1 G0.0 B0",
    # Keeps stage 1 and drops it again, keeps stage 2 without its input, runs stage 0 three times.
    "mixed": "N0 G1.0 Da1 G2.0 Ds1 G3.0 L B3 N0 N1 B2 Da2 G1.0 B1 Da1 G0.0 B0",
}


@pytest.fixture(params=list(PLANS))
def ops(request):
    simulate(unit_chain(4), PLANS[request.param])
    return parse_ops(PLANS[request.param])


def both(model, ops, x, targets, loss=loss_of):
    """Return gradients of a plain run and of a planned one; both draw the same numbers."""
    import jittor as jt

    found = []
    for schedule in (None, ops):
        jt.set_global_seed(5)
        model.ops = schedule
        found.append(gradients(loss(model, x), targets))
    return found


@pytest.mark.parametrize("wanted", [True, False])
def test_the_batch_gets_its_gradient_where_it_asks_for_one(backend, ops, wanted):
    model, x = planned(backend.plans, linear(4)), learnt(8, 24)
    if not wanted:
        x.stop_grad()
    plain, found = both(model, ops, x, [*trained(model), *([x] if wanted else [])])
    assert error(found, plain) <= 1e-6


def test_integers_come_first_and_parameters_are_frozen(backend, ops):
    import jittor as jt
    from jittor import nn

    stages = [nn.Embedding(11, 24), *linear(3)]
    for p in stages[1].parameters():
        p.stop_grad()
    model, x = planned(backend.plans, stages), jt.array(np.arange(8, dtype=np.int32) % 11)
    plain, found = both(model, ops, x, trained(model))
    assert len(plain) == 5
    assert error(found, plain) <= 1e-6
    stages[0].weight.stop_grad()
    plain, found = both(model, ops, x, trained(model))
    assert error(found, plain) <= 1e-6


def test_dropout_draws_the_same_again(backend, ops):
    from jittor import nn

    stages = linear(4)
    stages[1], stages[3] = nn.Dropout(0.5, is_train=True), nn.Dropout(0.2, is_train=True)
    model, x = planned(backend.plans, stages), normal(8, 24)
    plain = backend.plans.step(model, x, loss_of, gradients=True)
    model.ops = keeping_all(4)
    first = backend.plans.step(model, x, loss_of, gradients=True)
    model.ops = ops
    second = backend.plans.step(model, x, loss_of, gradients=True)
    assert max(distances(second.gradients, first.gradients).values()) == 0
    assert max(distances(second.gradients, plain.gradients).values()) <= 1e-6


def test_running_statistics_are_updated_once(backend, ops):
    from jittor import nn

    means = []
    for schedule in (None, ops):
        stages = linear(4)
        stages[2] = nn.BatchNorm1d(24)
        for k, p in enumerate(p for stage in stages for p in stage.parameters()):
            p.assign(
                ((p * 0 + 1 + k) / 50 + p * 0).stop_grad() if p.is_stop_grad() else p * 0 + 0.1
            )
        model = planned(backend.plans, stages)
        model.ops = schedule
        x = normal(8, 24) * 0 + np.linspace(0, 1, 8 * 24, dtype=np.float32).reshape(8, 24)
        for _ in range(3):
            gradients(loss_of(model, x), trained(model))
        means.append([stages[2].running_mean.numpy(), stages[2].running_var.numpy()])
    assert error(means[1], means[0]) <= 1e-6
    assert not np.array_equal(means[1][0], np.zeros(24))


def test_under_autocast(backend, ops):
    model, x = planned(backend.plans, linear(4)), normal(8, 24)

    def loss(model, x):
        with xmem.autocast():
            y = model(x)
        return (y.float32() ** 2).mean()

    plain, found = both(model, ops, x, trained(model), loss)
    assert error(found, plain) <= 2e-3


def test_gradients_are_added_up_over_micro_batches(backend, ops):
    import jittor as jt

    model = planned(backend.plans, linear(4))
    batches = [normal(8, 24) for _ in range(3)]
    found = []
    for schedule in (None, ops):
        model.ops = schedule
        optimizer = jt.optim.SGD(trained(model), 0.1)
        for x in batches:
            optimizer.backward(loss_of(model, x))
        found.append([g.numpy() for g in optimizer.param_groups[0]["grads"]])
    assert error(found[1], found[0]) <= 1e-6


def test_two_runs_are_differentiated_together(backend, ops):
    model, x, y = planned(backend.plans, linear(4)), learnt(8, 24), learnt(8, 24)

    def loss(model, x):
        return loss_of(model, x) + loss_of(model, y) * 2

    plain, found = both(model, ops, x, [*trained(model), x, y], loss)
    assert error(found, plain) <= 1e-6


def test_two_traced_runs_of_a_step_note_marks_of_their_own(backend, ops):
    model, x = planned(backend.plans, linear(4)), normal(8, 24)
    model.ops, model.traced = ops, True
    runs = []

    def loss(model, x):
        first = loss_of(model, x)
        runs.append(model.run)
        return first + loss_of(model, x * 2)

    step = backend.plans.step(model, x, loss)
    for run in (runs[0], model.run):
        marks = run.marks()
        assert [m.op for m in marks][0 :: len(marks) - 1] == [HEAD, REST]
        assert max(m.peak_bytes for m in marks) == step.peak_bytes


def test_weights_that_are_used_twice_get_one_gradient(backend, ops):
    from jittor import nn

    shared = nn.Sequential(nn.Linear(24, 24), nn.GELU())
    stages = [shared, *linear(2), shared]
    stages[1][0].weight = stages[2][0].weight
    tail = nn.Linear(24, 24)
    tail.weight = shared[0].weight
    model, x = planned(backend.plans, stages, tail=tail), learnt(8, 24)
    targets = list({p.var_ptr: p for p in trained(model)}.values())
    plain, found = both(model, ops, x, [*targets, x])
    assert error(found, plain) <= 1e-6


def test_a_stage_may_read_the_outputs_of_earlier_ones(backend, ops):
    from jittor import nn

    class Joined(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(24, 24)

        def execute(self, x, skip):
            return nn.gelu(self.layer(x)) * skip

    stages = [*linear(2), Joined(), Joined()]
    model = planned(backend.plans, stages, skips={2: 1, 3: 2})
    x = learnt(8, 24)
    plain, found = both(model, ops, x, [*trained(model), x])
    assert error(found, plain) <= 1e-6
    assert model.run.reads == [(1, 2), (2, 3)]
    model = planned(backend.plans, [*linear(3), Joined()], skips={3: 0})
    plain, found = both(model, ops, x, [*trained(model), x])
    assert error(found, plain) <= 1e-6
    assert model.run.reads == []


def test_other_tensors_of_a_stage_get_their_gradients(backend, ops):
    from jittor import nn

    x, scale, closed = learnt(8, 24), learnt(8, 24), learnt(24)
    layer = nn.Linear(24, 24)

    class Scaled(nn.Module):
        def execute(self, x):
            return nn.gelu(layer(x)) * closed * self.scale

    first, last = Scaled(), Scaled()
    model = planned(backend.plans, [first, *linear(2), last])

    def loss(model, x):
        first.scale = last.scale = scale * 2
        return loss_of(model, x)

    plain, found = both(model, ops, x, [*trained(layer), *trained(model), x, scale, closed], loss)
    assert error(found, plain) <= 1e-6


def test_values_may_be_looked_at(backend, ops):
    model, x = planned(backend.plans, linear(4)), learnt(8, 24)
    model.seen = []
    plain, found = both(model, ops, x, [*trained(model), x])
    assert error(found, plain) <= 1e-6
    assert model.seen[:4] == pytest.approx(model.seen[4:], rel=1e-5)


def test_a_stage_may_have_checkpointed_regions_inside(backend, ops):
    from jittor import nn

    class Regions(nn.Module):
        def __init__(self, first, second):
            self.first, self.second = first, second

        def execute(self, x):
            return xmem.checkpoint(self.second, xmem.checkpoint(self.first, x))

    model, x = planned(backend.plans, [Regions(*linear(2)) for _ in range(4)]), learnt(8, 24)
    plain, found = both(model, ops, x, [*trained(model), x])
    assert error(found, plain) <= 1e-6


def test_a_plan_may_replay_nothing_and_check_values(backend, ops):
    model, x = planned(backend.plans, linear(4)), learnt(8, 24)
    for how in (Recompute(preserve_rng=False), Recompute(check_values=True)):
        model.how = how
        plain, found = both(model, ops, x, [*trained(model), x])
        assert error(found, plain) <= 1e-6


def live(backend):
    import jittor as jt

    gc.collect()
    jt.sync_all(True)
    counted = jt.liveness_info()
    return backend.measure.counters().allocated_bytes, counted["hold_vars"], counted["lived_ops"]


@pytest.mark.parametrize("traced", [False, True])
def test_a_hundred_steps_leave_nothing(backend, ops, traced):
    import jittor as jt
    from jittor import nn

    stages = linear(4)
    stages[1] = nn.Sequential(nn.BatchNorm1d(24), nn.Dropout(0.2, is_train=True))
    model, x = planned(backend.plans, stages), normal(16, 24)
    model.ops, model.traced = ops, traced
    optimizer = jt.optim.Adam(trained(model), 1e-3)
    seen = []
    for step in range(103):
        optimizer.step(loss_of(model, x))
        if step % 10 == 0:
            model(x)  # and no backward
        if step in (2, 102):
            model.run = None
            seen.append(live(backend))
    assert seen[0] == seen[1]


def test_a_step_aside_leaves_no_trace(backend, ops):
    import jittor as jt
    from jittor import nn

    stages = linear(4)
    stages[1] = nn.Sequential(nn.BatchNorm1d(24), nn.Dropout(0.2, is_train=True))
    model, x = planned(backend.plans, stages), normal(16, 24)
    model.ops = ops

    def loss(model, x):
        random.random()
        return loss_of(model, x) + float(np.random.rand()) * 0

    backend.plans.step(model, x, loss)
    before = [p.numpy().copy() for p in model.parameters()], live(backend)
    random.seed(3)
    np.random.seed(3)
    jt.set_global_seed(3)
    first = backend.plans.step(model, x, loss, gradients=True)
    second = backend.plans.step(model, x, loss, gradients=True)
    drawn_after = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    jt.set_global_seed(3)
    assert drawn_after == (random.random(), np.random.rand())
    assert first.loss == second.loss
    assert max(distances(first.gradients, second.gradients).values()) == 0
    assert error([p.numpy() for p in model.parameters()], before[0]) == 0
    assert live(backend) == before[1]
    assert first.gradient_bytes == sum(p.nbytes for p in trained(model))
    assert first.peak_bytes > first.before_bytes


# ---------------------------------------------------------------------- what is refused
def opened(backend, stages, ops):
    model = planned(backend.plans, stages)
    model.ops = ops
    from xmem.playing import script

    names = [f"stage{i}" for i in range(len(stages))]
    return backend.plans.open(script(ops, len(stages)), names, Recompute(), traced=False)


def test_an_output_that_something_else_reads_is_named(backend, ops):
    stages, x = linear(4), normal(8, 24)
    run = opened(backend, stages, ops)
    values = [x]
    for i, stage in enumerate(stages):
        values.append(run.first(i, stage, (values[-1],), {}))
    with pytest.raises(CompositionError, match=r"'stage1' is read by something else"):
        gradients((values[-1] ** 2).mean() + values[2].mean(), trained(stages[0]))


def test_a_value_that_is_changed_between_stages_is_named(backend, ops):
    stages, x = linear(4), normal(8, 24)
    run = opened(backend, stages, ops)
    for i, stage in enumerate(stages):
        x = run.first(i, stage, (x * 2 if i == 2 else x,), {})
    with pytest.raises(CompositionError, match=r"'stage1' is read by something else"):
        gradients((x**2).mean(), trained(stages[0]))


def test_a_forward_that_leaves_early_is_told_so(backend, ops):
    stages, x = linear(4), normal(8, 24)
    run = opened(backend, stages, ops)
    for i, stage in enumerate(stages[:2]):
        x = run.first(i, stage, (x,), {})
    with pytest.raises(CompositionError, match=r"left the plan early: 2 of 4 stages.*'stage1'"):
        gradients((x**2).mean(), trained(stages[0]))


def test_stages_are_called_in_order_with_one_tensor_out(backend, ops):
    from jittor import nn

    class Pair(nn.Module):
        def execute(self, x):
            return x, x * 2

    stages, x = linear(4), normal(8, 24)
    with pytest.raises(CompositionError, match=r"'stage1' is called out of order: stage 'stage0'"):
        opened(backend, stages, ops).first(1, stages[1], (x,), {})
    with pytest.raises(CompositionError, match=r"'stage0' takes no tensor"):
        opened(backend, stages, ops).first(0, stages[0], (3,), {})
    with pytest.raises(CompositionError, match=r"'stage0' returns 2 tensors"):
        opened(backend, [Pair(), *stages[1:]], ops).first(0, Pair(), (x,), {})


def test_gradients_come_once_and_are_not_differentiated(backend, ops):
    import jittor as jt

    model, x = planned(backend.plans, linear(4)), learnt(8, 24)
    model.ops = ops
    loss = loss_of(model, x)
    jt.grad(loss, [x], retain_graph=True)
    with pytest.raises(CompositionError, match="asked for twice"):
        jt.grad(loss, [x], retain_graph=True)
    loss = loss_of(model, x)
    [found] = jt.grad(loss, [x], retain_graph=True)
    with pytest.raises(CompositionError, match="second derivatives"):
        jt.grad((found**2).sum(), [x], retain_graph=True)


# ---------------------------------------------------------------------- small things
def test_tensors_are_found_and_their_bytes_counted(backend):
    import jittor as jt

    plans = backend.plans
    x = normal(8, 4).sync()
    y = x * 2
    assert plans.tensors({"a": [x, 3], "b": (y,)}) == [x, y]
    assert plans.bytes_of([x, x, x.reshape((4, 8)).sync()]) == 128
    assert plans.bytes_of([x, y, y]) == 256
    assert plans.recording()
    with jt.no_grad():
        assert not plans.recording()
    assert plans.traced(object()) is None
    assert plans.gaps["tracing"]
