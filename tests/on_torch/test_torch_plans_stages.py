"""Stages under plans that are odd inside, change things, or do otherwise the second time."""

import gc

import pytest
import torch
from planned import (
    FOUR,
    KEPT,
    PLANS,
    WIDTH,
    Chained,
    Convolution,
    Line,
    Mlp,
    batch,
    check,
    equal,
    every,
    four,
    mean_square,
)
from torch import nn
from torch.nn import functional

import xmem
from xmem.planner import parse_ops
from xmem.playing import is_playing_again, script
from xmem.records import Recompute

AGAIN = (xmem.RecomputeMismatchError, "changed in place")
ONCE = (RuntimeError, "modified by an inplace operation")  # in PyTorch's own graph, all along


@pytest.mark.parametrize(("ops", "expected"), [(FOUR, AGAIN), (KEPT, ONCE), (every(4), AGAIN)])
def test_a_parameter_changed_before_backward_is_an_error(backend, ops, expected):
    stages = four()
    loss = mean_square(Chained(backend.plans, stages, ops), batch())
    with torch.no_grad():
        stages[2].heads.in_proj_weight.add_(1)
    error, match = expected
    with pytest.raises(error, match=match):
        loss.backward()


def test_what_a_stage_calls_knows_when_it_is_run_again(backend):
    class Asking(Line):
        def forward(self, x):
            asked.append(is_playing_again())
            return super().forward(x)

    asked = []
    torch.manual_seed(1)
    model = Chained(backend.plans, [Mlp(), Asking(), Line(), Line()], every(4))
    mean_square(model, batch()).backward()
    assert asked == [False, True, True][: len(asked)]
    assert len(asked) > 1
    assert not is_playing_again()


def test_a_second_pass_that_fails_is_over(backend):
    class Failing(Line):
        def forward(self, x):
            if is_playing_again():
                raise ArithmeticError
            return super().forward(x)

    model = Chained(backend.plans, [Mlp(), Failing(), Line(), Line()], every(4))
    with pytest.raises(ArithmeticError):
        mean_square(model, batch()).backward()
    assert not is_playing_again()


def test_a_stage_that_changes_its_input_is_an_error(backend):
    class Hungry(nn.Module):
        def forward(self, x):
            return x.add_(1).tanh()

    model = Chained(backend.plans, [Mlp(), Hungry(), Line(), Line()], FOUR)
    with pytest.raises(xmem.CompositionError, match=r"stages.1 changes its input tensor 0"):
        model(batch())


def test_other_values_are_found(backend):
    how = Recompute(preserve_rng=False, check_values=True)
    model = Chained(backend.plans, four(), FOUR, how)
    with pytest.raises(xmem.RecomputeMismatchError, match="other values") as caught:
        mean_square(model, batch()).backward()
    assert caught.value.cause == "randomness"
    check(backend.plans, four(), mean_square, x=batch())


def test_a_stage_that_does_otherwise_the_second_time_is_an_error(backend):
    class Moody(nn.Module):
        calls = 0

        def forward(self, x):
            Moody.calls += 1
            return x.tanh().sin() if Moody.calls == 1 else x.tanh()

    model = Chained(backend.plans, [Mlp(), Moody(), Line(), Line()], every(4))
    with pytest.raises(xmem.RecomputeMismatchError, match=r"stages.1.*saves 1 tensors.* 2"):
        mean_square(model, batch()).backward()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return functional.rrelu(self.line(x), training=True)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[1], (gradient * ctx.saved_tensors[0]).sum((0, 1))


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Own.apply(x.sin(), self.scale)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        return xmem.checkpoint(self.inner, x).tanh()


@pytest.mark.parametrize("kind", [Noisy, Owner, Nested])
def test_what_is_odd_inside_of_a_stage(backend, kind):
    torch.manual_seed(1)
    check(backend.plans, [Mlp(), kind(), Line(), kind()], mean_square)


def test_a_normed_weight_is_that_of_the_first_pass(backend):
    torch.manual_seed(1)

    def spectral():
        return torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    check(backend.plans, [Mlp(), spectral(), Line(), spectral()], mean_square)


def test_weights_may_be_others_for_one_call(backend):
    stages = four()
    model, planned = Chained(backend.plans, stages), Chained(backend.plans, stages, FOUR)
    found = []
    for one in (model, planned):
        torch.manual_seed(4)
        leaves = {n: p.detach().mul(2).requires_grad_() for n, p in one.named_parameters()}
        output = torch.func.functional_call(one, leaves, (batch(),))
        found.append(torch.autograd.grad(output.square().mean(), list(leaves.values())))
    assert equal(*found)


class Force(nn.Module):
    def forward(self, x):
        x = x if x.requires_grad else x.requires_grad_()
        [force] = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return x + force


def test_a_stage_that_differentiates_inside_must_be_kept(backend):
    stages = [Mlp(), Force(), Line(), Line()]
    check(backend.plans, stages, mean_square, [KEPT])
    with pytest.raises(xmem.CompositionError, match="differentiates inside"):
        Chained(backend.plans, stages, FOUR)(batch())


def test_stages_are_called_in_order(backend):
    run = backend.plans.open(script(parse_ops(KEPT), 4), list("abcd"), Recompute(), traced=False)
    with pytest.raises(xmem.CompositionError, match="'b' is called as number 0"):
        run.first(1, Mlp(), (batch(),), {})


def test_a_forward_that_fails_leaves_nothing(backend):
    class Failing(Line):
        fails = True

        def forward(self, x):
            y = super().forward(x)
            if self.fails:
                raise ArithmeticError
            return y

    torch.manual_seed(1)
    stages = [Mlp(), Convolution(), Failing(), Line()]
    for ops in PLANS:
        model = Chained(backend.plans, stages, ops)
        gc.collect()
        before_bytes = backend.measure.counters().allocated_bytes
        with pytest.raises(ArithmeticError):
            model(batch())
        model.run = None
        gc.collect()
        assert backend.measure.counters().allocated_bytes == before_bytes
    stages[2].fails = False
    check(backend.plans, stages, mean_square)
