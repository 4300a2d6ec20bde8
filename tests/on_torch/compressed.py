"""Small models and steps to compress."""

import torch
from torch import nn

import xmem


def mlp(width=256, layers=4):
    torch.manual_seed(0)
    inside = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inside, nn.Linear(width, 10)), torch.randn(256, width)


def cnn(width=16):
    torch.manual_seed(0)

    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())

    model = nn.Sequential(
        block(3, width), nn.MaxPool2d(2), nn.Dropout(0.2), block(width, width), nn.Flatten()
    )
    return model, torch.randn(16, 3, 32, 32)


def step(model, x, *, bits=None, seed=None, **how):
    """Return the loss, the gradients, and the block."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    block = None
    if bits is None:
        loss = model(x).square().mean()
    else:
        with xmem.compress_activations(bits=bits, seed=seed, **how) as block:
            loss = model(x).square().mean()
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters()], block


def error(found, exact):
    """Return how far gradients are off, together and the worst parameter, relative L2 norms."""
    off = [float((a - b).norm()) for a, b in zip(found, exact, strict=True)]
    norms = [float(b.norm()) for b in exact]
    together = (sum(o**2 for o in off) / sum(n**2 for n in norms)) ** 0.5
    return together, max(o / n for o, n in zip(off, norms, strict=True) if n > 1e-6)


def saved_by(operation, *inputs, **how):
    """Return the block in which an operation saved what it saved, and its result."""
    with xmem.compress_activations(8, min_bytes=0, **how) as block:
        result = operation(*inputs)
    return block, result
