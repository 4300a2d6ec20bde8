"""Training within a budget, from the profile to trained models, as users write it."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

import xmem
from xmem.planner import parse_ops, solve

jittor_backend = xmem.use("jittor", device="cpu")

import jittor as jt  # noqa: E402
from jittor import nn  # noqa: E402

LAYERS = 6


class Block(nn.Module):
    def __init__(self, width):
        self.conv = nn.Conv(width, width, 3, padding=1)
        self.norm = nn.BatchNorm(width)
        self.drop = nn.Dropout(0.2)

    def execute(self, x):
        return x + self.drop(nn.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    """Blocks in a loop, with glue around them."""

    def __init__(self):
        self.stem = nn.Conv(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList([Block(16) for _ in range(LAYERS)])
        self.head = nn.Linear(16, 5)

    def execute(self, x):
        x = nn.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def loss_fn(model, batch):
    return nn.cross_entropy_loss(model(batch[0]), batch[1])


def made():
    xmem.use("jittor", device="cpu")
    jt.set_global_seed(0)
    rand = np.random.default_rng(0)
    model = Net()
    batch = (
        jt.array(rand.standard_normal((8, 3, 16, 16)).astype("float32")),
        jt.array(rand.integers(0, 5, 8).astype("int32")),
    )
    jt.sync_all(True)
    return model, batch


def state(model):
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def trained(model, batch, steps=3):
    optimizer = jt.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        loss = loss_fn(model, batch)
        optimizer.step(loss)
        losses.append(float(loss.item()))
    return losses, state(model)


def without_dropout(model):
    for block in model.blocks:
        block.drop.is_train = False


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_planned_model_learns_the_same():
    plain, batch = made()
    without_dropout(plain)
    model, _ = made()
    without_dropout(model)
    plan = xmem.plan(model, batch, loss_fn, budget=0.5)
    assert plan.overhead > 0
    receipt = plan.apply(model)
    assert receipt.applied_to == LAYERS
    assert_same(trained(model, batch), trained(plain, batch))


def copies(model, way):
    """Return a copy; those of Jittor 1.3.11 ask for gradients of running statistics, too."""
    found = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    for own, p in zip(found.parameters(), model.parameters(), strict=True):
        if p.is_stop_grad():
            own.stop_grad()
    return found


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("how", ["planned", "checkpointed"])
def test_a_copy_and_a_pickle_train_the_same(how, way):
    model, batch = made()
    without_dropout(model)
    plain = copies(model, way)
    if how == "planned":
        receipt = xmem.plan(model, batch, loss_fn, budget=0.5).apply(model)
    else:
        receipt = xmem.apply_checkpointing(model, "every")
    twin = copies(model, way)
    before = state(model)
    peak = jittor_backend.plans.step(twin, batch, loss_fn).peak_bytes
    assert peak < jittor_backend.plans.step(plain, batch, loss_fn).peak_bytes
    found = trained(twin, batch)
    assert all(np.array_equal(value, before[name]) for name, value in state(model).items())
    expected = trained(plain, batch)
    for other in (found, trained(copies(model, way), batch), trained(model, batch)):
        assert_same(other, expected)
    receipt.undo()
    assert all("execute" not in vars(block) for block in model.blocks)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("first", ["linear", "block"])
def test_plans_are_exact_where_the_first_stage_reads_the_batch(first, share):
    """The batch of `jt.array` asks for gradients, and nobody for its."""
    from xmem.planning import least_bytes, whole_bytes

    jt.set_global_seed(0)
    made_of = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]
    model = nn.Sequential(*([nn.Linear(32, 32)] if first == "linear" else []), *made_of)
    for _ in range(3):
        model.append(copy.deepcopy(made_of[0]))
    batch = jt.array(np.random.default_rng(0).standard_normal((256, 32)).astype("float32"))
    profile = xmem.profile(model, batch, lambda model, x: (model(x) ** 2).mean(), repeats=1)
    assert all(stage.options[0].kept_bytes for stage in profile.stages[:-1])
    least, whole = least_bytes(profile), whole_bytes(profile)
    plan = xmem.plan(profile, budget=int(least + share * (whole - least)))
    assert plan.verified.error == 0


def test_profiling_and_planning_leave_no_trace():
    model, batch = made()
    before = state(model)
    jt.set_global_seed(5)
    expected = jt.rand(4).numpy()
    jt.set_global_seed(5)
    plan = xmem.plan(xmem.profile(model, batch, loss_fn), budget=0.5)
    assert plan.verified.measured_peak_bytes <= plan.budget_bytes
    assert np.array_equal(jt.rand(4).numpy(), expected)
    after = state(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert "execute" not in vars(model)
    assert all("execute" not in vars(block) for block in model.blocks)


def test_an_error_while_profiling_leaves_no_trace():
    model, batch = made()
    before, calls = state(model), []

    def breaks(model, batch):
        calls.append(0)
        loss = loss_fn(model, batch)
        if len(calls) == 3:
            raise RuntimeError("in the loss")
        return loss

    with pytest.raises(RuntimeError, match="in the loss"):
        xmem.profile(model, batch, breaks)
    after = state(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all("execute" not in vars(block) for block in model.blocks)


def test_the_peak_of_a_training_step_is_the_one_that_was_planned():
    model, batch = made()
    profile = xmem.profile(model, batch, loss_fn)
    plan = xmem.plan(profile, budget=0.5)
    plan.apply(model)
    for _ in range(3):
        step = jittor_backend.plans.step(model, batch, loss_fn)
    counted = step.peak_bytes - step.before_bytes + profile.batch_bytes
    most = plan.verified.measured_peak_bytes
    assert most * 0.98 <= counted <= most + step.gradient_bytes


def test_autocast_around_the_step_is_planned():
    def cast(model, batch):
        with xmem.autocast("float16"):
            return loss_fn(model, batch)

    model, batch = made()
    plan = xmem.plan(model, batch, cast, budget=0.6)
    assert abs(plan.verified.error) < 0.005
    plain = jittor_backend.plans.step(model, batch, cast, gradients=True)
    plan.apply(model)
    found = jittor_backend.plans.step(model, batch, cast, gradients=True)
    assert found.loss == pytest.approx(plain.loss, rel=1e-4)
    for name, gradient in plain.gradients.items():
        distance = np.linalg.norm(found.gradients[name] - gradient)
        assert distance <= 2e-3 * np.linalg.norm(gradient) + 1e-6, name


def resnet18():
    from xmem.workloads import make_batch, make_weights, workload

    xmem.use("jittor", device="cpu")
    chosen = workload("resnet18", "quick")
    models = jittor_backend.models
    model = models.build(chosen.model, make_weights(chosen))
    batch = tuple(map(models.tensor, make_batch(chosen, 0)))

    def loss_of(model, batch):
        return models.loss(chosen.loss, model(batch[0]), batch[1])

    return model, batch, loss_of


@pytest.mark.parametrize("again", ["G0.0 G1.0 B2 B1 B0", "G0.0 N1 B2 G1.0 B1 B0"])
def test_a_stage_whose_backward_compares_is_given_the_very_input(again):
    """Pooling looks for its output in its input: computed again, all after BatchNorm differs."""
    model, batch, loss_of = resnet18()
    plain = jittor_backend.plans.step(model, batch, loss_of, gradients=True)
    profile = xmem.profile(model, batch, loss_of, repeats=1)
    n = len(profile) - 1
    assert [s.name for s in profile.stages[1:3]] == ["relu", "pool"]
    kept = " ".join(f"G{i}.0" for i in range(3, n + 1))
    back = " ".join(f"B{i}" for i in reversed(range(3, n + 1)))
    ops = parse_ops(f"N0 N1 Da1 G2.0 Da2 {kept} L {back} {again}")
    plan = replace(solve(profile, 1 << 40), ops=ops)
    receipt = plan.apply(model)
    with pytest.warns(xmem.XmemWarning, match="without its input"):
        found = jittor_backend.plans.step(model, batch, loss_of, gradients=True)
    receipt.undo()
    for name, gradient in plain.gradients.items():
        distance = np.linalg.norm(found.gradients[name] - gradient)
        assert distance <= 1e-5 * np.linalg.norm(gradient), name


def test_plans_keep_no_stage_without_its_input():
    model, batch, loss_of = resnet18()
    profile = xmem.profile(model, batch, loss_of, repeats=1)
    assert not profile.keeps
    for share in (0.55, 0.65, 0.75):
        plan = xmem.plan(profile, budget=share)
        free = solve(profile, plan.budget_bytes, keeps=False)
        assert plan.seconds <= free.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_the_peak_of_a_plain_step_is_predicted_from_a_profile(name):
    from xmem.workloads import make_batch, make_weights, workload

    xmem.use("jittor", device="cpu")
    chosen = workload(name, "quick")
    models = jittor_backend.models
    model = models.build(chosen.model, make_weights(chosen))
    batch = tuple(map(models.tensor, make_batch(chosen, 0)))

    def loss_of(model, batch):
        return models.loss(chosen.loss, model(batch[0]), batch[1])

    found = xmem.predict(model, batch, loss_of)
    assert found.how == "profile"
    assert found.peak_allocated_bytes == found.static_bytes + found.peak_above_static_bytes
    for _ in range(2):
        step = jittor_backend.plans.step(model, batch, loss_of)
    measured = step.peak_bytes - step.before_bytes
    assert found.peak_above_static_bytes == pytest.approx(measured, rel=0.001)


def test_what_is_fused_across_stages_makes_the_prediction_an_upper_bound():
    model, batch = made()
    found = xmem.predict(model, batch, loss_fn)
    for _ in range(2):
        step = jittor_backend.plans.step(model, batch, loss_fn)
    measured = step.peak_bytes - step.before_bytes
    assert measured <= found.peak_above_static_bytes * 1.001
    assert found.peak_above_static_bytes < 1.3 * measured


def test_updates_are_not_predicted():
    model, batch = made()
    optimizer = jt.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(xmem.CapabilityError, match="optimizer"):
        xmem.predict(model, batch, loss_fn, optimizer=optimizer)
