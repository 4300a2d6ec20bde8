"""Small models and steps for the tests of optimizers."""

import numpy as np
import torch
from on_torch.gpt import GPT
from torch.nn import functional

from xmem import optim
from xmem.optim_rules import state_bytes

MAKERS = {"adamw": optim.AdamW, "lion": optim.Lion, "adafactor": optim.Adafactor}


def gpt(width=64, layers=2):
    torch.manual_seed(0)
    return GPT(layers=layers, width=width, heads=4, vocabulary=128, length=32, dropout=0.0)


def batches(steps, seed=1):
    """Yield sequences in which each token follows from the one before, mostly."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        x = rng.integers(0, 128, (8, 33))
        for i in range(1, 33):
            x[:, i] = np.where(rng.random(8) < 0.1, x[:, i], (3 * x[:, i - 1] + 1) % 128)
        yield torch.from_numpy(x[:, :-1].copy()), torch.from_numpy(x[:, 1:].copy())


def loss_of(model, batch):
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(model, optimizer, steps, *, seed=1, after=None):
    """Return the losses of some steps."""
    losses = []
    for batch in batches(steps, seed):
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()
    return losses


def tensors(optimizer):
    return [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]


def bytes_a_parameter(optimizer):
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return sum(t.nbytes for t in tensors(optimizer)) / count


def expected_bytes(optimizer, moments, bits, smallest=4096):
    """Return what moments should take, from the parameters' sizes alone."""
    sizes = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    return sum(moments * state_bytes(n, bits if n >= smallest else 32) for n in sizes)


def same(found, expected):
    """Say whether two tensors, or two states, are equal to the last bit."""
    if isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(
            found.contiguous().view(-1).view(torch.uint8),
            expected.contiguous().view(-1).view(torch.uint8),
        )
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    return found == expected


def same_states(found, expected):
    pairs = zip(found.state.values(), expected.state.values(), strict=True)
    return all(same(a, b) for a, b in pairs)


def same_parameters(found, expected):
    return all(same(a.detach(), b.detach()) for a, b in zip(found, expected, strict=True))
