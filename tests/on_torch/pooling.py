"""What the tests of the pool share."""

import gc

import pytest
import torch
from torch import nn
from xmem_torch import native
from xmem_torch.cpu_settings import DEFAULTS

from xmem.native.build import find_compiler

KB, MB = 1024, 2**20


def library():
    return native.load(find_compiler())


def check():
    """Zero, or the number of the first rule of native/check.h that does not hold."""
    return library().xmem_torch_check()


@pytest.fixture(scope="module")
def old_objects_apart():
    """Lets `gc.collect` look at new objects only: else it takes half of the tests' time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def pool(backend, old_objects_apart):
    """The pool with nothing cached; put back as it was, with its inside checked."""
    gc.collect()
    backend.pool.configure(DEFAULTS, "raise")
    backend.pool.trim()
    backend.pool.reset_peak()
    yield backend.pool
    backend.pool.set_limit(None)
    broken = check()
    backend.pool.configure(DEFAULTS, "raise")
    assert broken == 0
    assert check() == 0


def reserved(pool):
    return pool.stats().reserved_bytes


def allocated(pool):
    return pool.stats().allocated_bytes


def blocks(pool, least=64 * KB):
    """All blocks of the pool from a size on, by address."""
    return [b for s in pool.segments() for b in s.blocks if b.size_bytes >= least]


def train(seed=0, steps=3):
    """Return what a few steps leave of a model with convolutions, norms and large activations."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 32 * 32, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def same(first, second):
    return first[0] == second[0] and all(
        torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True)
    )
