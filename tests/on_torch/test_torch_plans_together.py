"""Plans with what else training does: precision, accumulation, extra inputs, odd graphs."""

import gc
import itertools
import warnings

import pytest
import torch
from planned import WIDTH, Attention, Chained, Convolution, Line, Mlp, equal, every, mean_square
from planned import result as results
from torch import nn
from torch.nn import functional

import xmem
from xmem.planner import parse_ops
from xmem.playing import script
from xmem.records import HEAD, REST, TAIL, Recompute

FOUR = "N0 N1 Da1 G2.0 Da2 N3 L Da4 G3.0 B3 N0 N1 Da1 B2 Da2 N0 G1.0 B1 Da1 G0.0 B0"
KEPT = "G0.0 G1.0 G2.0 G3.0 L B3 B2 B1 B0"
PLANS = (FOUR, KEPT, every(4))


def four():
    torch.manual_seed(1)
    return [Mlp(), Convolution(), Attention(), Line()]


def batch(seed=2):
    return torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


def check(plans, stages, train, ops=PLANS, x=None, model=Chained):
    """Hold a way of training with each plan to the same without, bit by bit."""
    for one in ops:
        plain, planned = model(plans, stages), model(plans, stages, one)
        x = batch() if x is None else x
        assert equal(results(plain, train, x), results(planned, train, x)), one


class Functions(Chained):
    """Calls what `calls` says: a list of (function, what makes its inputs of what came before)."""

    def forward(self, x):
        found, run = [x], None
        if self.script is not None and torch.is_grad_enabled():
            run = self.run = self.plans.open(
                self.script, [f"s{i}" for i in range(4)], self.how, traced=False
            )
        for i, stage in enumerate(self.stages):
            args, kwargs = self.inputs(i, found)
            made = run.first(i, stage, args, kwargs) if run else stage(*args, **kwargs)
            found.append(made)
        return found[-1]

    def inputs(self, i, found):
        return (found[-1],), {}


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, ids):
        return self.table(ids)


def test_a_batch_of_integers_needs_no_gradient(backend):
    torch.manual_seed(1)
    stages = [Embedded(), Mlp(), Attention(), Line()]
    check(backend.plans, stages, mean_square, x=torch.randint(0, 10, (3, 6)))


@pytest.mark.parametrize("ops", PLANS)
def test_the_batch_gets_its_gradient(backend, ops):
    stages, x = four(), batch().requires_grad_()
    found = []
    for one in (None, ops):
        x.grad = None
        found.append([*results(Chained(backend.plans, stages, one), mean_square, x), x.grad])
    assert equal(*found)


@pytest.mark.parametrize("ops", PLANS)
def test_gradients_are_asked_for_by_name(backend, ops):
    stages = four()
    found = []
    for one in (None, ops):
        torch.manual_seed(3)
        model = Chained(backend.plans, stages, one)
        wanted = [p for n, p in model.named_parameters() if "weight" in n][::2]
        found.append(torch.autograd.grad(mean_square(model, batch()), wanted))
    assert equal(*found)


@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1, 2), (3,), (0, 1, 3)])
def test_frozen_stages_have_no_gradient(backend, frozen):
    stages = four()
    for i in frozen:
        stages[i].requires_grad_(requires_grad=False)
    check(backend.plans, stages, mean_square)


