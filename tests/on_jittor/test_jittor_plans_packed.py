"""Plans that pack what stages keep: bytes as predicted, gradients off by the rounding alone."""

import functools
import itertools
import random
from dataclasses import replace

import numpy as np
import plan_runs
import pytest
from chain import normal
from plan_runs import counts, distances, drawn, live, loss_of, measured_peak, mixed, planned

import xmem
from xmem.conformance.small import relative_error
from xmem.planner import Op, parse_ops
from xmem.planner.plan import Plan
from xmem.planning import whole_bytes
from xmem.playing import script
from xmem.stage_options import packed_option
from xmem.steps import every

WIDTH, DEPTH = 64, 6


def block(width=WIDTH):
    from jittor import nn

    class Block(nn.Module):
        def __init__(self):
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)
            self.dropout = nn.Dropout(0.1, is_train=True)

        def execute(self, x):
            return x + self.dropout(self.down(nn.relu(self.up(self.norm(x)))))

    return Block()


def loss_fn(model, batch):
    return ((model(batch) - batch) ** 2).mean()


@pytest.fixture
def model(backend):
    from jittor import nn

    return nn.Sequential(*(block() for _ in range(DEPTH)))


@pytest.fixture
def batch(backend):
    return normal(1024, WIDTH)


def gradients(backend, model, batch, loss=loss_fn):
    import jittor as jt

    jt.set_global_seed(1)
    return backend.plans.step(model, batch, loss, gradients=True).gradients


def packed_plan(bits, ops=None, stages=DEPTH):
    """Return a plan that keeps every stage packed and, without `ops`, runs none twice."""
    if ops is None:
        ops = [Op("G", i, 1) for i in range(stages)]
        ops += [Op("G", stages), Op("L"), Op("B", stages)]
        ops += [Op("B", i) for i in reversed(range(stages))]
    options = ("keep all", packed_option(bits))
    return Plan(
        chain_name="drawn",
        budget_bytes=0,
        ops=tuple(ops),
        seconds=1.0,
        peak_bytes=1,
        store_all_seconds=1.0,
        bound_seconds=1.0,
        gap=0.0,
        options=(packed_option(bits),) * stages + ("keep all",),
        option_names=(options,) * stages + (("keep all",),),
        stage_names=(*map(str, range(stages)), "(loss)"),
        store_all_peak_bytes=1,
    )


def applied(plan, backend, model, batch, loss=loss_fn):
    receipt = plan.apply(model)
    try:
        return gradients(backend, model, batch, loss)
    finally:
        receipt.undo()


@pytest.fixture(scope="module")
def profile(backend):
    import jittor as jt
    from jittor import nn

    jt.set_global_seed(0)
    model = nn.Sequential(*(block() for _ in range(DEPTH)))
    return xmem.profile(model, normal(1024, WIDTH), loss_fn, compress=(8, 4))


def test_a_profile_has_an_option_for_each_number_of_bits(profile):
    for stage in profile.stages[:-1]:
        whole, eight, four = stage.options
        assert [o.name for o in stage.options] == ["keep all", "8 bits", "4 bits"]
        print(whole.kept_bytes, eight.kept_bytes, four.kept_bytes)
        assert four.kept_bytes < eight.kept_bytes < 0.35 * whole.kept_bytes


def with_packing_for_free(profile):
    """Return a profile whose packed stages take the time of others, so that plans pack."""
    stages = []
    for stage in profile.stages:
        whole = stage.options[0]
        times = {
            "forward_seconds": whole.forward_seconds,
            "backward_seconds": whole.backward_seconds,
        }
        options = tuple(replace(option, **times) for option in stage.options)
        stages.append(replace(stage, options=options))
    return replace(profile, stages=tuple(stages))


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_a_packed_plan_keeps_to_its_bytes(profile, share):
    profile = with_packing_for_free(profile)
    plan = xmem.plan(profile, budget=int(share * whole_bytes(profile)))
    assert any(option != "keep all" for option in plan.options)
    assert plan.verified.measured_peak_bytes == plan.verified.predicted_peak_bytes


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.15), (2, 0.6)])
def test_gradients_are_off_by_the_rounding(backend, model, batch, bits, most):
    exact = gradients(backend, model, batch)
    found = applied(packed_plan(bits), backend, model, batch)
    assert 1e-5 < relative_error(found, exact) < most


