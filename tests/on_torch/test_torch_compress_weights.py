"""Compressed activations under autocast: the half copies of weights are weights."""

import pytest
import torch
from on_torch.compressed import error
from torch import nn

import xmem


class Attending(nn.Module):
    """Its attention casts three parts of one parameter."""

    def __init__(self, width=128):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 128)

    def forward(self, x):
        return self.out(self.attention(x, x.flip(1), x.flip(1))[0])


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 256)), (64, 128)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(8, 64, 3), nn.Conv2d(64, 64, 3)), (4, 8, 12, 12)),
    "attention": (Attending, (4, 32, 128)),
    "gru": (lambda: nn.GRU(64, 64, batch_first=True), (8, 5, 64)),
}

pytestmark = pytest.mark.filterwarnings("ignore:compress_activations was applied to nothing")

AUTOCASTS = {
    "xmem": lambda: xmem.autocast("bfloat16"),
    "torch": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
}


def cast_step(model, x, autocast, **how):
    """Return the gradients, that of the input first, and the block."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_(True)
    block = None
    with AUTOCASTS[autocast]():
        if how:
            with xmem.compress_activations(**how) as block:
                output = model(x)
        else:
            output = model(x)
        output = output[0] if isinstance(output, tuple) else output
    output.float().square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)], block


def weights_of(model):
    """Return the sizes of those weights that the gradient of the input needs."""
    return [p.numel() for p in model.parameters() if p.dim() > 1]


@pytest.mark.parametrize("autocast", AUTOCASTS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_half_copies_of_weights_are_kept(backend, kind, frozen, autocast):
    """Whatever is packed, no weight is: with all activations skipped, gradients are exact."""
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model, x = make(), torch.randn(shape)
    for p in model.parameters():
        p.requires_grad_(not frozen or p.dim() == 1)
    exact, _ = cast_step(model, x, autocast)
    found, block = cast_step(model, x, autocast, bits=2, min_bytes=0, skip=(nn.Module,))
    kept = block.kept_bytes.get("copies of weights", 0)
    print(f"{kept} bytes of copies of weights, kept {block.kept_bytes}")
    assert kept >= 2 * sum(weights_of(model))
    for a, b in zip(found, exact, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_gradient_of_the_input_of_a_linear_chain_is_exact_under_autocast(backend, bits):
    """It needs the weights alone: any error would be that of a packed weight."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), torch.randn(128, 256)
    exact, _ = cast_step(model, x, "xmem")
    found, block = cast_step(model, x, "xmem", bits=bits)
    assert set(block.layers) == {"1", "2"}
    assert torch.equal(found[0], exact[0])
    assert error(found[1:], exact[1:])[0] > 1e-4


def test_frozen_weights_that_are_cast_are_kept_among_alike_ones(backend):
    """An adapter is trained beside; layers have weights of one shape, found by their values."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(6))).requires_grad_(False)
    model[0].bias.requires_grad_(True)
    exact, _ = cast_step(model, torch.ones(64, 192), "xmem")
    found, block = cast_step(model, torch.ones(64, 192), "xmem", bits=4)
    assert block.kept_bytes["copies of weights"] == 6 * 2 * 192 * 192
    assert torch.equal(found[1], exact[1])
    assert block.layers == {}


def test_a_copy_that_is_computed_with_is_an_activation(backend):
    """Only casts, clones and views of a parameter are it."""
    weight = torch.randn(256, 256, requires_grad=True)
    x = torch.randn(256, 256, requires_grad=True)
    with xmem.compress_activations(8) as block:
        cast = weight.to(torch.bfloat16)
        (x.to(torch.bfloat16) @ cast.t().clone()).sum()
        (x * (weight * 2)).sum()
    assert block.kept_bytes == {"copies of weights": 2 * 2 * 256 * 256}
    assert block.raw_bytes == 4 * 256 * 256
