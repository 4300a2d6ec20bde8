"""Models whose parameters come and go, and what is asked of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import xmem
from xmem.offload.streaming import offload_parameters

WIDTH, VOCABULARY = 64, 50


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h)[0]
        return x + self.contract(functional.gelu(self.expand(x)))


class GPT(nn.Module):
    """Embeddings, a parameter of its own, blocks in a list, and a head."""

    def __init__(self, layers=4, width=WIDTH, *, tied=False):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) + self.position[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def pair(make=GPT, **options):
    """Return two models with the same parameters."""
    torch.manual_seed(1)
    plain = make(**options)
    torch.manual_seed(1)
    return plain, make(**options)


def tokens(count=12):
    return torch.randint(0, VOCABULARY, (2, count), generator=torch.Generator().manual_seed(3))


def loss_of(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def away(model, **options):
    """Offload to disk, which no warning goes with."""
    return offload_parameters(model, "disk", **options)


def bytes_of(*modules):
    return sum(p.nbytes for module in modules for p in module.parameters())


def held_bytes(model):
    """Return what a model's parameters hold on the device now."""
    return sum(
        {
            p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()
        }.values()
    )


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(ours, theirs):
    """Say whether two lists of tensors are equal bit for bit."""
    return len(ours) == len(theirs) and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


def check_gradients(plain, ours, run):
    """Hold losses and gradients of two models against each other, and that nothing stays."""
    expected, found = run(plain), run(ours)
    assert expected.item() == found.item()
    expected.backward()
    found.backward()
    assert same(grads(ours), grads(plain))
    assert held_bytes(ours) == 0


@pytest.fixture
def backend_peak(backend):
    """Return the peak above what was there, of a call."""

    def peak(call):
        before = backend.measure.counters().allocated_bytes
        backend.measure.reset_peak()
        call()
        return backend.measure.counters().peak_allocated_bytes - before

    return peak


def measured(model, call, optimizer=None):
    """Return the peak that `xmem.measure` tells, above what was there, and its categories."""
    with xmem.measure(model=model, optimizer=optimizer) as m:
        call()
    return m.peak_above_static_bytes, m.by_category


@pytest.fixture
def depot_of():
    """Return what finds the depot of an offloaded model."""
    from xmem_torch.streamed_pieces import piece_of

    return lambda model: piece_of(next(iter(model.parameters())))._depot


@pytest.fixture
def full_disk(monkeypatch):
    """Return a block in which a depot takes no more than some bytes, as where a disk is full."""
    import contextlib
    import errno

    from xmem.offload.depot import Depot

    @contextlib.contextmanager
    def block(most):
        put, failed = Depot.put, set()
        left = [most]

        def full(self, number, address, nbytes):
            left[0] -= nbytes
            if left[0] < 0:
                failed.add(self)
                raise self.error(errno.ENOSPC, nbytes)
            put(self, number, address, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(Depot, "put", full)
            patch.setattr(
                Depot,
                "failure",
                property(lambda self: self.error(errno.ENOSPC, 0) if self in failed else None),
            )
            yield

    return block
