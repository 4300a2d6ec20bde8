"""Prediction on PyTorch: the peak of a real step to the byte, and nothing is changed by it."""

import copy
import gc
import random

import pytest
import torch
from on_torch.gpt import GPT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from xmem_torch.predict import Predict

import xmem
from xmem import predicting
from xmem.workloads import DEFAULT_WORKLOADS, make_batch, make_weights, workload

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, 1e-3),
    "foreach adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "loop adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def predicted(backend, model, batch, loss_fn, optimizer=None):
    return Predict(backend.device, backend.measure).predict(model, batch, loss_fn, optimizer)


def measured(model, batch, loss_fn, optimizer=None):
    """Measure the third of three steps."""

    def step():
        loss = loss_fn(model, batch)
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    for _ in range(3):
        model.zero_grad(set_to_none=True)
        gc.collect()
        with xmem.measure(model=model, optimizer=optimizer, inputs=batch) as m:
            step()
    model.zero_grad(set_to_none=True)
    return m


def check(backend, model, batch, loss_fn, optimizer=None, *, attribute_bytes=0, again=False):
    """Predict a step before the first one has run, run it, and predict it again if asked to."""
    before = predicted(backend, model, batch, loss_fn, optimizer)
    real = measured(model, batch, loss_fn, optimizer)
    after = predicted(backend, model, batch, loss_fn, optimizer) if again else before
    figures = (
        f"predicted {before.peak_above_static_bytes} then {after.peak_above_static_bytes},"
        f" measured {real.peak_above_static_bytes} ({before.by_phase})"
    )
    # To the byte, but for scalars that are arguments, which may be counted twice.
    limit = 16
    assert abs(before.peak_above_static_bytes - real.peak_above_static_bytes) <= limit, figures
    assert abs(after.peak_above_static_bytes - real.peak_above_static_bytes) <= limit, figures
    static = attribute_bytes + sum(
        size
        for category, size in real.by_category.items()
        if category in ("parameter", "buffer", "optimizer", "input")
    )
    assert before.static_bytes == after.static_bytes == static
    assert before.peak_allocated_bytes == static + before.peak_above_static_bytes
    assert before.peak_above_static_bytes == max(before.by_phase.values())
    assert before.uncalibrated_operations == 0
    assert before.calibrated_operations > 0
    return before


def built(backend, name, optimizer):
    declared = workload(name, "quick")
    model = backend.models.build(declared.model, make_weights(declared))
    batch = tuple(backend.models.tensor(array) for array in make_batch(declared))

    def loss_fn(model, batch):
        return backend.models.loss(declared.loss, model(batch[0]), batch[1])

    return model, batch, loss_fn, OPTIMIZERS[optimizer](model.parameters())


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "adam") for name in DEFAULT_WORKLOADS), ("mlp", "sgd"), ("resnet18", "sgd")],
)
def test_the_prediction_is_the_measured_peak(backend, name, optimizer):
    check(backend, *built(backend, name, optimizer))


@pytest.mark.parametrize(("name", "layout"), [("gpt2", "every"), ("resnet18", 3)])
def test_a_checkpointed_model(backend, name, layout):
    model, batch, loss_fn, optimizer = built(backend, name, "adam")
    blocks = backend.models.blocks(model)
    plain = predicted(backend, model, batch, loss_fn, optimizer)
    xmem.apply_checkpointing(model, layout, blocks=blocks)
    found = check(backend, model, batch, loss_fn, optimizer)
    assert found.peak_above_static_bytes < plain.peak_above_static_bytes


@pytest.mark.parametrize(
    ("name", "autocast", "checkpointed"),
    [
        ("gpt2", xmem.autocast, True),
        ("resnet18", xmem.autocast, False),
        ("resnet18", lambda d: torch.autocast("cpu", d), True),
    ],
)
def test_under_autocast(backend, name, autocast, checkpointed):
    model, batch, loss_fn, optimizer = built(backend, name, "adam")
    if checkpointed:
        xmem.apply_checkpointing(model, "every", blocks=backend.models.blocks(model))
    dtype = "bfloat16" if autocast is xmem.autocast else torch.bfloat16

    def half_loss(model, batch):
        with autocast(dtype):
            return loss_fn(model, batch)

    check(backend, model, batch, half_loss, optimizer)


def gpt_loss(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None])
def test_every_optimizer_and_dropout(backend, optimizer):
    model, ids = GPT(layers=2), torch.randint(0, 1000, (1, 16))
    made = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())
    found = check(backend, model, ids, gpt_loss, made, again=True)
    assert list(found.by_phase) == ["forward", "backward", "optimizer"][: 2 + (made is not None)]


