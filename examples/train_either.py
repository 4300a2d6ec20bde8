"""One loop for both frameworks: python examples/train_either.py torch | jittor."""

import sys

import numpy as np

import xmem

backend = xmem.use(sys.argv[1])


def torch_model():
    """Return a model and its optimizer, native to PyTorch."""
    import torch

    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)]
    model = torch.nn.Sequential(*layers).to(backend.device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def jittor_model():
    """Return the same, native to Jittor."""
    from jittor import nn, optim

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model, optim.AdamW(model.parameters(), lr=1e-3)


model, optimizer = {"torch": torch_model, "jittor": jittor_model}[backend.name]()
batches = np.random.default_rng(0).standard_normal((20, 4, 256, 64), dtype=np.float32)

# From here on nothing depends on the framework.
scaler = xmem.GradScaler(2.0**10)
for step, micro_batches in enumerate(batches):
    with xmem.accumulate(len(micro_batches)):
        for x in map(backend.models.tensor, micro_batches):
            with xmem.autocast():
                loss = ((model(x) - x) ** 2).mean()
            xmem.backward(scaler.scale(loss), optimizer)
    scaler.unscale_(optimizer)
    xmem.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    xmem.zero_grad(optimizer)
    if step % 5 == 0:
        print(f"step {step}: loss {xmem.log_value(loss):.4f}")
with xmem.inference(model):
    x = backend.models.tensor(batches[0, 0])
    print(f"afterwards: loss {xmem.log_value(((model(x) - x) ** 2).mean()):.4f}")