def test_two_steps_round_otherwise(backend, model, batch):
    first, second = (applied(packed_plan(4), backend, model, batch) for _ in range(2))
    assert relative_error(first, second) > 1e-4


def test_parameters_and_inputs_are_not_packed(backend, batch):
    from jittor import nn

    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    exact = gradients(backend, layer, batch)
    profile = xmem.profile(layer, batch, loss_fn, compress=(8,), stages=["0", "1"])
    assert all(len(stage.options) == 1 for stage in profile.stages)
    found = applied(packed_plan(8, stages=2), backend, layer, batch)
    assert relative_error(found, exact) < 1e-6


def test_small_tensors_are_not_packed(backend, model):
    x = normal(32, WIDTH)
    found = applied(packed_plan(2), backend, model, x)
    assert relative_error(found, gradients(backend, model, x)) < 1e-5


def test_a_packed_stage_that_is_run_again_is_packed_again(backend, model, batch):
    exact = gradients(backend, model, batch)
    found = applied(packed_plan(8, every(DEPTH, 1)), backend, model, batch)
    assert 1e-5 < relative_error(found, exact) < 0.01


def test_a_plan_gives_all_back_after_each_step(backend, model, batch):
    gradients(backend, model, batch)
    before = live(backend)
    receipt = packed_plan(8).apply(model)
    for _ in range(10):
        gradients(backend, model, batch)
        assert live(backend) == before
    receipt.undo()


def test_a_value_that_is_looked_at_before_backward_changes_nothing(backend, model, batch):
    def looking(model, batch):
        loss = loss_fn(model, batch)
        assert np.isfinite(loss.item())
        return loss

    exact = gradients(backend, model, batch)
    found = applied(packed_plan(8), backend, model, batch, looking)
    assert 1e-5 < relative_error(found, exact) < 0.01


