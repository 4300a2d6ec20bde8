"""Small models and steps whose activations leave the device."""

import gc

import torch

import xmem


def step(model, x, *, around=None, loss_of=None):
    """Return the loss and the gradients of a step; `around` is a block for the forward pass."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss_of = loss_of or (lambda found: found.square().mean())
    if around is None:
        loss = loss_of(model(x))
    else:
        with around:
            loss = loss_of(model(x))
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters()]


def peak_bytes(model, x, loss_of, around=None):
    """Return how far a step raises the peak, gradients there already, and the gradients."""

    def run():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        gc.collect()
        with xmem.measure(model=model, inputs=x) as m:
            if around is None:
                loss = loss_of(model(x))
            else:
                with around():
                    loss = loss_of(model(x))
            loss.backward()
        return m.peak_above_static_bytes

    run()
    return run(), [p.grad.clone() for p in model.parameters()]


def equal(found, expected):
    """Say whether two lists of tensors are the same, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
