"""Plans that pack what stages keep: bytes as predicted, gradients off by the rounding alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import xmem
from xmem.compressing import MIN_BYTES
from xmem.conformance.small import relative_error
from xmem.errors import CapabilityError
from xmem.planner import Op
from xmem.planner.plan import Plan
from xmem.planning import whole_bytes
from xmem.playing import script
from xmem.stage_options import packed_option
from xmem.steps import every


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def loss_fn(model, batch):
    return (model(batch) - batch).square().mean()


@pytest.fixture
def model():
    return nn.Sequential(*(Block(64) for _ in range(6)))


@pytest.fixture
def batch():
    return torch.randn(1024, 64)


def gradients(model, batch):
    return xmem.active().plans.step(model, batch, loss_fn, gradients=True).gradients


def test_a_profile_has_an_option_for_each_number_of_bits(model, batch):
    profile = xmem.profile(model, batch, loss_fn, compress=(8, 4))
    for stage in profile.stages[:-1]:
        whole, eight, four = stage.options
        assert [o.name for o in stage.options] == ["keep all", "8 bits", "4 bits"]
        print(whole.kept_bytes, eight.kept_bytes, four.kept_bytes)
        assert four.kept_bytes < eight.kept_bytes < 0.6 * whole.kept_bytes


def with_packing_for_free(profile):
    """Return a profile whose packed stages take the time of others, so that plans pack."""
    stages = []
    for stage in profile.stages:
        whole = stage.options[0]
        times = {
            "forward_seconds": whole.forward_seconds,
            "backward_seconds": whole.backward_seconds,
        }
        options = tuple(replace(option, **times) for option in stage.options)
        stages.append(replace(stage, options=options))
    return replace(profile, stages=tuple(stages))


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_a_packed_plan_keeps_to_its_bytes(model, batch, share):
    profile = with_packing_for_free(xmem.profile(model, batch, loss_fn, compress=(8,)))
    plan = xmem.plan(profile, budget=int(share * whole_bytes(profile)))
    assert any(option != "keep all" for option in plan.options)
    assert plan.verified.measured_peak_bytes == plan.verified.predicted_peak_bytes


def packed_plan(bits):
    """Return a plan that keeps every stage packed and runs none twice."""
    ops = [op for i in range(6) for op in (Op("G", i, 1), *([Op("Da", i)] if i else []))]
    ops += [Op("G", 6), Op("L"), Op("B", 6)]
    ops += [op for i in reversed(range(6)) for op in (Op("B", i),)]
    options = ("keep all", packed_option(bits))
    return Plan(
        chain_name="drawn",
        budget_bytes=0,
        ops=tuple(ops),
        seconds=1.0,
        peak_bytes=1,
        store_all_seconds=1.0,
        bound_seconds=1.0,
        gap=0.0,
        options=(packed_option(bits),) * 6 + ("keep all",),
        option_names=(options,) * 6 + (("keep all",),),
        stage_names=(*map(str, range(6)), "(loss)"),
        store_all_peak_bytes=1,
    )


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.2)])
def test_gradients_are_off_by_the_rounding(model, batch, bits, most):
    torch.manual_seed(1)
    exact = gradients(model, batch)
    receipt = packed_plan(bits).apply(model)
    torch.manual_seed(1)
    found = gradients(model, batch)
    receipt.undo()
    assert 1e-5 < relative_error(found, exact) < most


def test_parameters_are_not_packed():
    """A linear layer saves its input, a value, and its weight: packed, that would change gradients.

    The weights are larger than what is left alone for its size.
    """
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    assert layers[0].weight.nbytes >= MIN_BYTES
    batch = torch.randn(64, 256)
    exact = gradients(layers, batch)
    receipt = packed_plan(4).apply(layers)
    found = gradients(layers, batch)
    receipt.undo()
    assert relative_error(found, exact) == 0


def test_a_packed_stage_that_is_run_again_is_packed_again(model, batch):
    plan = packed_plan(8)
    ops = every(6, 1)
    torch.manual_seed(1)
    exact = gradients(model, batch)
    made = Plan(**{**{n: getattr(plan, n) for n in plan.__dataclass_fields__}, "ops": tuple(ops)})
    receipt = made.apply(model)
    torch.manual_seed(1)
    found = gradients(model, batch)
    receipt.undo()
    assert 1e-5 < relative_error(found, exact) < 0.01


def test_a_packed_tensor_that_is_changed_in_place_raises(batch):
    """As it does without a plan."""

    class Changing(nn.Module):
        def forward(self, x):
            y = torch.exp(x)
            z = y * 2
            y.add_(1)
            return z + y

    model = nn.Sequential(nn.Linear(64, 64), Changing(), nn.Linear(64, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss_fn(model, batch).backward()
    plan = packed_plan(8)
    ops = [Op("G", 0), Op("G", 1, 1), Op("G", 2), Op("G", 3), Op("L"), Op("B", 3)]
    ops += [Op("B", 2), Op("B", 1), Op("B", 0)]
    kept = {n: getattr(plan, n) for n in plan.__dataclass_fields__}
    kept.update(
        ops=tuple(ops), stage_names=("0", "1", "2", "(loss)"), option_names=plan.option_names[:4]
    )
    receipt = Plan(**kept).apply(model)
    with pytest.raises(xmem.RecomputeMismatchError, match="in place"):
        loss_fn(model, batch).backward()
    receipt.undo()


def test_a_plan_goes_through_json_with_the_names_of_its_options():
    plan = packed_plan(4)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", ["offload", "half", "3 bits"])
def test_options_that_cannot_be_executed_are_refused(name):
    with pytest.raises(CapabilityError, match=name):
        script(every(2, 1), 2, [("keep all", name)] * 2)


def test_a_profile_refuses_other_bits(model, batch):
    with pytest.raises(xmem.UsageError, match="8, 4 and 2"):
        xmem.profile(model, batch, loss_fn, compress=(3,))


class Randomised(nn.Module):
    """RReLU saves its noise before it is drawn; a copy of it is a copy of nothing."""

    def __init__(self):
        super().__init__()
        self.linear, self.relu = nn.Linear(64, 64), nn.RReLU()

    def forward(self, x):
        return self.relu(self.linear(x)).sin()


class Negated(nn.Module):
    """Saves a tensor that PyTorch holds as another one's negative."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        x = self.linear(x)
        return (x * torch.complex(x, x).conj().imag).sin()


@pytest.mark.parametrize("kind", [Randomised, Negated])
def test_what_the_codec_cannot_copy_is_kept(batch, kind):
    model = nn.Sequential(*(kind() for _ in range(6)))
    torch.manual_seed(1)
    exact = gradients(model, batch)
    receipt = packed_plan(8).apply(model)
    torch.manual_seed(1)
    found = gradients(model, batch)
    receipt.undo()
    assert 1e-5 < relative_error(found, exact) < 0.02


def test_half_copies_of_weights_are_not_packed():
    """The gradient of a linear chain's first bias needs weights only."""
    model, batch = nn.Sequential(*(nn.Linear(192, 192) for _ in range(6))), torch.randn(256, 192)

    def first_bias():
        model.zero_grad()
        with xmem.autocast("bfloat16"):
            loss = model(batch).sum()
        loss.backward()
        return model[0].bias.grad.clone()

    exact = first_bias()
    receipt = packed_plan(4).apply(model)
    found = first_bias()
    receipt.undo()
    assert torch.equal(found, exact)