class Odd(nn.Module):
    """In-place functions, views, shared and frozen weights, constants, tensors in attributes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.second = nn.Linear(64, 64)
        self.third = nn.Linear(64, 64)
        self.third.weight = self.second.weight
        self.register_buffer("mask", torch.ones(128, 64).tril())
        self.frozen = nn.Linear(64, 128).requires_grad_(False)
        self.scale = torch.full((64,), 0.5)
        self.kept = torch.zeros(64, 64)

    def forward(self, x):
        y = functional.relu(self.norm(self.first(x)), inplace=True) * 2
        y = y.add_(2).view(-1, 2, 64)[:, 1].add(self.mask[1::2])
        left, right = self.third(self.second(y)).chunk(2, dim=1)
        y = torch.cat([right, left], 1) * self.scale + torch.tensor([1.0, 2.0] * 32)
        self.kept = y.detach()
        y[:, 0] = 0
        return self.frozen(y).expand(3, -1, -1).contiguous()


def odd_loss(model, x):
    return model(x).float().square().mean() + 1e-3 * sum(p.sum() for p in model.parameters())


def test_aliases_and_functions_in_place(backend):
    model = Odd()
    held = model.scale.nbytes + model.kept.nbytes
    check(backend, model, torch.randn(128, 64), odd_loss, attribute_bytes=held, again=True)


class Branching(nn.Module):
    """Its peak is where two gradients are added up, which autograd does in place."""

    def __init__(self):
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.ones(256)), nn.Linear(256, 256)

    def forward(self, x):
        y = x + self.shift
        return self.layer((y * 2).add_(y * 3).add_(y * 4))


def test_gradients_are_added_up_in_place_as_with_data(backend):
    check(backend, Branching(), torch.randn(64, 256), lambda m, x: m(x).square().sum())


def test_nothing_is_changed(backend):
    model, x = Odd(), torch.randn(128, 64)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    measured(model, x, odd_loss, optimizer)
    odd_loss(model, x).backward()

    def seen():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        tensors |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        state = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
        return {"kept": model.kept, **tensors}, state, torch.get_rng_state(), random.getstate()

    def fingerprint():
        tensors, state, generator, stream = seen()
        ids = {n: None if t is None else (id(t), t._version) for n, t in tensors.items()}
        return ids, [{k: id(v) for k, v in s.items()} for s in state], bytes(generator), stream

    before, values = fingerprint(), copy.deepcopy(seen()[0])
    groups, attributes = optimizer.param_groups[0], dict(vars(model))

    def failing(model, x):
        random.random()
        odd_loss(model, functional.dropout(x))
        raise KeyError("on purpose")

    predicted(backend, model, x, lambda m, x: odd_loss(m, functional.dropout(x)), optimizer)
    with pytest.raises(KeyError, match="on purpose"):
        predicted(backend, model, x, failing, optimizer)
    assert fingerprint() == before
    assert vars(model) == attributes
    assert optimizer.param_groups[0] is groups
    for name, tensor in seen()[0].items():
        assert (tensor is None and values[name] is None) or torch.equal(tensor, values[name])
    measured(model, x, odd_loss, optimizer)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_model_without_data_is_predicted_as_one_with_data(backend, kind):
    ids = torch.randint(0, 1000, (2, 64))
    model = GPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = predicted(backend, model, ids, gpt_loss, optimizer)
    mode = torch.device("meta") if kind == "meta" else FakeTensorMode()
    with mode:
        model = GPT(layers=2)
        ids = torch.zeros(2, 64, dtype=torch.int64) if kind == "fake" else ids
    optimizer = torch.optim.AdamW(model.parameters())
    assert predicted(backend, model, ids, gpt_loss, optimizer) == expected
    assert not optimizer.state


def test_no_more_memory_is_needed_than_by_single_operations(backend):
    model, ids = GPT(layers=12), torch.randint(0, 1000, (7, 128))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    gc.collect()
    now = backend.measure.counters().allocated_bytes
    backend.measure.set_limit(now + 24 * 2**20)
    found = predicted(backend, model, ids, gpt_loss, optimizer)
    assert found.peak_above_static_bytes > 100 * 2**20
    assert found.uncalibrated_operations == 0
    assert backend.measure.counters().allocated_bytes <= now + 2**16


def test_operations_without_room_are_counted(backend):
    model, ids = GPT(layers=1), torch.randint(0, 1000, (6, 128))
    gc.collect()
    backend.measure.set_limit(backend.measure.counters().allocated_bytes + 2**20)
    assert predicted(backend, model, ids, gpt_loss).uncalibrated_operations > 0
    backend.measure.set_limit(None)


def item(model, x):
    loss = model(x).sum()
    return loss * loss.item()


def condition(model, x):
    loss = model(x).sum()
    return loss if loss > 0 else -loss


def nonzero(model, x):
    y = model(x)
    return y[y.nonzero()].sum()


def masked(model, x):
    y = model(x)
    return y[y > 0].sum()


@pytest.mark.parametrize("loss_fn", [item, condition, nonzero, masked])
def test_what_depends_on_data_is_refused_and_named(backend, loss_fn):
    model = nn.Linear(4, 4)
    before = list(model.parameters())
    with pytest.raises(xmem.CapabilityError, match=r"aten.*xmem\.profile"):
        predicted(backend, model, torch.randn(2, 4), loss_fn)
    assert list(map(id, model.parameters())) == list(map(id, before))


def test_hooks_on_parameters_and_vector_losses_are_refused(backend):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(xmem.XmemError, match="not a scalar"):
        predicted(backend, model, x, lambda m, x: m(x))
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(xmem.CapabilityError, match="has hooks"):
        predicted(backend, model, x, lambda m, x: m(x).sum())


def test_the_neutral_function_checks_what_it_is_given(backend):
    model = nn.Linear(4, 4)
    with pytest.raises(xmem.XmemError, match="no module"):
        predicting.predict("model", None, item)
    with pytest.raises(xmem.XmemError, match="no function"):
        predicting.predict(model, None, "loss")
    with xmem.measure(), pytest.raises(xmem.MeasurementError, match=r"xmem\.measure is open"):
        predicting.predict(model, None, item)
