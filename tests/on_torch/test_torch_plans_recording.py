"""Where a planned model runs plainly: under torch.compile and torch.func."""

import warnings

import pytest
import torch
from planned import WIDTH, Line, Mlp, batch, mean_square
from torch import nn
from xmem_torch import plans

import xmem


def planned(how, budget=0.5):
    xmem.use("torch", device="cpu")
    torch.manual_seed(1)
    model = nn.Sequential(Mlp(), Mlp(), Mlp(), Mlp(), Line()).eval()
    x = batch()
    profile = xmem.profile(model, x, mean_square, repeats=1, stages=how)
    return model, x, xmem.plan(profile, budget=budget, verify=False)


def gradients(model, run, x):
    model.zero_grad()
    run(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


TRANSFORMS = {
    "grad": lambda f, p: torch.func.grad(f)(p),
    "vjp": lambda f, p: torch.func.vjp(f, p)[1](torch.tensor(1.0))[0],
    "jacrev": lambda f, p: torch.func.jacrev(f)(p),
    "jvp": lambda f, p: {"": torch.func.jvp(f, (p,), (p,))[1]},
    "vmap": lambda f, p: {
        "": torch.func.vmap(f)({k: torch.stack([v, 2 * v]) for k, v in p.items()})
    },
}


@pytest.mark.parametrize("how", ["traced", "modules"])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_of_torch_func_see_the_model_itself(kind, how):
    model, x, plan = planned(how)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(given):
        return torch.func.functional_call(model, given, (x,)).square().mean()

    expected = TRANSFORMS[kind](loss, parameters)
    plan.apply(model)
    found = TRANSFORMS[kind](loss, parameters)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_functions_inside_of_no_transform_are_planned(backend):
    seen = []
    torch.func.grad(lambda x: seen.append(backend.plans.recording()) or x.sum())(torch.ones(2))
    seen.append(backend.plans.recording())
    assert seen == [False, True]


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("how", ["traced", "modules"])
def test_a_compiled_model_says_once_that_its_plan_is_off(how, fullgraph):
    torch._dynamo.reset()
    plans._warn_compiled.cache_clear()
    model, x, plan = planned(how)
    expected = gradients(model, model, x)
    plan.apply(model)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    with pytest.warns(xmem.XmemWarning, match="torch.compile") as caught:
        found = gradients(model, compiled, x)
    assert len([w for w in caught if w.category is xmem.XmemWarning]) == 1
    assert all(map(torch.equal, found, expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error", xmem.XmemWarning)
        gradients(model, compiled, x)
        gradients(model, torch.compile(model, backend="eager"), torch.randn(2, 3, WIDTH))
        gradients(model, model, x)
