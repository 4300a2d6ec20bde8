"""What a step asks gradients for decides what a plan on Jittor takes and runs."""

import gc
import random
import warnings

import numpy as np
import pytest
from chain import error, gradients, learnt, normal, trained
from plan_runs import counts, distances, drawn, every, keeping_all, linear, loss_of, planned

import xmem
from xmem.planned import conduct, install
from xmem.staging import named_stages

WIDTH = 24


def frozen(module):
    for p in module.parameters():
        p.stop_grad()
    return module


def normalised():
    from jittor import nn

    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


def only(model, batch):
    """The batch is read by the first stage."""
    return model, batch


def behind_a_frozen_head(model, batch):
    """The batch is read by what is computed before the first stage, and asks for nothing."""
    from jittor import nn

    model.head = frozen(nn.Linear(WIDTH, WIDTH))
    return model, batch


def of_frozen_stages(model, batch):
    """The first two stages have nothing to learn."""
    frozen(model.stages[0])
    frozen(model.stages[1])
    return model, batch


def read_by_a_later_stage(model, batch):
    """The batch is an argument of the last stage, too."""
    from jittor import nn

    class Joined(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(WIDTH, WIDTH)

        def execute(self, x, skip):
            return self.layer(x) * skip

    stages = [*linear(3), Joined()]
    return planned(xmem.active().plans, stages, skips={3: 0}), batch


def closed_over(model, batch):
    """A stage closes over the batch."""
    from jittor import nn

    class Scaled(nn.Module):
        def execute(self, x):
            return x * batch

    return planned(xmem.active().plans, [*linear(2), Scaled(), *linear(1)]), batch


KINDS = [only, behind_a_frozen_head, of_frozen_stages, read_by_a_later_stage]


@pytest.mark.parametrize("first", [linear, normalised])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_whose_gradient_nobody_asks_for_takes_what_one_without_takes(backend, kind, first):
    """`jt.array` makes tensors that ask for gradients."""
    import jittor as jt

    rand = random.Random(0)
    schedules = [every(4), keeping_all(4), *(drawn(rand, 4) for _ in range(4))]
    seen = []
    for asking in (False, True):
        jt.set_global_seed(0)
        np.random.seed(0)
        batch = learnt(64, WIDTH) if asking else normal(64, WIDTH)
        stages = linear(4) if first is linear else [normalised(), *linear(3)]
        model, batch = kind(planned(backend.plans, stages), batch)
        model.traced = True
        seen.append([])
        for ops in schedules:
            model.ops = ops
            for _ in range(2):  # the first one compiles
                step = backend.plans.step(model, batch, loss_of)
            marks = model.run.marks()
            bytes_of = [(m.before_bytes, m.peak_bytes, m.after_bytes) for m in marks]
            seen[-1] += [step.peak_bytes - step.before_bytes, step.gradient_bytes]
            seen[-1] += [[m.op, m.gradient_bytes] for m in marks]
            seen[-1] += [[b - step.before_bytes for b in found] for found in bytes_of]
    assert seen[1] == seen[0]


# Of a tensor that a stage closes over, the graph of the stage is one that gives its gradient.
@pytest.mark.parametrize("kind", [*KINDS, closed_over])
def test_a_training_step_takes_what_the_step_that_was_measured_took(backend, ops, kind):
    import jittor as jt

    model = planned(backend.plans, [normalised(), *linear(3)])
    model, batch = kind(model, learnt(64, WIDTH))
    model.ops = ops
    for _ in range(2):
        step = backend.plans.step(model, batch, loss_of)
    targets = trained(model)
    gc.collect()
    jt.sync_all(True)
    backend.measure.reset_peak()
    before = backend.measure.counters().allocated_bytes
    loss = loss_of(model, batch)
    found = jt.grad(loss, targets, retain_graph=False)
    jt.sync([loss, *found], True, False)
    peak = backend.measure.counters().peak_allocated_bytes - before
    assert peak == step.peak_bytes - step.before_bytes


def test_a_run_says_which_stages_it_has_differentiated(backend, ops):
    stages, x = linear(4), normal(8, WIDTH)
    model = planned(backend.plans, stages)
    model.ops = ops
    loss = loss_of(model, x)
    assert model.run.differentiated == [False] * 4
    gradients(loss, trained(model))
    assert model.run.differentiated == [True] * 4
    assert model.run.forwards == counts(ops, 4)
    for k, stage in enumerate(stages):
        frozen(stage)
        backend.plans.step(model, x, loss_of)
        assert model.run.differentiated == [i > k for i in range(4)]
        if k < 3:
            assert model.run.forwards == counts(ops, 4)


# ---------------------------------------------------------------------- called by a conductor
def conducted(backend, model, names, ops):
    """Let named modules of a model run as a schedule says; returns what undoes it."""
    stages = named_stages(backend, model, names, traced=False)
    return install(backend, stages, conduct(backend, stages, ops))


def glued(between):
    """Return a model of four stages with something computed between them."""
    from jittor import nn

    class Glued(nn.Module):
        def __init__(self):
            self.stages = nn.Sequential(*linear(4))

        def execute(self, x):
            for i, stage in enumerate(self.stages):
                x = stage(between(i, x))
            return x

    return Glued()


NAMES = [f"stages.{i}" for i in range(4)]


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("kind", ["frozen", "detached"])
def test_something_is_computed_between_stages_without_gradients(backend, ops, kind, looked_at):
    from jittor import nn

    def between(i, x):
        if kind == "frozen":
            x = nn.relu(x + 1) if i < 3 else x
        elif i in (1, 2):
            x = (x * 2).detach()
        return x.sync() if looked_at else x

    model, x = glued(between), normal(8, WIDTH)
    if kind == "frozen":
        for i in range(3):
            frozen(model.stages[i])
    plain = backend.plans.step(model, x, loss_of, gradients=True)
    undo = conducted(backend, model, NAMES, ops)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = backend.plans.step(model, x, loss_of, gradients=True)
    undo()
    assert max(distances(found.gradients, plain.gradients).values()) <= 1e-6


def test_something_computed_between_stages_with_gradients_is_named(backend, ops):
    model, x = glued(lambda i, x: x * 2 if i == 2 else x), normal(8, WIDTH)
    undo = conducted(backend, model, NAMES, ops)
    with pytest.raises(xmem.CompositionError, match=r"'stages.1' is read by something else"):
        gradients(loss_of(model, x), trained(model))
    undo()


def test_a_stage_that_is_run_again_calls_other_stages_as_they_are(backend, ops):
    """Also those of another plan."""
    from jittor import nn

    class Outer(nn.Module):
        def __init__(self, inner):
            self.inner, self.layer = inner, nn.Linear(WIDTH, WIDTH)

        def execute(self, x):
            return self.layer(self.inner(x))

    shared, other = linear(1)[0], nn.Sequential(*linear(4))
    model = nn.Sequential(Outer(shared), Outer(other), shared, Outer(linear(1)[0]))
    x = learnt(8, WIDTH)
    targets = [*{p.var_ptr: p for p in trained(model)}.values(), x]
    plain = gradients(loss_of(model, x), targets)
    undos = [conducted(backend, other, list("0123"), ops)]
    undos.append(conducted(backend, model, list("0123"), ops))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert error(gradients(loss_of(model, x), targets), plain) <= 1e-6
    for undo in reversed(undos):
        undo()
