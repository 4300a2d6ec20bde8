"""Tracing on PyTorch: a forward in stages is the forward, and lets go of what it can."""

import weakref

import pytest
import torch
from on_torch.gpt import GPT
from staged import NanoGPT, Residual, ResNet, UNet, check
from torch import nn
from torch.nn import functional
from xmem_torch.tracing import traced


def test_a_chain_has_a_stage_for_each_module(backend):
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    check(model, torch.randn(3, 2, 4), names=["1", "2", "3"])


def test_a_resnet_has_its_blocks_and_glue_goes_with_the_next_module(backend):
    names = [
        *("conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"),
        *("avgpool", "fc"),
    ]
    model = ResNet()
    check(model, torch.randn(4, 3, 8, 8), names=names)
    check(model.eval(), torch.randn(4, 3, 8, 8, requires_grad=True), names=names)


def test_a_gpt_with_a_loop_over_its_layers(backend):
    names = ["token", *(f"layers.{i}" for i in range(4)), "norm", "head"]
    check(GPT(layers=4), torch.randint(0, 1000, (2, 8)), names=names)


def test_a_unet_reads_its_skips(backend):
    stages = check(
        UNet(),
        torch.randn(2, 3, 8, 8)[:, :1].expand(2, 4, 8, 8).contiguous(),
        names=["down1", "pool", "widen", "down2", "up", "fuse", "head"],
    )
    seen = []
    run = stages.forward(lambda i, f, args, kwargs: seen.append(len(args)) or f(*args))
    run(torch.randn(2, 4, 8, 8))
    assert seen[stages.names.index("fuse")] >= 2


@pytest.mark.parametrize("tied", [False, True])
def test_residuals_positions_and_what_else_a_forward_does_between_modules(backend, tied):
    model = NanoGPT(tied)
    ids = torch.randint(0, 50, (2, 12))
    stages = check(model, ids)
    assert [n for n in stages.names if "." in n] == [
        *("norm.0", "attention.0", "norm.1", "attention.1")
    ]
    check(model.eval(), ids)


def test_tuples_and_shared_modules_between_stages(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4)
            self.mix = nn.Linear(4, 4)

        def forward(self, x):
            x, (hidden, _) = self.lstm(self.mix(x))
            left, right = self.mix(x).chunk(2, dim=-1)
            n = left.size(-1)
            return self.mix(torch.cat([right, left * n], -1)) + hidden

    check(Net(), torch.randn(3, 4, 4))
    model = nn.Sequential(*[nn.Linear(4, 4)] * 3)
    check(model, torch.randn(3, 4), names=["0", "0#2", "0#3"])


def test_functions_that_change_a_tensor_stay_with_what_made_it(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(x)
            y.add_(1)
            y = functional.relu(y, inplace=True)
            z = self.second(y * 2)
            z[:, 0].mul_(2)
            return z.tanh_()

    check(Net(), torch.randn(3, 4), names=["first", "second"])


def test_a_wrapper_that_cannot_be_traced_is_one_stage(backend):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Residual(4) for _ in range(2))

        def forward(self, x):
            y = self.blocks[0](x) * 2
            return self.blocks[1](y) if y.sum() > 0 else y

    model = nn.Sequential(nn.Conv2d(4, 4, 1), Encoder(), nn.Conv2d(4, 4, 1))
    check(model, torch.randn(2, 4, 8, 8), names=["0", "1", "2"])


def test_a_model_that_only_wraps_another_gives_way_to_it(backend):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, *args):
            return self.module(*args)

    model = Wrapper()
    assert traced(model).module is model.module


def test_values_are_let_go_before_their_last_reader_is_done(backend):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    made, alive = [], []

    def call(index, function, args, kwargs):
        output = function(*args, **kwargs)
        del args
        made.append(weakref.ref(output))
        alive.append([r() is not None for r in made])
        return output

    with torch.no_grad():
        traced(model).forward(call)(torch.randn(2, 4))
    assert [sum(now) for now in alive[1:]] == [2, 2, 2]
    assert not any(r() is not None for r in made)
