"""Modules that are exchanged after a model was traced are run, as without tracing."""

import copy
import inspect

import pytest
import torch
from staged import gradients, plainly, same
from torch import nn
from xmem_torch.tracing import traced

import xmem

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.line(x).tanh()


class Net(nn.Module):
    """Has modules in a list, in a Sequential that is looked into, in one that is not, and alone."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.body = nn.Sequential(Block(), nn.Sequential(Block(), Block()), Block())
        self.parts = nn.ModuleDict({"a": nn.ModuleDict({"b": Block()})})
        self.scale = nn.Module()
        self.scale.weight = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, bias: float = 0.0, *, again=False):
        x = self.inp(x) + bias
        for block in self.blocks:
            x = block(x)
        if again:
            x = self.blocks[0](x)
        x = self.parts["a"]["b"](self.body(x)) * self.scale.weight
        return self.head(x)


def other_scale():
    scale = nn.Module()
    scale.weight = nn.Parameter(torch.full((WIDTH,), 3.0))
    return scale


EXCHANGES = {
    "head": lambda m: setattr(m, "head", nn.Linear(WIDTH, 5)),
    "another kind": lambda m: setattr(m, "head", nn.Linear(WIDTH, 7, bias=False)),
    "in a list": lambda m: m.blocks.__setitem__(1, Block()),
    "the list": lambda m: setattr(m, "blocks", nn.ModuleList(Block() for _ in range(3))),
    "in a Sequential": lambda m: m.body.__setitem__(0, Block()),
    "the Sequential": lambda m: setattr(m, "body", copy.deepcopy(Net().body)),
    "deep in Sequentials": lambda m: m.body[1].__setitem__(1, Block()),
    "deep in dicts": lambda m: m.parts["a"].update({"b": Block()}),
    "a dict": lambda m: m.parts.update({"a": nn.ModuleDict({"b": Block()})}),
    "inside a block": lambda m: setattr(m.blocks[0], "line", nn.Linear(WIDTH, WIDTH)),
    "where a parameter lies": lambda m: setattr(m, "scale", other_scale()),
    "a parameter": lambda m: setattr(m.scale, "weight", other_scale().weight),
    "nothing": lambda m: None,
}


@pytest.mark.parametrize("kind", EXCHANGES)
def test_what_is_exchanged_is_run(backend, kind):
    torch.manual_seed(1)
    model, x = Net(), torch.randn(4, WIDTH)
    run = traced(model).forward(plainly)
    run(x)
    run(x, again=False)
    EXCHANGES[kind](model)
    for _ in range(2):
        expected, found = gradients(model, model, x), gradients(model, run, x)
        assert same(expected, found)
    assert same(gradients(model, model, x, bias=1.0), gradients(model, run, x, bias=1.0))


@pytest.mark.parametrize("kind", EXCHANGES)
def test_what_is_exchanged_in_a_planned_model_is_trained(kind):
    xmem.use("torch", device="cpu")
    torch.manual_seed(1)
    model, x = Net(), torch.randn(4, WIDTH)
    plan = xmem.plan(model, x, lambda m, b: m(b).square().mean(), budget="1GiB", verify=False)
    assert plan.traced
    receipt = plan.apply(model)
    model(x)
    EXCHANGES[kind](model)
    found = gradients(model, model, x)
    assert all(p.grad is not None for p in model.parameters())
    receipt.undo()
    assert same(gradients(model, model, x), found)


def test_a_model_is_traced_once_while_nothing_is_exchanged(backend, monkeypatch):
    from xmem_torch import tracing

    model, x = Net(), torch.randn(4, WIDTH)
    run, traces = traced(model).forward(plainly), []
    real = tracing.trace
    monkeypatch.setattr(tracing, "trace", lambda *args: traces.append(1) or real(*args))
    for _ in range(3):
        run(x)
    model.blocks[0].line = nn.Linear(WIDTH, WIDTH)  # is not what was traced
    run(x)
    assert traces == []
    model.head = nn.Linear(WIDTH, 5)
    for _ in range(3):
        run(x)
    assert traces == [1]


@pytest.mark.parametrize(
    "change", [lambda m: m.blocks.append(Block()), lambda m: m.blocks.__delitem__(2)]
)
def test_other_stages_are_an_error(backend, change):
    model, x = Net(), torch.randn(4, WIDTH)
    run = traced(model).forward(plainly)
    run(x)
    change(model)
    with pytest.raises(xmem.CompositionError, match=r"with these modules: stages \['blocks"):
        run(x)


def test_what_was_exchanged_is_let_go(backend):
    import gc
    import weakref

    model, x = Net(), torch.randn(4, WIDTH)
    run = traced(model).forward(plainly)
    run(x)
    run(x, 1.0)
    old = weakref.ref(model.head)
    model.head = nn.Linear(WIDTH, 5)
    run(x)
    gc.collect()
    assert old() is None


def test_the_signature_is_the_models_own(backend):
    model = Net()
    own = inspect.signature(model.forward)
    assert inspect.signature(traced(model).forward(plainly)) == own
