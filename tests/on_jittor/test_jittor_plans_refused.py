"""What a plan on Jittor refuses."""

import pytest
from chain import gradients, learnt, normal, trained
from plan_runs import (
    linear,
    loss_of,
    opened,
    planned,
)

from xmem.errors import CompositionError


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
