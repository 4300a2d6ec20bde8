"""The training loop on PyTorch: accumulation, clipping, evaluation, and what each refuses."""

import gc
import math
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import xmem

BATCH = 64


def make(width=32, depth=3, kind="sgd"):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    return model, xmem.api.active().training.make_optimizer(kind, model, learning_rate=0.1)


def data(width=32, batch=BATCH):
    torch.manual_seed(1)
    return torch.randn(batch, width)


def loss_of(model, x):
    return model(x).square().mean()


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_the_gradients_of_micro_batches_are_those_of_the_whole_batch(backend, steps):
    model, optimizer = make()
    x = data()
    xmem.backward(loss_of(model, x), optimizer)
    whole = gradients(model)
    xmem.zero_grad(optimizer)
    with xmem.accumulate(steps) as micro:
        for part in x.chunk(steps):
            xmem.backward(loss_of(model, part), optimizer)
    assert micro.done == steps
    assert float((gradients(model) - whole).norm() / whole.norm()) <= 1e-6


@pytest.mark.parametrize("scaled", [False, True])
def test_the_block_steps_once_and_forgets_the_gradients(backend, scaled):
    x, found = data(), []
    for steps in (1, 4):
        model, optimizer = make()
        counted = []
        optimizer.register_step_post_hook(lambda *_, c=counted: c.append(1))
        scaler = xmem.GradScaler(256.0) if scaled else None
        with xmem.accumulate(steps, optimizer, scaler=scaler):
            for part in x.chunk(steps):
                loss = loss_of(model, part)
                xmem.backward(scaler.scale(loss) if scaled else loss, optimizer)
        assert len(counted) == 1
        assert all(p.grad is None for p in model.parameters())
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*found, rtol=1e-5, atol=1e-7)


def test_scaled_micro_batches_are_clipped_after_the_block(backend):
    model, optimizer = make()
    scaler = xmem.GradScaler(1024.0)
    with xmem.accumulate(4):
        for part in data().chunk(4):
            xmem.backward(scaler.scale(loss_of(model, part)), optimizer)
    scaler.unscale_(optimizer)
    norm = xmem.clip_grad_norm_(optimizer, 1e-3)
    clipped = gradients(model)
    scaler.step(optimizer)
    scaler.update()
    whole, _ = make()
    loss_of(whole, data()).backward()
    assert float(norm) == pytest.approx(float(gradients(whole).norm()), rel=1e-5)
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-2)


def peak(steps):
    model, optimizer = make(width=256, depth=6, kind="adam")
    parts = data(width=256, batch=128 * steps).chunk(steps)
    for _ in range(2):
        gc.collect()
        with (
            xmem.measure(model=model, optimizer=optimizer, inputs=parts) as m,
            xmem.accumulate(steps, optimizer),
        ):
            for part in parts:
                xmem.backward(loss_of(model, part), optimizer)
    return m.peak_above_static_bytes


def test_eight_micro_batches_take_what_two_take(backend):
    two, eight = peak(2), peak(8)
    assert eight <= 1.05 * two, (eight, two)


def test_gradients_stay_float32_and_close_with_autocast(backend):
    model, optimizer = make()
    x = data()
    xmem.backward(loss_of(model, x), optimizer)
    whole = gradients(model)
    xmem.zero_grad(optimizer)
    with xmem.accumulate(4):
        for part in x.chunk(4):
            with xmem.autocast("bfloat16"):
                loss = loss_of(model, part)
            xmem.backward(loss, optimizer)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert float((gradients(model) - whole).norm() / whole.norm()) <= 0.02


def fewer(model, optimizer):
    with xmem.accumulate(3, optimizer):
        xmem.backward(loss_of(model, data()), optimizer)


def more(model, optimizer):
    with xmem.accumulate(1, optimizer):
        for _ in range(2):
            xmem.backward(loss_of(model, data()), optimizer)


def step_between(model, optimizer):
    with xmem.accumulate(2):
        xmem.backward(loss_of(model, data()), optimizer)
        xmem.optimizer_step(optimizer)


def scaled_step_between(model, optimizer):
    scaler = xmem.GradScaler()
    with xmem.accumulate(2):
        xmem.backward(scaler.scale(loss_of(model, data())), optimizer)
        scaler.step(optimizer)


