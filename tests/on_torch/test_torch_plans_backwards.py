"""Plans and backwards other than one from the model's end."""

import pytest
import torch
from planned import PLANS, WIDTH, Chained, Functions, batch, check, equal, four, mean_square
from planned import result as results
from torch import nn

import xmem


@pytest.mark.parametrize("ops", PLANS)
def test_losses_on_values_in_between(backend, ops):
    class Model(Functions):
        def inputs(self, i, found):
            self.middle = found[2] if i == 3 else None
            return (found[-1],), {}

    def together(model, x):
        return model(x).square().mean() + model.middle.abs().mean()

    def one_by_one(model, x):
        loss = model(x).square().mean()
        model.middle.abs().mean().backward(retain_graph=True)
        return loss

    def the_last_first(model, x):
        model(x).square().mean().backward(retain_graph=True)
        return model.middle.abs().mean()

    for train in (together, one_by_one, the_last_first):
        check(backend.plans, four(), train, [ops], model=Model)


@pytest.mark.parametrize("ops", PLANS)
def test_a_graph_is_gone_through_twice(backend, ops):
    def train(model, x):
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return loss

    check(backend.plans, four(), train, [ops])


@pytest.mark.parametrize("ops", PLANS)
def test_a_graph_that_was_not_retained_says_so(backend, ops):
    loss = mean_square(Chained(backend.plans, four(), ops), batch())
    loss.backward()
    with pytest.raises((xmem.CompositionError, RuntimeError), match="retain_graph=True"):
        loss.backward()


@pytest.mark.parametrize("ops", PLANS)
def test_gradients_have_gradients(backend, ops):
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]

    def train(model, x):
        loss = mean_square(model, x)
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in found)

    plain, planned = (
        results(Chained(backend.plans, stages, one), train, batch()) for one in (None, ops)
    )
    for a, b in zip(plain, planned, strict=True):
        torch.testing.assert_close(a, b)


def test_a_forward_that_ends_early_is_warned_of(backend):
    class Model(Functions):
        def forward(self, x):
            self.run = self.plans.open(self.script, ["s"] * 4, self.how, traced=False)
            for i, stage in enumerate(self.stages[:3]):
                x = self.run.first(i, stage, (x,), {})
            return x

    plain = results(Chained(backend.plans, four()[:3]), mean_square, batch())
    for ops in PLANS:
        with pytest.warns(xmem.XmemWarning, match="3 of 4"):
            planned = results(Model(backend.plans, four(), ops), mean_square, batch())
        count = len(list(nn.ModuleList(four()[:3]).parameters())) + 1
        assert equal(plain[:count], planned[:count])
