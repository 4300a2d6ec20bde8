"""Train with activations and optimizer states in a file: `python examples/offload.py torch`."""

import sys
from contextlib import nullcontext

import numpy as np

import xmem

backend = xmem.use(sys.argv[1] if len(sys.argv) > 1 else "torch", device="cpu")
if backend.name == "torch":
    from torch import nn, optim
else:
    from jittor import nn, optim

model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU())))
optimizer = optim.AdamW(model.parameters(), lr=0.0)  # so that both losses below are of one model
x = backend.models.tensor(np.random.default_rng(0).standard_normal((4096, 256), dtype=np.float32))


def train_step(block):
    """Run a step with its forward pass in a block."""
    with block:
        loss = ((model(x) - x) ** 2).mean()
    xmem.backward(loss, optimizer)
    xmem.optimizer_step(optimizer)
    xmem.zero_grad(optimizer)
    return loss


def measure_step(make_block):
    """Print the loss and the peak of a step."""
    train_step(make_block())  # makes what later steps find
    with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
        loss = train_step(make_block())
    print(f"loss {loss.item():.4f}, peak above static {m.peak_above_static_bytes} bytes")


measure_step(nullcontext)
print(xmem.offload_optimizer(optimizer, "disk", block="1MiB"))
measure_step(lambda: xmem.offload_activations("disk", model=model, prefetch=0))
