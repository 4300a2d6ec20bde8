"""Plans with what else training does: precision, accumulation, frozen parts, extra inputs."""

import pytest
import torch
from planned import (
    FOUR,
    PLANS,
    WIDTH,
    Attention,
    Chained,
    Convolution,
    Functions,
    Line,
    Mlp,
    batch,
    check,
    equal,
    four,
    mean_square,
)
from planned import result as results
from torch import nn

import xmem


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, ids):
        return self.table(ids)


def test_a_batch_of_integers_needs_no_gradient(backend):
    torch.manual_seed(1)
    stages = [Embedded(), Mlp(), Attention(), Line()]
    check(backend.plans, stages, mean_square, x=torch.randint(0, 10, (3, 6)))


@pytest.mark.parametrize("ops", PLANS)
def test_the_batch_gets_its_gradient(backend, ops):
    stages, x = four(), batch().requires_grad_()
    found = []
    for one in (None, ops):
        x.grad = None
        found.append([*results(Chained(backend.plans, stages, one), mean_square, x), x.grad])
    assert equal(*found)


@pytest.mark.parametrize("ops", PLANS)
def test_gradients_are_asked_for_by_name(backend, ops):
    stages = four()
    found = []
    for one in (None, ops):
        torch.manual_seed(3)
        model = Chained(backend.plans, stages, one)
        wanted = [p for n, p in model.named_parameters() if "weight" in n][::2]
        found.append(torch.autograd.grad(mean_square(model, batch()), wanted))
    assert equal(*found)


@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1, 2), (3,), (0, 1, 3)])
def test_frozen_stages_have_no_gradient(backend, frozen):
    stages = four()
    for i in frozen:
        stages[i].requires_grad_(requires_grad=False)
    check(backend.plans, stages, mean_square)


def test_torch_autocast_is_replayed(backend):
    def train(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    check(backend.plans, four(), train)


def test_xmem_autocast_is_replayed(backend):
    def train(model, x):
        with xmem.autocast("bfloat16", keep_fp32=("softmax",)):
            return model(x).float().square().mean()

    check(backend.plans, four(), train)


def test_gradients_accumulate_over_micro_batches(backend):
    def train(model, x):
        for part in (0, 1):
            mean_square(model, batch(part)).backward()
        return mean_square(model, x)

    check(backend.plans, four(), train)


def test_two_forwards_share_one_backward(backend):
    check(backend.plans, four(), lambda m, x: m(x).square().mean() + m(x * 2).abs().mean())


def test_two_forwards_have_their_backwards_in_either_order(backend):
    for order in (0, 1):

        def train(model, x, order=order):
            losses = [mean_square(model, x), mean_square(model, x * 2)]
            losses.pop(order).backward()
            return losses[0]

        check(backend.plans, four(), train)


def test_a_scaler_steps(backend):
    found = []
    for ops in (None, *PLANS):
        stages = four()
        model = Chained(backend.plans, stages, ops)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
        for _ in range(3):
            torch.manual_seed(5)
            optimizer.zero_grad()
            scaler.scale(mean_square(model, batch())).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append([p.detach() for p in model.parameters()])
    assert all(equal(found[0], other) for other in found[1:])


def test_one_module_is_two_stages(backend):
    torch.manual_seed(1)
    mlp, line = Mlp(), Line()
    check(backend.plans, [mlp, line, mlp, line], mean_square)


class Gated(nn.Module):
    """Has two inputs beside the value before it."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, gate, *, shift):
        return self.line(x) * torch.sigmoid(gate) + shift.tanh()


def test_gradients_of_extra_inputs_flow(backend):
    class Model(Functions):
        def inputs(self, i, found):
            return (found[-1], self.gate * 2), {"shift": self.shift}

    torch.manual_seed(1)
    stages = [Gated() for _ in range(4)]
    gate, shift = torch.randn(WIDTH).requires_grad_(), nn.Parameter(torch.randn(WIDTH))
    Model.gate, Model.shift = gate, shift
    for ops in PLANS:
        found = []
        for one in (None, ops):
            gate.grad = shift.grad = None
            model = Model(backend.plans, stages, one)
            found.append([*results(model, mean_square, batch()), gate.grad, shift.grad])
        assert equal(*found)


class Merging(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, skip):
        return self.line(torch.cat([x, skip], -1)).relu()


def test_a_stage_reads_an_output_before_the_last(backend):
    class Model(Functions):
        def inputs(self, i, found):
            return ((found[-1], found[1]) if i == 3 else (found[-1],)), {}

    torch.manual_seed(1)
    stages = [Mlp(), Convolution(), Line(), Merging()]
    check(backend.plans, stages, mean_square, model=Model)
    model = Model(backend.plans, stages, FOUR)
    mean_square(model, batch())
    assert model.run.reads == [(1, 3)]
    assert model.run.value_bytes == [3 * 6 * WIDTH * 4] * 5


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, given):
        x = given["x"] if isinstance(given, dict) else given
        a, b = self.line(x).chunk(2, -1)
        return {"x": a.tanh(), "rest": [b, x]}


class Joined(nn.Module):
    def forward(self, given):
        return given["x"] * given["rest"][0].sigmoid() + given["rest"][1]


def test_a_value_may_be_several_tensors(backend):
    torch.manual_seed(1)
    check(backend.plans, [Pair(), Pair(), Joined(), Line()], mean_square)


def test_what_a_model_does_between_stages_is_its_own(backend):
    class Model(Functions):
        def inputs(self, i, found):
            x = found[-1]
            if i == 1:
                x = x.view(9, 2, WIDTH)  # a view of the value
            if i == 2:
                x = x.view(3, 6, WIDTH)
                x += 1  # in place
            if i == 3:
                x = x * 2 + found[0]
            return (x,), {}

    torch.manual_seed(1)
    check(backend.plans, [Line(), nn.GELU(), Line(), Mlp()], mean_square, model=Model)
