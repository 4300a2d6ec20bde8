"""What the tests of `on_oom="offload"` share: models, steps, limits."""

import gc

import numpy as np
import pytest
import torch
from on_torch.gpt import GPT, forward_and_backward
from on_torch.pooling import MB, allocated
from xmem_torch.passes import top_hooks

import xmem


@pytest.fixture(autouse=True)
def put_back(pool):
    yield
    xmem.pool.configure(limit=None, on_oom="raise")
    xmem.pool.configure(offload_to="disk", offload_directory=None)
    assert top_hooks() is None


def model_and_ids(layers=4):
    torch.manual_seed(0)
    model = GPT(layers=layers, width=128, heads=4, length=128, dropout=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model, torch.randint(0, 1000, (4, 128))


def step(model, ids):
    """Return the loss and the gradients of one step, and its peak above what there was."""
    for p in model.parameters():
        p.grad.zero_()
    gc.collect()
    xmem.pool.reset_peak()
    before = xmem.pool.stats().allocated_bytes
    torch.manual_seed(1)
    loss = forward_and_backward(model, ids, ids)
    peak = xmem.pool.stats().peak_allocated_bytes - before
    return loss, [p.grad.numpy().copy() for p in model.parameters()], peak


def moved():
    return xmem.pool.stats().offloaded_bytes


def limit_for(peak, share):
    gc.collect()
    return allocated(xmem.active().pool) + int(peak * share)


def same(first, second):
    return first[0] == second[0] and all(map(np.array_equal, first[1], second[1]))


def saved_by(*sizes):
    """Return a loss whose graph has saved tensors of these sizes (MiB) that nobody else holds."""
    w = torch.ones((), requires_grad=True)
    loss = torch.zeros(())
    for size in sizes:
        loss = loss + (torch.ones(size * MB // 4) * w).exp().sum()
    return loss, w
