"""What the examples of docs/distributed.md take for granted: models, optimizers, data, a step."""

import sys

import numpy as np

import xmem

xmem.use(sys.argv[1], device="cpu")
is_torch = xmem.active().name == "torch"


def build(blocks=4):
    """Return a chain of blocks (up, GELU, down), native to the framework."""
    if is_torch:
        from torch import nn
    else:
        from jittor import nn

    def block():
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    return nn.Sequential(*[block() for _ in range(blocks)])


def make_optimizer(model):
    """Return AdamW, native to the framework."""
    if is_torch:
        from torch import optim
    else:
        from jittor import optim
    return optim.AdamW(model.parameters(), lr=1e-3)


def tensor(array):
    return xmem.active().models.tensor(array)


def loss_fn(output, target):
    return ((output - target) ** 2).mean()


def update(optimizer):
    xmem.optimizer_step(optimizer)
    xmem.zero_grad(optimizer)


def train(model, optimizer, x):
    loss = loss_fn(model(x), x)
    xmem.backward(loss, optimizer)
    update(optimizer)
    return xmem.log_value(loss)


arrays = np.random.default_rng(0).standard_normal((4, 32, 64), dtype=np.float32)
