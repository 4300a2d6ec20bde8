"""Training within a budget, from the profile to trained models, as users write it."""

import copy
import io

import pytest
import torch

import xmem
from xmem.planner import Plan

LAYERS = 6


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = torch.nn.Conv2d(width, width, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(width)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Net(torch.nn.Module):
    """Blocks in a loop, with glue around them."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = torch.nn.ModuleList(Block(16) for _ in range(LAYERS))
        self.head = torch.nn.Linear(16, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Untraceable(Net):
    def forward(self, x):
        if x.abs().max() > 1e9:
            raise ValueError("too large")
        return super().forward(x)


def loss_fn(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def made(kind=Net):
    xmem.use("torch", device="cpu")
    torch.manual_seed(0)
    return kind(), (torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,)))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def trained(model, batch, steps=3, step=None):
    """Train; returns losses and all parameters and statistics."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        loss = step(model, batch) if step else loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, state(model)


@pytest.mark.parametrize(("kind", "traced"), [(Net, True), (Untraceable, False)])
def test_a_planned_model_learns_the_very_same(kind, traced):
    model, batch = made(kind)
    plain = copy.deepcopy(model)
    plan = xmem.plan(model, batch, loss_fn, budget=0.4)
    assert plan.traced is traced
    assert plan.overhead > 0
    receipt = plan.apply(model)
    assert receipt.technique == "plan"
    assert receipt.applied_to >= LAYERS
    found, expected = trained(model, batch), trained(plain, batch)
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


@pytest.mark.parametrize("kind", [Net, Untraceable])
def test_frozen_layers_are_planned_with_the_others(kind):
    model, batch = made(kind)
    for module in (model.stem, *model.blocks[:2]):
        module.requires_grad_(False)
    plain = copy.deepcopy(model)
    plan = xmem.plan(model, batch, loss_fn, budget=0.6)
    assert abs(plan.verified.error) < 0.005
    plan.apply(model)
    found, expected = trained(model, batch), trained(plain, batch)
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


def test_profiling_and_planning_leave_no_trace():
    model, batch = made()
    loss_fn(model, batch).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    before, numbers = state(model), torch.get_rng_state()
    xmem.plan(xmem.profile(model, batch, loss_fn), budget=0.5)
    assert same(before, state(model))
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(p.grad is gradients[n] for n, p in model.named_parameters())
    assert "forward" not in vars(model)


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
    assert same(before, state(model))
    assert all(p.grad is None for p in model.parameters())
    assert trained(copy.deepcopy(model), batch) is not None
    assert "forward" not in vars(model)


def test_the_peak_of_a_training_step_is_the_one_that_was_planned():
    model, batch = made()
    profile = xmem.profile(model, batch, loss_fn)
    plan = xmem.plan(profile, budget=0.4)
    plan.apply(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loss_fn(model, batch).backward()
    with xmem.measure(model=model, inputs=batch) as m:
        loss_fn(model, batch).backward()
    counted = m.peak_above_static_bytes + profile.batch_bytes
    assert counted == pytest.approx(plan.verified.measured_peak_bytes, rel=0.005)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_around_the_step_is_planned_and_trained_with(dtype):
    def cast(model, batch):
        with xmem.autocast(dtype):
            return loss_fn(model, batch)

    model, batch = made()
    plain = copy.deepcopy(model)
    profile = xmem.profile(model, batch, cast)
    assert profile.value_bytes[2] < xmem.profile(plain, batch, loss_fn).value_bytes[2]
    plan = xmem.plan(profile, budget=0.5)
    assert abs(plan.verified.error) < 0.005
    plan.apply(model)
    found, expected = trained(model, batch, step=cast), trained(plain, batch, step=cast)
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


def test_micro_batches_add_up_as_without_a_plan():
    def gradients(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        with xmem.accumulate(steps=2) as micro:
            for k in range(2):
                loss = loss_fn(model, (batch[0][k * 4 : k * 4 + 4], batch[1][k * 4 : k * 4 + 4]))
                xmem.backward(loss, optimizer)
        del micro
        return [p.grad.clone() for p in model.parameters()]

    model, batch = made()
    plain = copy.deepcopy(model)
    xmem.plan(model, batch, loss_fn, budget=0.4).apply(model)
    pairs = zip(gradients(model, batch), gradients(plain, batch), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", [Net, Untraceable])
def test_a_planned_model_is_copied_and_pickled(kind):
    model, batch = made(kind)
    plain = copy.deepcopy(model)
    xmem.plan(model, batch, loss_fn, budget=0.4).apply(model)
    expected = trained(plain, batch)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        found = trained(other, batch)
        assert found[0] == expected[0]
        assert same(found[1], expected[1])


def test_a_plan_from_a_file_is_applied_to_a_new_model(tmp_path):
    model, batch = made()
    xmem.plan(model, batch, loss_fn, budget=0.4).write(tmp_path / "plan.json")
    fresh, _ = made()
    plain = copy.deepcopy(fresh)
    receipt = Plan.read(tmp_path / "plan.json").apply(fresh)
    assert trained(fresh, batch)[0] == trained(plain, batch)[0]
    receipt.undo()
    assert "forward" not in vars(fresh)


def test_evaluation_runs_as_it_did_and_training_goes_on():
    model, batch = made()
    plain = copy.deepcopy(model)
    xmem.plan(model, batch, loss_fn, budget=0.4).apply(model)
    for one in (model, plain):
        one.eval()
    with torch.no_grad():
        assert torch.equal(model(batch[0]), plain(batch[0]))
    for one in (model, plain):
        one.train()
    assert trained(model, batch)[0] == trained(plain, batch)[0]