def test_torch_autocast_is_replayed(backend):
    def train(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    check(backend.plans, four(), train)


def test_xmem_autocast_is_replayed(backend):
    def train(model, x):
        with xmem.autocast("bfloat16", keep_fp32=("softmax",)):
            return model(x).float().square().mean()

    check(backend.plans, four(), train)


def test_gradients_accumulate_over_micro_batches(backend):
    def train(model, x):
        for part in (0, 1):
            mean_square(model, batch(part)).backward()
        return mean_square(model, x)

    check(backend.plans, four(), train)


def test_two_forwards_share_one_backward(backend):
    check(backend.plans, four(), lambda m, x: m(x).square().mean() + m(x * 2).abs().mean())


def test_two_forwards_have_their_backwards_in_either_order(backend):
    for order in (0, 1):

        def train(model, x, order=order):
            losses = [mean_square(model, x), mean_square(model, x * 2)]
            losses.pop(order).backward()
            return losses[0]

        check(backend.plans, four(), train)


def test_a_scaler_steps(backend):
    found = []
    for ops in (None, *PLANS):
        stages = four()
        model = Chained(backend.plans, stages, ops)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
        for _ in range(3):
            torch.manual_seed(5)
            optimizer.zero_grad()
            scaler.scale(mean_square(model, batch())).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append([p.detach() for p in model.parameters()])
    assert all(equal(found[0], other) for other in found[1:])


def test_one_module_is_two_stages(backend):
    torch.manual_seed(1)
    mlp, line = Mlp(), Line()
    check(backend.plans, [mlp, line, mlp, line], mean_square)


class Gated(nn.Module):
    """Has two inputs beside the value before it."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, gate, *, shift):
        return self.line(x) * torch.sigmoid(gate) + shift.tanh()


def test_gradients_of_extra_inputs_flow(backend):
    class Model(Functions):
        def inputs(self, i, found):
            return (found[-1], self.gate * 2), {"shift": self.shift}

    torch.manual_seed(1)
    stages = [Gated() for _ in range(4)]
    gate, shift = torch.randn(WIDTH).requires_grad_(), nn.Parameter(torch.randn(WIDTH))
    Model.gate, Model.shift = gate, shift
    for ops in PLANS:
        found = []
        for one in (None, ops):
            gate.grad = shift.grad = None
            model = Model(backend.plans, stages, one)
            found.append([*results(model, mean_square, batch()), gate.grad, shift.grad])
        assert equal(*found)


class Merging(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, skip):
        return self.line(torch.cat([x, skip], -1)).relu()


def test_a_stage_reads_an_output_before_the_last(backend):
    class Model(Functions):
        def inputs(self, i, found):
            return ((found[-1], found[1]) if i == 3 else (found[-1],)), {}

    torch.manual_seed(1)
    stages = [Mlp(), Convolution(), Line(), Merging()]
    check(backend.plans, stages, mean_square, model=Model)
    model = Model(backend.plans, stages, FOUR)
    mean_square(model, batch())
    assert model.run.reads == [(1, 3)]
    assert model.run.value_bytes == [3 * 6 * WIDTH * 4] * 5


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, given):
        x = given["x"] if isinstance(given, dict) else given
        a, b = self.line(x).chunk(2, -1)
        return {"x": a.tanh(), "rest": [b, x]}


class Joined(nn.Module):
    def forward(self, given):
        return given["x"] * given["rest"][0].sigmoid() + given["rest"][1]


def test_a_value_may_be_several_tensors(backend):
    torch.manual_seed(1)
    check(backend.plans, [Pair(), Pair(), Joined(), Line()], mean_square)


def test_what_a_model_does_between_stages_is_its_own(backend):
    class Model(Functions):
        def inputs(self, i, found):
            x = found[-1]
            if i == 1:
                x = x.view(9, 2, WIDTH)  # a view of the value
            if i == 2:
                x = x.view(3, 6, WIDTH)
                x += 1  # in place
            if i == 3:
                x = x * 2 + found[0]
            return (x,), {}

    torch.manual_seed(1)
    check(backend.plans, [Line(), nn.GELU(), Line(), Mlp()], mean_square, model=Model)


@pytest.mark.parametrize("ops", PLANS)
def test_losses_on_values_in_between(backend, ops):
    class Model(Functions):
        def inputs(self, i, found):
            self.middle = found[2] if i == 3 else None
            return (found[-1],), {}

    def together(model, x):
        return model(x).square().mean() + model.middle.abs().mean()

    def one_by_one(model, x):
        loss = model(x).square().mean()
        model.middle.abs().mean().backward(retain_graph=True)
        return loss

    def the_last_first(model, x):
        model(x).square().mean().backward(retain_graph=True)
        return model.middle.abs().mean()

    for train in (together, one_by_one, the_last_first):
        check(backend.plans, four(), train, [ops], model=Model)


@pytest.mark.parametrize("ops", PLANS)
def test_a_graph_is_gone_through_twice(backend, ops):
    def train(model, x):
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return loss

    check(backend.plans, four(), train, [ops])


@pytest.mark.parametrize("ops", PLANS)
def test_a_graph_that_was_not_retained_says_so(backend, ops):
    loss = mean_square(Chained(backend.plans, four(), ops), batch())
    loss.backward()
    with pytest.raises((xmem.CompositionError, RuntimeError), match="retain_graph=True"):
        loss.backward()


@pytest.mark.parametrize("ops", PLANS)
def test_gradients_have_gradients(backend, ops):
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]

    def train(model, x):
        loss = mean_square(model, x)
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in found)

    plain, planned = (
        results(Chained(backend.plans, stages, one), train, batch()) for one in (None, ops)
    )
    for a, b in zip(plain, planned, strict=True):
        torch.testing.assert_close(a, b)


def test_a_forward_that_ends_early_is_warned_of(backend):
    class Model(Functions):
        def forward(self, x):
            self.run = self.plans.open(self.script, ["s"] * 4, self.how, traced=False)
            for i, stage in enumerate(self.stages[:3]):
                x = self.run.first(i, stage, (x,), {})
            return x

    plain = results(Chained(backend.plans, four()[:3]), mean_square, batch())
    for ops in PLANS:
        with pytest.warns(xmem.XmemWarning, match="3 of 4"):
            planned = results(Model(backend.plans, four(), ops), mean_square, batch())
        count = len(list(nn.ModuleList(four()[:3]).parameters())) + 1
        assert equal(plain[:count], planned[:count])


def test_a_parameter_changed_before_backward_is_an_error(backend):
    for ops in PLANS:
        stages = four()
        loss = mean_square(Chained(backend.plans, stages, ops), batch())
        with torch.no_grad():
            stages[2].heads.in_proj_weight.add_(1)
        with pytest.raises(xmem.RecomputeMismatchError, match="changed in place"):
            loss.backward()


def test_a_stage_that_changes_its_input_is_an_error(backend):
    class Hungry(nn.Module):
        def forward(self, x):
            return x.add_(1).tanh()

    model = Chained(backend.plans, [Mlp(), Hungry(), Line(), Line()], FOUR)
    with pytest.raises(xmem.CompositionError, match=r"stages.1 changes its input tensor 0"):
        model(batch())


def test_other_values_are_found(backend):
    how = Recompute(preserve_rng=False, check_values=True)
    model = Chained(backend.plans, four(), FOUR, how)
    with pytest.raises(xmem.RecomputeMismatchError, match="other values") as caught:
        mean_square(model, batch()).backward()
    assert caught.value.cause == "randomness"
    check(backend.plans, four(), mean_square, x=batch())


def test_a_stage_that_does_otherwise_the_second_time_is_an_error(backend):
    class Moody(nn.Module):
        calls = 0

        def forward(self, x):
            Moody.calls += 1
            return x.tanh().sin() if Moody.calls == 1 else x.tanh()

    model = Chained(backend.plans, [Mlp(), Moody(), Line(), Line()], every(4))
    with pytest.raises(xmem.RecomputeMismatchError, match=r"stages.1.*saves 1 tensors.* 2"):
        mean_square(model, batch()).backward()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return functional.rrelu(self.line(x), training=True)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[1], (gradient * ctx.saved_tensors[0]).sum((0, 1))


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Own.apply(x.sin(), self.scale)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        return xmem.checkpoint(self.inner, x).tanh()


@pytest.mark.parametrize("kind", [Noisy, Owner, Nested])
def test_what_is_odd_inside_of_a_stage(backend, kind):
    torch.manual_seed(1)
    check(backend.plans, [Mlp(), kind(), Line(), kind()], mean_square)


def test_a_normed_weight_is_that_of_the_first_pass(backend):
    torch.manual_seed(1)

    def spectral():
        return torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    check(backend.plans, [Mlp(), spectral(), Line(), spectral()], mean_square)


def test_weights_may_be_others_for_one_call(backend):
    stages = four()
    model, planned = Chained(backend.plans, stages), Chained(backend.plans, stages, FOUR)
    found = []
    for one in (model, planned):
        torch.manual_seed(4)
        leaves = {n: p.detach().mul(2).requires_grad_() for n, p in one.named_parameters()}
        output = torch.func.functional_call(one, leaves, (batch(),))
        found.append(torch.autograd.grad(output.square().mean(), list(leaves.values())))
    assert equal(*found)


class Force(nn.Module):
    def forward(self, x):
        x = x if x.requires_grad else x.requires_grad_()
        [force] = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return x + force


def test_a_stage_that_differentiates_inside_must_be_kept(backend):
    stages = [Mlp(), Force(), Line(), Line()]
    check(backend.plans, stages, mean_square, [KEPT])
    with pytest.raises(xmem.CompositionError, match="differentiates inside"):
        Chained(backend.plans, stages, FOUR)(batch())


def test_without_gradients_nothing_is_recorded(backend):
    with torch.no_grad():
        assert not backend.plans.recording()
    assert backend.plans.recording()


def test_stages_are_called_in_order(backend):
    run = backend.plans.open(script(parse_ops(KEPT), 4), list("abcd"), Recompute(), traced=False)
    with pytest.raises(xmem.CompositionError, match="'b' is called as number 0"):
        run.first(1, Mlp(), (batch(),), {})


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


def test_a_forward_that_fails_leaves_nothing(backend):
    class Failing(Line):
        fails = True

        def forward(self, x):
            y = super().forward(x)
            if self.fails:
                raise ArithmeticError
            return y

    torch.manual_seed(1)
    stages = [Mlp(), Convolution(), Failing(), Line()]
    for ops in PLANS:
        model = Chained(backend.plans, stages, ops)
        gc.collect()
        before_bytes = backend.measure.counters().allocated_bytes
        with pytest.raises(ArithmeticError):
            model(batch())
        model.run = None
        gc.collect()
        assert backend.measure.counters().allocated_bytes == before_bytes
    stages[2].fails = False
    check(backend.plans, stages, mean_square)


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
