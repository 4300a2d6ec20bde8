"""Steps of planned models on Jittor: what they ask for, and what they leave behind."""

import random

import numpy as np
import pytest
from chain import error, normal, trained
from plan_runs import (
    distances,
    linear,
    live,
    loss_of,
    planned,
)


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
