"""Traced forwards are called as the model is; what cannot be traced is told."""

import copy
import pickle
import random

import pytest
import torch
from staged import NanoGPT, ResNet, check, gradients, plainly, same
from torch import nn
from torch.nn import functional
from xmem_torch.tracing import traced

import xmem


def test_arguments_are_those_of_the_model(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, scale=2.0, *, shift=None, **more):
            x = self.first(x) * scale
            if shift is not None:
                x = x + shift
            for value in more.values():
                x = x + value
            return self.second(x)

    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    check(model, x, names=["first", "second"])
    check(model, x, 3.0)
    check(model, x=x, scale=torch.tensor(4.0))
    check(model, x, shift=torch.ones(4), names=["first", "second"])
    check(model, x, 0.5, shift=1.0, third=torch.ones(4), fourth=2)
    run = traced(model).forward(plainly)
    with pytest.raises(TypeError, match="missing a required argument"):
        run()
    with pytest.raises(TypeError, match="multiple values"):
        run(x, x=x)


def test_a_call_that_takes_other_stages_is_refused(backend):
    model = NanoGPT()
    ids = torch.randint(0, 50, (2, 12))
    run = traced(model).forward(plainly)
    assert torch.equal(run(ids)["logits"][:, :0], model(ids)["logits"][:, :0])
    with pytest.raises(xmem.CompositionError, match="another path with these arguments"):
        run(ids, ids)

    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, n=1):
            for _ in range(n):
                x = self.layer(x)
            return x

    model = Choosing()
    check(model, torch.randn(2, 4))
    with pytest.raises(xmem.CompositionError, match="cannot be traced"):
        traced(model).forward(plainly)(torch.randn(2, 4), 2)


def test_the_training_mode_is_that_of_the_call(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            return self.second(functional.dropout(x, 0.5, self.training))

    model, x = Net(), torch.randn(3, 4)
    run = traced(model).forward(plainly)
    for mode in (True, False, True):
        model.train(mode)
        assert same(gradients(model, run, x), gradients(model, model, x))


@pytest.mark.parametrize(
    "returning",
    [
        lambda a, b: (a, b),
        lambda a, b: {"b": b, "a": a, "none": None},
        lambda a, b: [b[:, 0], a, (b,)],
        lambda a, b: b.view(-1),
        lambda a, b: (a, a),
        lambda a, b: (b, b.shape[0], 3, "text"),
    ],
)
def test_the_returned_structure_is_the_models(backend, returning):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            a = self.first(x)
            return returning(a, self.second(a))

    model = Net()
    check(model, torch.randn(3, 4), names=["first", "second"])


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def data_dependent(self, x):
    x = self.first(x)
    return self.second(x) if x.sum() > 0 else x


def star_args(self, *xs):
    for x in xs:
        x = self.first(x)
    return x


def iterating(self, x):
    return sum(self.first(row) for row in x)


def counting(self, x):
    return self.first(x)[: len(x)]


def in_a_mode(self, x):
    with torch.no_grad():
        x = self.first(x)
    return self.second(x)


def in_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        x = self.first(x)
    return self.second(x.float())


def in_a_region(self, x):
    return self.second(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False))


def a_constant(self, x):
    return self.second(self.first(x) + torch.from_numpy(self.noise))


def random_depth(self, x):
    x = self.first(x)
    return self.second(x) if random.random() < 0.5 else x


def keeping(self, x):
    self.kept = self.first(x)
    self.seen.append(self.kept)
    return self.second(self.kept)


def changing_its_input(self, x):
    y = self.first(x)
    x.add_(1)
    return self.second(x + y)


def setting(self, x):
    x = self.first(x)
    x[:, 0] = 0
    return self.second(x)


def failing(self, x):
    raise KeyError(x)


@pytest.mark.parametrize(
    "forward",
    [
        *(data_dependent, star_args, iterating, counting, in_a_mode, in_autocast, in_a_region),
        *(a_constant, random_depth, keeping, changing_its_input, setting, failing),
    ],
)
def test_a_forward_that_a_graph_cannot_hold_is_none_and_leaves_no_trace(backend, forward):
    model = type("Net", (Deciding,), {"forward": forward})()
    model.seen, model.noise = [], torch.zeros(4).numpy()
    before, state = dict(vars(model)), random.getstate()
    assert traced(model) is None
    assert vars(model) == before
    assert model.seen == []
    assert random.getstate() == state


def test_a_copy_and_a_pickle_run_their_own_modules(backend):
    model, x = ResNet().eval(), torch.randn(2, 3, 8, 8)
    model.stages = traced(model)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        run = copied.stages.forward(plainly)
        assert torch.equal(run(x), expected)
        with torch.no_grad():
            copied.fc.weight.zero_()
            copied.fc.bias.zero_()
        assert not run(x).any()
        assert torch.equal(model.stages.forward(plainly)(x), expected)