WRONG = {
    fewer: "has had 1 micro-batches",
    more: "has had its 1 micro-batches",
    step_between: "after 1 of 2",
    scaled_step_between: "after 1 of 2",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_number_of_micro_batches_is_refused_and_nothing_steps(backend, wrong):
    model, optimizer = make()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(xmem.UsageError, match=WRONG[wrong]):
        wrong(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    xmem.zero_grad(optimizer)
    with xmem.accumulate(1, optimizer):  # the next block begins anew
        xmem.backward(loss_of(model, data()), optimizer)
    assert not torch.equal(before[0], next(model.parameters()))


def test_an_update_inside_another_is_refused(backend):
    with xmem.accumulate(2) as outer:
        with pytest.raises(xmem.CompositionError, match="accumulate inside accumulate"):
            xmem.accumulate(2).__enter__()
        outer.done = 2


def test_an_error_inside_is_passed_on_and_ends_the_block(backend):
    with pytest.raises(KeyError), xmem.accumulate(4):
        raise KeyError
    with xmem.accumulate(1) as micro:
        micro.done = 1


@pytest.mark.parametrize("chosen", ["own no_sync", "none"])
def test_a_model_that_is_not_data_parallel_is_refused(backend, chosen):
    model, _ = make()
    entered = []
    if chosen == "own no_sync":
        import contextlib

        @contextlib.contextmanager
        def no_sync():
            entered.append("in")
            yield
            entered.append("out")

        model.no_sync = no_sync
        with xmem.accumulate(2, model=model) as micro:
            assert entered == ["in"]
            xmem.backward(loss_of(model, data()), None)
            assert entered == ["in", "out"]
            xmem.backward(loss_of(model, data()), None)
        assert micro.done == 2
    else:
        with pytest.raises(xmem.UsageError, match="Sequential is not data-parallel"):
            xmem.accumulate(2, model=model).__enter__()


def test_a_static_graph_of_data_parallel_is_refused(backend):
    model, _ = make()
    model.no_sync, model.static_graph = nn.Identity, True
    with pytest.raises(xmem.CompositionError, match="static_graph=True"):
        xmem.accumulate(2, model=model).__enter__()
    with xmem.accumulate(1) as micro:  # no block is left open
        micro.done = 1


def test_data_parallel_reduces_once_and_gives_the_gradient_of_the_whole_batch(backend, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("accumulated.py")
    path = tmp_path / "found.pt"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port, str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        try:
            _, said = rank.communicate(timeout=120)
        finally:
            rank.kill()
        assert rank.returncode == 0, said
    found = torch.load(path)
    assert found["reduced"] == {"accumulate": 1, "by hand": 4}
    assert float((found["accumulate"] - found["by hand"]).norm() / found["by hand"].norm()) <= 1e-5


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("target", ["optimizer", "parameters", "generator", "tensor"])
def test_gradients_are_clipped_to_a_norm(backend, target, norm_type):
    model, optimizer = make()
    xmem.backward(loss_of(model, data()), optimizer)
    first = next(model.parameters())
    was = first.grad.clone() if target == "tensor" else gradients(model)
    given = {
        "optimizer": optimizer,
        "parameters": list(model.parameters()),
        "generator": model.parameters(),
        "tensor": first,
    }[target]
    norm = xmem.clip_grad_norm_(given, 1e-3, norm_type=norm_type)
    now = first.grad if target == "tensor" else gradients(model)
    expected = torch.linalg.vector_norm(was, norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    scale = min(1.0, 1e-3 / (float(expected) + 1e-6))
    assert torch.allclose(now, was * scale, rtol=1e-4)


@pytest.mark.parametrize("call", ["step", "clip optimizer", "clip parameters"])
def test_without_any_gradient_it_says_so(backend, call):
    model, optimizer = make()
    calls = {
        "step": lambda: xmem.optimizer_step(optimizer),
        "clip optimizer": lambda: xmem.clip_grad_norm_(optimizer, 1.0),
        "clip parameters": lambda: xmem.clip_grad_norm_(model.parameters(), 1.0),
    }
    with pytest.raises(xmem.UsageError, match="gradient"):
        calls[call]()
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    calls[call]()  # one is enough


def test_a_step_returns_what_the_optimizers_step_returns(backend):
    model, optimizer = make()
    xmem.backward(loss_of(model, data()), optimizer)
    optimizer.step = lambda: "mine"
    assert xmem.optimizer_step(optimizer) == "mine"


@pytest.mark.parametrize("fails", [False, True])
def test_inference_puts_every_flag_back(backend, fails):
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.BatchNorm1d(32))
    model[2].eval()
    model[0].bias.requires_grad_(False)
    flags = [m.training for m in model.modules()]
    wanting = [p.requires_grad for p in model.parameters()]
    x = data()
    statistics = model[2].running_mean.clone()
    with (
        pytest.raises(KeyError) if fails else nullcontext(),
        xmem.inference(model, inputs=x) as receipt,
    ):
        assert not any(m.training for m in model.modules())
        y = model(x)
        assert not y.requires_grad
        assert torch.equal(y, model(x))  # no dropout
        if fails:
            raise KeyError
    assert [m.training for m in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == wanting
    assert torch.equal(statistics, model[2].running_mean)
    assert receipt.applied_to == 4
    assert receipt.expected_saving_bytes > 0


def test_inference_keeps_nothing_for_backward(backend):
    model, _ = make(width=256, depth=6)
    x = data(width=256, batch=512)
    peaks = {}
    for name in ("training", "inference"):
        gc.collect()
        with xmem.measure(model=model, inputs=x) as m:
            if name == "training":
                model(x)
            else:
                with xmem.inference(model):
                    model(x)
        peaks[name] = m.peak_above_static_bytes
    # What a layer takes and gives, and the input of the block that it is in.
    assert peaks["inference"] <= 3 * x.nbytes + 4096, peaks
    assert peaks["training"] >= 4 * peaks["inference"], peaks


def test_no_grad_keeps_no_graph(backend):
    model, _ = make()
    with xmem.no_grad():
        assert not model(data()).requires_grad
    assert model(data()).requires_grad


def test_a_logged_value_holds_no_graph(backend):
    model, _ = make()
    loss = loss_of(model, data())
    value = xmem.log_value(loss)
    assert type(value) is float
    assert value == loss.item()
    with pytest.raises(xmem.UsageError, match=r"a tensor of \(64, 32\)"):
        xmem.log_value(data())


NO_TARGET = {
    "nothing": (lambda model: [], "no parameters to clip"),
    "a module": (lambda model: model, "Sequential is no target to clip"),
    "a number": (lambda model: 3, "int is no target to clip"),
    "names": (lambda model: dict(model.named_parameters()), "str is no parameter to clip"),
    "none": (lambda model: [None], "NoneType is no parameter to clip"),
}


@pytest.mark.parametrize("case", NO_TARGET)
def test_what_has_no_gradients_to_clip_is_refused(backend, case):
    model, optimizer = make()
    xmem.backward(loss_of(model, data()), optimizer)
    target, said = NO_TARGET[case]
    with pytest.raises(xmem.UsageError, match=said):
        xmem.clip_grad_norm_(target(model), 1.0)
