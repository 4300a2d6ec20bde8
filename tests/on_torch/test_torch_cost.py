"""What measuring a forward pass leaves behind on PyTorch: nothing."""

import gc

import pytest
import torch
from torch import nn

import xmem

WIDTH = 64

# Their nodes save their own results, their inputs, or both.
OPERATIONS = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "log softmax": lambda: nn.LogSoftmax(-1),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "dropout": nn.Dropout,
}


def allocated_bytes(backend):
    gc.collect()
    return backend.measure.counters().allocated_bytes


def make(last):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), OPERATIONS[last](), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(block, nn.Linear(WIDTH, 1)), torch.randn(256, WIDTH)


@pytest.mark.parametrize("how", ["inference", "key layers"])
@pytest.mark.parametrize("last", OPERATIONS)
def test_measuring_a_forward_pass_ten_times_takes_no_more_than_once(backend, last, how):
    model, x = make(last)
    layers = xmem.KeyLayers(types=("Sequential",), min_saved_bytes=1)
    found = []
    for _ in range(11):
        if how == "inference":
            with xmem.inference(model, inputs=x) as receipt:
                assert receipt.expected_saving_bytes > 0
        else:
            receipt = xmem.apply_checkpointing(model, layers, inputs=(x,))
            assert receipt.applied_to == 1
            receipt.undo()
        found.append(allocated_bytes(backend))
    print(f"allocated after each call: {found} bytes")
    assert len(set(found[1:])) == 1


@pytest.mark.parametrize(
    ("last", "check_values"),
    [*((last, check) for last in OPERATIONS for check in (False, True)), ("rrelu", False)],
)
def test_training_with_regions_ten_times_takes_no_more_than_once(backend, last, check_values):
    """A region that ends in RReLU runs to its end, and saves tensors past PyTorch's own stop."""
    model, x = make("relu")
    model[0] = nn.Sequential(model[0][0], nn.RReLU() if last == "rrelu" else OPERATIONS[last]())
    xmem.apply_checkpointing(model, "every", blocks=[model[0]], check_values=check_values)
    found = []
    for _ in range(11):
        model(x).sum().backward()
        model.zero_grad()
        found.append(allocated_bytes(backend))
    print(f"allocated after each step: {found} bytes")
    assert len(set(found[1:])) == 1


def test_a_forward_that_differentiates_inside_is_measured(backend):
    class Penalised(nn.Linear):
        def forward(self, x):
            y = super().forward(x).tanh()
            (slope,) = torch.autograd.grad(y.sum(), self.weight, create_graph=True)
            return y.sum() + slope.square().sum()

    with xmem.inference(Penalised(8, 8), inputs=torch.randn(4, 8)) as receipt:
        assert receipt.expected_saving_bytes > 0
