"""Loss scaling on PyTorch: torch.amp.GradScaler behind xmem's, with fused optimizers too."""

import copy
import math

import pytest
import torch
from torch import nn

import xmem

X = torch.arange(32.0).reshape(4, 8) / 32

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "fused sgd with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "fused adam amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


def make(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    return model, OPTIMIZERS[kind](model.parameters())


def backward(model, optimizer, scaler, *, overflow=False):
    xmem.zero_grad(optimizer)
    loss = model(X).square().mean()
    xmem.backward(scaler.scale(loss) * (math.inf if overflow else 1.0), optimizer)


def state_of(model, optimizer):
    return copy.deepcopy((list(model.state_dict().values()), optimizer.state_dict()["state"]))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_step_that_overflows_changes_no_parameter_no_state_and_no_count(
    backend, kind, when, unscaled
):
    """Also in the first step, where PyTorch leaves fused SGD's momentum uninitialised."""
    model, optimizer = make(kind)
    scaler = xmem.GradScaler(1024.0)
    if when == "later":
        for _ in range(2):
            backward(model, optimizer, scaler)
            scaler.step(optimizer)
            scaler.update()
    before = state_of(model, optimizer)
    backward(model, optimizer, scaler, overflow=True)
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert same(state_of(model, optimizer), before)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_scaled_training_goes_as_unscaled_training_around_an_overflow(backend, kind):
    """A scale is a power of two, so that it leaves no trace in float32."""
    found = []
    for enabled in (False, True):
        model, optimizer = make(kind)
        scaler = xmem.GradScaler(1024.0, enabled=enabled)
        for step in range(6):
            if enabled and step in (0, 3):
                backward(model, optimizer, scaler, overflow=True)
                scaler.step(optimizer)
                scaler.update()
            backward(model, optimizer, scaler)
            scaler.step(optimizer)
            scaler.update()
        found.append(state_of(model, optimizer))
        assert scaler.get_scale() == (256.0 if enabled else 1.0)
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_unscaled_gradients_are_clipped_as_they_are(backend, kind):
    model, optimizer = make(kind)
    scaler = xmem.GradScaler(4096.0)
    backward(model, optimizer, scaler)
    scaler.unscale_(optimizer)
    plain = [g.clone() for g in torch.autograd.grad(model(X).square().mean(), model.parameters())]
    assert all(
        torch.allclose(p.grad, g, rtol=1e-5) for p, g in zip(model.parameters(), plain, strict=True)
    )
    xmem.clip_grad_norm_(optimizer, 1e-3)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)
    scaler.step(optimizer)
    scaler.update()


def test_the_scale_backs_off_and_grows(backend):
    model, optimizer = make("fused adamw")
    scaler = xmem.GradScaler(8.0, growth_interval=2, growth_factor=4.0, backoff_factor=0.25)
    scales = []
    for overflow in (True, False, False, False, True):
        backward(model, optimizer, scaler, overflow=overflow)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0, 2.0, 8.0, 8.0, 2.0]
    assert all(type(scale) is float for scale in scales)


def test_a_state_has_pytorchs_names_and_plain_values_and_is_taken_up(backend):
    model, optimizer = make("sgd")
    scaler = xmem.GradScaler(16.0, growth_interval=7)
    backward(model, optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    assert state == {
        "scale": 16.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 7,
        "_growth_tracker": 1,
    }
    assert {type(value) for value in state.values()} == {float, int}
    other = xmem.GradScaler()
    other.load_state_dict({**state, "scale": 16})
    assert other.state_dict() == state
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(state)
    assert plain.state_dict() == state


def test_a_new_scale_is_set(backend):
    model, optimizer = make("sgd")
    scaler = xmem.GradScaler()
    backward(model, optimizer, scaler)
    scaler.step(optimizer)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_without_gradients_it_says_so(backend, call, kind):
    _, optimizer = make(kind)
    with pytest.raises(xmem.UsageError, match="has a gradient"):
        getattr(xmem.GradScaler(), call)(optimizer)


def test_two_optimizers_skip_each_on_its_own(backend):
    (first, one), (second, two) = make("fused adamw"), make("fused adamw")
    scaler = xmem.GradScaler(64.0)
    before = state_of(first, one), state_of(second, two)
    backward(first, one, scaler, overflow=True)
    backward(second, two, scaler)
    scaler.step(one)
    scaler.step(two)
    scaler.update()
    assert same(state_of(first, one), before[0])
    assert not same(state_of(second, two), before[1])
    assert scaler.get_scale() == 32.0


def test_float16_trains_where_gradients_are_too_small_for_it(backend):
    """The gradient at the product is 1e-8: zero in float16, and not once it is scaled."""
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        scaler = xmem.GradScaler(2.0**16, enabled=enabled)
        with xmem.autocast("float16"):
            loss = layer(X).float().mean() * 1e-6
        xmem.backward(scaler.scale(loss), optimizer)
        if enabled:
            scaler.unscale_(optimizer)
        found.append(layer.weight.grad)
    expected = torch.autograd.grad(layer(X).mean() * 1e-6, layer.weight)[0]
    assert not torch.allclose(found[0], expected, rtol=0.1)
    assert torch.allclose(found[1], expected, rtol=0.01)


def test_a_scale_can_be_set_before_any_loss_is_scaled(backend):
    model, optimizer = make("sgd")
    scaler = xmem.GradScaler()
    scaler.update(1024)
    assert scaler.get_scale() == 1024.0
    loss = model(X).square().mean()
    assert torch.equal(scaler.scale(loss), loss * 1024)
    xmem.backward(scaler.scale(loss), optimizer)
    scaler.step(optimizer)
    scaler.update(2)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_gradients_of_a_loss_that_was_not_scaled_are_refused(backend, call):
    model, optimizer = make("sgd")
    scaler = xmem.GradScaler()
    xmem.backward(model(X).square().mean(), optimizer)
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(xmem.UsageError, match="has scaled no loss"):
        getattr(scaler, call)(optimizer)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    xmem.zero_grad(optimizer)
    xmem.backward(scaler.scale(model(X).square().mean()), optimizer)
    getattr(scaler, call)(optimizer)
