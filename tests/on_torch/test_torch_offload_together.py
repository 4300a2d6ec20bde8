"""Offloaded activations with all else that trains: the same steps, bit for bit; what is refused."""

from contextlib import nullcontext

import pytest
import torch
from on_torch.compressed import cnn, mlp
from on_torch.gpt import GPT
from on_torch.leaving import equal, step
from on_torch.test_torch_plans_offload import DEPTH, offloading_plan
from torch import nn
from torch.nn import functional

import xmem
from xmem.errors import CompositionError


def away(model, **how):
    return xmem.offload_activations("disk", model=model, min_bytes=0, **how)


def accumulated(model, x, optimizer, around):
    with xmem.accumulate(2, optimizer):
        for part in x.chunk(2):
            with around():
                loss = model(part).square().mean()
            xmem.backward(loss, optimizer)


def scaled(model, x, optimizer, around):
    scaler = xmem.GradScaler(init_scale=2.0**8)
    for _ in range(2):
        with around(), xmem.autocast("float16"):
            loss = model(x).float().square().mean()
        xmem.backward(scaler.scale(loss), optimizer)
        scaler.step(optimizer)
        scaler.update()
        xmem.zero_grad(optimizer)


def with_masters(model, x, optimizer, around):
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    for _ in range(2):
        with around():
            loss = model(x.bfloat16()).float().square().mean()
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)


def in_segments(model, x, optimizer, around):
    xmem.apply_checkpointing(model, 2, blocks=list(model))
    for _ in range(2):
        with around():
            loss = model(x).square().mean()
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)


@pytest.mark.parametrize("train", [accumulated, scaled, with_masters, in_segments])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_parameters_are_those_without(backend, make, train):
    found = []
    for offloads in (False, True):
        model, x = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        blocks = []

        def around(model=model, blocks=blocks, offloads=offloads):
            blocks.append(away(model) if offloads else nullcontext())
            return blocks[-1]

        torch.manual_seed(1)
        train(model, x, optimizer, around)
        assert not offloads or all(block.away_bytes for block in blocks)
        found.append([p.detach().clone() for p in model.parameters()])
    assert equal(*found)


def test_planned_and_compiled_models_are_refused_by_name(backend):
    model, ids = GPT(layers=2, dropout=0.0), torch.randint(0, 1000, (2, 32))

    def loss_fn(model, ids):
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    receipt = xmem.plan(model, ids, loss_fn, budget="90%", verify=False).apply(model)
    with pytest.raises(CompositionError, match=r"planned.*offload_activations"), away(None):
        model(ids)
    receipt.undo()
    linear = nn.Linear(4, 4)
    linear.compile(backend="aot_eager")
    with pytest.raises(CompositionError, match=r"compiled.*offload_activations"), away(None):
        linear(torch.randn(2, 4))
    torch._dynamo.reset()


def test_a_transform_is_refused_by_name(backend):
    def inside(x):
        with away(None):
            return x.square().sum()

    with pytest.raises(CompositionError, match="offload_activations"):
        torch.func.grad(inside)(torch.randn(4))


class Conjugated(nn.Module):
    """Saves a tensor whose memory is not what it holds: it is conjugated when it is read."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64) / 8)

    def forward(self, x):
        y = torch.complex(x, x.cos()) @ self.weight
        return torch.sin(x + (y.conj() * (y * 1j).sin()).real)


@pytest.mark.parametrize("planned", [False, True])
def test_conjugated_tensors_stay(backend, planned):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Conjugated() for _ in range(DEPTH))), torch.randn(512, 64)
    loss, exact = step(model, x)
    if planned:
        offloading_plan().apply(model)
    found = step(model, x, around=None if planned else away(model))
    assert found[0] == loss
    assert equal(found[1], exact)