def test_what_a_stage_leaves_on_its_module_can_be_read(backend, batch):
    """It is not taken away, although backward reads it."""
    from jittor import nn

    class Leaving(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.left = None

        def execute(self, x):
            self.left = self.layer(x)
            return jt.exp(self.left * 0.1)

    import jittor as jt

    net = nn.Sequential(Leaving(), Leaving())
    expected = [v.numpy() for v in (net[0].layer(batch), net[1].layer(net[0](batch)))]
    receipt = packed_plan(8, stages=2).apply(net)
    loss = loss_fn(net, batch)
    found = jt.grad(loss, net.parameters())
    jt.sync([loss, *found])
    receipt.undo()
    for layer, value in zip(net, expected, strict=True):
        assert np.abs(layer.left.numpy() - value).max() < 1e-5


def attention():
    import jittor as jt
    from jittor import nn

    class Attention(nn.Module):
        def __init__(self):
            self.into = nn.Linear(WIDTH, 3 * WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def execute(self, x):
            q, k, v = jt.chunk(self.into(x), 3, dim=-1)
            weights = nn.softmax(jt.matmul(q, k.transpose(0, 2, 1)) * 0.125, dim=-1)
            return x + self.out(jt.matmul(weights, v))

    return Attention()


def test_attention_is_packed_too(backend):
    from jittor import nn

    x = normal(4, 128, WIDTH)
    net = nn.Sequential(*(attention() for _ in range(3)))
    profile = xmem.profile(net, x, loss_fn, compress=(8,), stages=["0", "1", "2"])
    for stage in profile.stages[:-1]:
        whole, packed = (option.kept_bytes for option in stage.options)
        made = profile.value_bytes[1]
        print(whole, packed, made)
        assert packed - made < 0.3 * (whole - made)
    exact = gradients(backend, net, x)
    found = applied(packed_plan(8, stages=3), backend, net, x)
    assert 1e-5 < relative_error(found, exact) < 0.01


def test_a_packed_stage_leaves_nothing_once_it_is_differentiated(backend, monkeypatch):
    """Softmax keeps a handle of what it has given back; a recipe, of what it has made last."""
    from jittor import nn

    options = [("keep all", packed_option(8))] * 4
    monkeypatch.setattr(plan_runs, "script", functools.partial(script, options=options))
    stages = [nn.Sequential(attention(), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model, x = planned(backend.plans, stages), normal(4, 128, WIDTH)
    model.ops = parse_ops("N0 N1 N2 N3 L G3.1 B3 Da3 G2.1 B2 Da2 G1.1 B1 Da1 G0.1 B0")
    model.traced = True
    for _ in range(2):
        backend.plans.step(model, x, loss_fn)
    marks = [m for m in model.run.marks() if m.op >= 0 and model.ops[m.op].code == "B"]
    left = [m.after_bytes - m.gradient_bytes for m in marks]
    assert [a - b for a, b in itertools.pairwise(left[:-1])] == [x.nbytes] * 2, left


def test_what_pooling_compares_is_kept_as_it_is(backend):
    """Its backward looks for the place of the maximum: of rounded values it finds none."""
    from jittor import nn

    def stage():
        return nn.Sequential(nn.Conv(8, 8, 3, padding=1), nn.BatchNorm(8), nn.Pool(2), nn.ReLU())

    x = normal(16, 8, 32, 32)
    net = nn.Sequential(stage(), stage())
    exact = gradients(backend, net, x, loss_of)
    found = applied(packed_plan(8, stages=2), backend, net, x, loss_of)
    assert relative_error(found, exact) < 0.01


@pytest.fixture(scope="module", params=[4, 8])
def chain(backend, request):
    """Return stages of every kind, their batch, and their plain gradients."""
    import jittor as jt

    jt.set_global_seed(0)
    np.random.seed(0)
    n = request.param
    stages, x = mixed(n, batch=128)
    model = planned(backend.plans, stages)
    return n, model, x, gradients(backend, model, x, loss_of)


def with_options(ops, rand):
    """Pack some of what is kept."""
    return tuple(Op("G", op.index, rand.choice([0, 1, 1])) if op.code == "G" else op for op in ops)


@pytest.mark.parametrize("seed", range(3))
def test_any_packed_schedule_runs_what_it_says(backend, chain, monkeypatch, seed):
    """Kept without their inputs, too, dropped again, run several times; statistics move once."""
    n, model, x, exact = chain
    options = [("keep all", packed_option(8))] * n
    monkeypatch.setattr(plan_runs, "script", functools.partial(script, options=options))
    rand = random.Random(seed)
    model.ops = with_options(drawn(rand, n), rand)
    found = gradients(backend, model, x, loss_of)
    forwards, ops = model.run.forwards, model.ops
    model.ops = None
    assert forwards == counts(ops, n)
    assert max(distances(found, exact).values()) < 0.03, ops


def test_running_statistics_move_once(backend, monkeypatch):
    """In three passes over each stage, two of which are packed."""
    import jittor as jt

    found = []
    for passes, option in (("N0 N1 L G1.0 B1", 0), ("G0.1 Ds0 N0 G1.1 Ds1 L G1.1 B1", 1)):
        jt.set_global_seed(0)
        np.random.seed(0)
        stages, x = mixed(8, batch=64)
        model = planned(backend.plans, stages[:2])
        model.ops = tuple(parse_ops(f"{passes} Da1 G0.{option} B0"))
        options = [("keep all", packed_option(8))] * 2
        monkeypatch.setattr(plan_runs, "script", functools.partial(script, options=options))
        loss = loss_of(model, x)
        trained = [p for p in model.parameters() if not p.is_stop_grad()]
        jt.sync([loss, *jt.grad(loss, trained)])
        found.append([p.numpy() for p in model.parameters() if p.is_stop_grad()])
    assert found[0]
    for before, after in zip(*found, strict=True):
        assert np.abs(before).max() > 1e-4
        assert np.abs(before - after).max() < 1e-6


def test_dropping_a_packed_stage_frees_its_bytes(backend, monkeypatch):
    """A stage that is packed, dropped and packed again takes no more than one that is run twice."""
    options = [("keep all", packed_option(8))] * 4
    monkeypatch.setattr(plan_runs, "script", functools.partial(script, options=options))
    model = planned(backend.plans, [block() for _ in range(4)])
    x = normal(1024, WIDTH)
    peaks = []
    tail = "L B3 Da3 G2.1 B2 Da2 G1.1 B1 Da1 G0.1 B0"
    for sweep in ("N0 N1 N2 G3.1", "G0.1 N0 Ds0 N1 N2 G3.1"):
        model.ops, model.traced = tuple(parse_ops(f"{sweep} {tail}")), True
        for _ in range(2):
            backend.plans.step(model, x, loss_fn)
        peaks.append(measured_peak(model.run))
    assert peaks[0] == peaks[1]
