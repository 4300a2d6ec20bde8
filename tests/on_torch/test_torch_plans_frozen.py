"""Stages that no gradient comes to: frozen, without parameters, cut off by detach."""

import itertools
import weakref

import pytest
import torch
from planned import (
    FOUR,
    KEPT,
    PLANS,
    Chained,
    Line,
    Mlp,
    Same,
    batch,
    check,
    every,
    four,
    mean_square,
)
from torch import nn

import xmem
from xmem.records import HEAD, REST, TAIL


class Cut(nn.Module):
    def forward(self, x):
        return x.detach()


class Frozen(Line):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


def stages(kind):
    torch.manual_seed(1)
    return {
        "frozen": lambda: [Frozen(), Frozen(), Mlp(), Line()],
        "without parameters": lambda: [Same(), nn.Flatten(2), Mlp(), Line()],
        "cut off": lambda: [Mlp(), Cut(), Mlp(), Line()],
        "a frozen one between": lambda: [Mlp(), Frozen(), Mlp(), Line()],
        "cut off at the end": lambda: [Mlp(), Mlp(), Line(), Cut()],
    }[kind]()


DIFFERENTIATED = {
    "frozen": [False, False, True, True],
    "without parameters": [False, False, True, True],
    "cut off": [False, False, True, True],
    "a frozen one between": [True] * 4,
}


@pytest.mark.parametrize("ops", PLANS)
@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_all_operations_are_marked_and_stages_without_backward_are_known(backend, kind, ops):
    model = Chained(backend.plans, stages(kind), ops, traced=True)
    step = backend.plans.step(model, batch(), mean_square)
    marks, script = model.run.marks(), model.script
    worked = [k for k, op in enumerate(script.ops) if op.code in ("N", "G", "B")]
    before = [k for k in worked if k < script.loss]
    assert [m.op for m in marks] == [HEAD, *before, TAIL, *worked[len(before) :], REST]
    assert max(m.peak_bytes for m in marks) == step.peak_bytes
    assert all(a.after_bytes >= b.before_bytes for a, b in itertools.pairwise(marks))
    assert model.run.differentiated == DIFFERENTIATED[kind]
    grown = [m.gradient_bytes for m in marks]
    assert grown == sorted(grown)
    without = [i for i, came in enumerate(model.run.differentiated) if not came]
    left_out = {k for i in without for k in (*script.back[i], script.backward[i])}
    for mark in marks:
        if mark.op in left_out:
            assert mark.before_bytes == mark.peak_bytes == mark.after_bytes
            assert mark.gradient_bytes == step.gradient_bytes
            assert mark.seconds == 0


@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_the_others_are_trained_as_they_would_be(backend, kind):
    check(backend.plans, stages(kind), mean_square)


def test_a_loss_that_no_stage_enters_has_marks(backend):
    other = nn.Parameter(torch.ones(3))
    model = Chained(backend.plans, stages("cut off at the end"), FOUR, traced=True)
    backend.plans.step(model, batch(), lambda m, b: m(b).mean() + other.sum())
    marks = model.run.marks()
    assert marks[0].op == HEAD
    assert len({m.op for m in marks}) == len(marks)
    assert not any(model.run.differentiated)


def test_no_step_no_marks(backend):
    model = Chained(backend.plans, four(), KEPT)
    mean_square(model, batch()).backward()
    assert model.run.marks() == []


@pytest.mark.parametrize("ops", PLANS)
@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_a_run_says_whether_its_latest_output_holds_it(backend, kind, ops):
    made = []

    class Telling(Chained):
        def forward(self, x):
            run = self.plans.open(self.script, list("abcd"), self.how, traced=False)
            for i, stage in enumerate(self.stages):
                x = run.first(i, stage, (x,), {})
                made.append((run.holds, x.grad_fn is not None))
            alive = weakref.ref(run)
            del run
            assert alive() is not None  # the graph behind the output
            return x

    Telling(backend.plans, stages(kind), ops)(batch())
    assert [holds for holds, _ in made] == [held for _, held in made]
    assert made[-1] == (True, True)


class Net(nn.Module):
    """Chained, as users write it."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("how", ["auto", "modules"])
@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_a_model_with_such_stages_is_profiled(kind, how):
    xmem.use("torch", device="cpu")
    model = Net([*stages(kind), Mlp(), Mlp()])
    profile = xmem.profile(model, batch(), mean_square, repeats=1, stages=how)
    assert all(s.options[0].backward_seconds >= 0 for s in profile.stages)


@pytest.mark.parametrize("ops", [every(4)])
def test_what_is_not_differentiated_is_let_go_with_the_loss(backend, ops):
    before_bytes = None
    for _ in range(3):
        model = Chained(backend.plans, stages("frozen"), ops)
        mean_square(model, batch()).backward()
        model.run = None
        del model
        now = backend.measure.counters().allocated_bytes
        assert before_bytes in (None, now)
        before_bytes = now
