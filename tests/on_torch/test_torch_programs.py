"""Random programs give the same, bit by bit, with and without recomputation."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from program_models import Builder, plainly
from program_runs import Outcome, apply, differences, numbers
from programs import (
    QUIET,
    BatchNorm,
    Chain,
    Linear,
    Program,
    Region,
    Sizes,
    Step,
    examples,
    programs,
)
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import xmem

SIZES = Sizes(widths=(1, 3, 8, 16), batches=(2, 5, 8), parts=3, depth=2, blocks=5)
ACTIVATIONS = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
}


class Kit:
    """PyTorch's parts."""

    tanh = staticmethod(torch.tanh)
    modules = nn.ModuleList

    @staticmethod
    @functools.cache
    def module(mixin):
        return type(mixin.__name__, (mixin, nn.Module), {"forward": mixin.run})

    @staticmethod
    def parameter(array, frozen):
        return nn.Parameter(torch.from_numpy(array), requires_grad=not frozen)

    @staticmethod
    def linear(weight, bias):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        made.weight, made.bias = weight, bias
        return made

    @staticmethod
    def layer_norm(weight, bias):
        made = nn.LayerNorm(len(weight))
        made.weight, made.bias = weight, bias
        return made

    @staticmethod
    def batch_norm(weight, bias):
        made = nn.BatchNorm1d(len(weight))
        made.weight, made.bias = weight, bias
        return made

    @staticmethod
    def embedding(weight):
        return nn.Embedding(*weight.shape, _weight=weight)

    @staticmethod
    def activation(kind):
        return ACTIVATIONS[kind]()

    @staticmethod
    def dropout(probability, path):
        return nn.Dropout(probability)


def array(tensor):
    return None if tensor is None else tensor.detach().numpy().copy()


def run(program, call=plainly):
    """Build a program's model, with regions through `call`, and run it forward and backward."""
    outcome = Outcome(Builder(Kit, program, call))
    model, parameters = outcome.builder.model, outcome.builder.parameters
    if call is not plainly:
        apply(model, program)
    start, weights = map(torch.from_numpy, numbers(program))
    x = start.requires_grad_(program.front == "learnt")
    torch.manual_seed(3)
    for _ in range(program.passes):
        y = model(x)
        loss = (y * weights).sum() + (y * y).mean()
        outcome.losses.append(array(loss))
        outcome.outputs.append(array(y))
        if loss.requires_grad:
            loss.backward()
    outcome.gradients = {path: array(p.grad) for path, p in parameters.items()}
    outcome.gradients["input"] = array(x.grad)
    for path, norm in outcome.builder.norms.items():
        outcome.buffers.update((f"{path}.{n}", array(b)) for n, b in norm.named_buffers())
    return outcome


def same(a, b, _):
    return np.array_equal(a, b, equal_nan=True)


def difference(program, call=None):
    return differences(program, run(program), run(program, call or xmem.checkpoint), same)


@pytest.mark.filterwarnings("ignore::xmem.XmemWarning")
@given(programs(SIZES))
@settings(QUIET, max_examples=15, derandomize=True)
def test_random_programs_give_the_same_gradients_with_and_without_regions(backend, program):
    assert difference(program) == []


PAIR = (Linear(), BatchNorm())


def small(*steps, segment=(0, 1, 2), **regions):
    blocks = tuple(Chain(regions.get(f"block{i}", PAIR)) for i in range(3))
    return Program(8, 5, "learnt", (), blocks, steps, layout=(segment,))


@pytest.mark.filterwarnings("ignore::xmem.XmemWarning")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(small(Step(0), Step(1), Step(2, region=True)), id="region of a placeholder"),
        pytest.param(
            small(
                Step(0), Step(1), Step(2), segment=(0, 2), block1=(Region("module", Chain(PAIR)),)
            ),
            id="region between the blocks of a segment",
        ),
        pytest.param(small(Step(0), Step(1, dropped=True), Step(2)), id="unread output"),
        pytest.param(small(Step(0, dropped=True), Step(1), Step(2)), id="unread output first"),
    ],
)
def test_programs_on_which_segments_once_failed(backend, program):
    assert difference(program) == []


def detached(function, *args, **kwargs):
    """Lose the gradients of the inputs."""
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    return xmem.checkpoint(function, *args, **kwargs)


def unlearnt(function, *args, **kwargs):
    """Lose all gradients."""
    with torch.no_grad():
        return function(*args, **kwargs)


def twice(function, *args, **kwargs):
    """Update statistics twice."""
    with torch.no_grad(), torch.random.fork_rng():
        function(*args, **kwargs)
    return xmem.checkpoint(function, *args, **kwargs)


def redrawn(function, *args, **kwargs):
    """Draw other random numbers in the second pass."""
    return xmem.checkpoint(function, *args, preserve_rng=False, **kwargs)


def pytorchs(function, *args, **kwargs):
    """Be PyTorch's own, which updates statistics twice."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def kept(function, *args, **kwargs):
    """Recompute nothing."""
    return function(*args, **kwargs)


@pytest.mark.parametrize("broken", [detached, unlearnt, twice, redrawn, pytorchs, kept])
def test_the_comparison_catches_broken_checkpoints(backend, broken):
    assert any(difference(p, broken) for p in examples(programs(SIZES, layouts=False), 15))
