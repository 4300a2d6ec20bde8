"""What works in stages of a plan on Jittor."""

import numpy as np
import pytest
from chain import error, gradients, learnt, normal, trained
from plan_runs import (
    both,
    distances,
    keeping_all,
    linear,
    loss_of,
    planned,
)

import xmem
from xmem.records import HEAD, REST, Recompute


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
