"""Steps under plans: what they leave, and the marks of their operations."""

import gc
import itertools
import warnings

import pytest
import torch
from planned import FOUR, KEPT, PLANS, WIDTH, Chained, Line, batch, check, equal, four, mean_square
from planned import result as results
from torch import nn

import xmem
from xmem.planner import parse_ops
from xmem.playing import script
from xmem.records import HEAD, REST, TAIL, Recompute


def test_without_gradients_nothing_is_recorded(backend):
    with torch.no_grad():
        assert not backend.plans.recording()
    assert backend.plans.recording()


@pytest.mark.parametrize("ops", [*PLANS, None])
@pytest.mark.parametrize("kind", ["backward", "dropped", "retained", "traced"])
def test_nothing_is_left(backend, ops, kind):
    model, x = Chained(backend.plans, four(), ops), batch()
    model.traced = kind == "traced"

    def step():
        loss = mean_square(model, x)
        if kind != "dropped":
            loss.backward(retain_graph=kind == "retained")
        del loss
        model.run = None

    gc.collect()
    gc.disable()  # cycles would be found
    try:
        for _ in range(3):
            step()
        before_bytes = backend.measure.counters().allocated_bytes
        for _ in range(50 if kind == "backward" else 10):
            step()
        after_bytes = backend.measure.counters().allocated_bytes
    finally:
        gc.enable()
    assert before_bytes == after_bytes


def test_a_step_leaves_no_trace(backend):
    stages, x = four(), batch()
    model = Chained(backend.plans, stages)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    step = backend.plans.step(model, x, mean_square, gradients=True)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    torch.manual_seed(7)
    loss, *gradients = results(model, mean_square, x, seed=7)
    assert step.loss == loss.item()
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=False):
        assert (step.gradients[name] == gradient.numpy()).all()
    assert step.gradient_bytes == sum(p.nbytes for p in model.parameters())
    assert step.peak_bytes > step.before_bytes + step.gradient_bytes


def test_marks_do_not_change_the_peak_of_a_step(backend):
    steps = [
        backend.plans.step(Chained(backend.plans, four(), FOUR, traced=on), batch(), mean_square)
        for on in (False, True, False, True)
    ]
    assert len({step.peak_bytes - step.before_bytes for step in steps[1:]}) == 1


def test_a_plan_that_is_followed_warns_of_nothing(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(backend.plans, four(), mean_square)


class Around(nn.Module):
    """A planned chain between an embedding and a head."""

    def __init__(self, chain):
        super().__init__()
        self.table, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 2)
        self.chain = chain

    def forward(self, ids):
        return self.head(self.chain(self.table(ids)))


def test_marks_tile_the_step(backend):
    torch.manual_seed(1)
    model = Around(Chained(backend.plans, four(), FOUR, traced=True))
    step = backend.plans.step(model, torch.randint(0, 10, (3, 6)), mean_square)
    marks = model.chain.run.marks()
    ops = model.chain.script.ops
    worked = [k for k, op in enumerate(ops) if op.code in ("N", "G", "B")]
    tail = next(k for k, op in enumerate(ops) if op.code == "L")
    before = [k for k in worked if k < tail]
    assert [m.op for m in marks] == [HEAD, *before, TAIL, *worked[len(before) :], REST]
    assert marks[0].before_bytes == step.before_bytes
    assert max(m.peak_bytes for m in marks) == step.peak_bytes
    assert all(m.peak_bytes >= max(m.before_bytes, m.after_bytes) for m in marks)
    assert all(a.after_bytes >= b.before_bytes for a, b in itertools.pairwise(marks))
    grown = [m.gradient_bytes for m in marks]
    assert grown == sorted(grown)
    assert grown[-1] == step.gradient_bytes - model.table.weight.nbytes


def test_the_last_backward_ends_with_backward_where_nothing_comes_before_it(backend):
    model = Chained(backend.plans, four(), KEPT, traced=True)
    step = backend.plans.step(model, batch(), mean_square)
    *_, last, rest = model.run.marks()
    assert (last.op, rest.op) == (model.script.backward[0], REST)
    assert rest.gradient_bytes == step.gradient_bytes
    assert last.after_bytes == rest.before_bytes


def test_a_forward_aside_leaves_no_trace(backend):
    model = Chained(backend.plans, four(), KEPT)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    expected = torch.get_rng_state()
    backend.plans.forward_aside(model, batch(), mean_square)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), expected)
    assert model.run is None


def test_masters_get_their_gradients_back(backend):
    torch.manual_seed(1)
    model = Chained(backend.plans, [Line(), Line()], "N0 N1 L Da2 G1.0 B1 Da1 G0.0 B0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    mean_square(model, batch().bfloat16()).backward()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad.clone() for p in held]
    step = backend.plans.step(model, batch().bfloat16(), mean_square, gradients=True)
    assert equal(before, [p.grad for p in held])
    assert len(step.gradients) == 4


def test_marks_need_a_source_that_can_be_read_in_backward(backend, monkeypatch):
    from xmem_torch import measure, plans

    for module in (measure, plans):
        monkeypatch.setattr(module, "find_compiler", lambda: None)
    without = plans.Plans("cpu")
    assert "marks" in without.gaps
    with (
        pytest.warns(xmem.XmemWarning, match="profiler"),
        pytest.raises(xmem.MeasurementError, match="Install g"),
    ):
        without.open(script(parse_ops(KEPT), 4), list("abcd"), Recompute(), traced=True)
