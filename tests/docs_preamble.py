"""What the examples of docs/memory.md take for granted: a model, its optimizer, batches, a step."""

import sys

import numpy as np

import xmem

xmem.use(sys.argv[1], device="cpu")


def build():
    """Return a model and its optimizer, native to the framework."""
    if xmem.active().name == "torch":
        import torch

        net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        )
        return net, torch.optim.AdamW(net.parameters(), lr=1e-3)
    from jittor import nn, optim

    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return net, optim.AdamW(net.parameters(), lr=1e-3)


def tensor(rows):
    values = np.random.default_rng(rows).standard_normal((rows, 64), dtype=np.float32)
    return xmem.active().models.tensor(values)


def run_step(net, optim, x):
    loss = ((net(x) - x) ** 2).mean()
    xmem.backward(loss, optim)
    xmem.optimizer_step(optim)
    xmem.zero_grad(optim)
    return loss


def make_step(batch_size):
    net, optim = build()
    x = tensor(batch_size)
    return lambda: run_step(net, optim, x)


def train_step(batch):
    loss = run_step(model, optimizer, batch)
    xmem.log_value(loss)
    return loss


model, optimizer = build()
batches = [tensor(128) for _ in range(24)]
