"""Plans that offload what stages keep: bytes as predicted, gradients those of the plain step."""

import copy
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import xmem
from xmem.conformance.full_disk import files_of_at_most
from xmem.errors import OffloadError, UsageError, XmemWarning
from xmem.planner import Op
from xmem.planner.plan import Plan
from xmem.planning import least_bytes, whole_bytes
from xmem.stage_options import offload_option
from xmem.steps import every

DEPTH = 6


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
    return nn.Sequential(*(Block(64) for _ in range(DEPTH)))


@pytest.fixture
def batch():
    return torch.randn(1024, 64)


def stepped(model, batch):
    torch.manual_seed(1)
    return xmem.active().plans.step(model, batch, loss_fn, gradients=True)


def assert_equal(found, exact):
    assert found.loss == exact.loss
    assert found.gradients.keys() == exact.gradients.keys()
    assert all((found.gradients[name] == exact.gradients[name]).all() for name in exact.gradients)


def with_offload_for_free(profile):
    """Return a profile whose offloaded stages take the time of others, so that plans offload."""
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


def offloading_plan(to="disk", ops=None):
    """Return a plan that offloads every stage and, without `ops`, runs none twice."""
    if ops is None:
        ops = [op for i in range(DEPTH) for op in (Op("G", i, 1), *([Op("Da", i)] if i else []))]
        ops += [Op("G", DEPTH), Op("L"), Op("B", DEPTH)]
        ops += [Op("B", i) for i in reversed(range(DEPTH))]
    options = ("keep all", offload_option(to))
    return Plan(
        chain_name="drawn",
        budget_bytes=0,
        ops=tuple(ops),
        seconds=1.0,
        peak_bytes=1,
        store_all_seconds=1.0,
        bound_seconds=1.0,
        gap=0.0,
        options=(options[1],) * DEPTH + ("keep all",),
        option_names=(options,) * DEPTH + (("keep all",),),
        stage_names=(*map(str, range(DEPTH)), "(loss)"),
        store_all_peak_bytes=1,
    )


def depots_of(model):
    choices = model[0].forward.conductor.script.choices
    return {choice.away.depot for choice in choices if choice.away is not None}


def test_a_profile_has_an_option_that_keeps_little(model, batch):
    profile = xmem.profile(model, batch, loss_fn, offload="disk", compress=(8,))
    for stage in profile.stages[:-1]:
        assert [o.name for o in stage.options] == ["keep all", "8 bits", "offload to disk"]
        whole, _, away = stage.options
        print(whole.kept_bytes, away.kept_bytes)
        # Its output and what is below 64 KiB stay: of 8 widths with masks, one and a bit.
        assert away.kept_bytes < 0.25 * whole.kept_bytes


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_an_offloading_plan_keeps_to_its_bytes(model, batch, share):
    profile = with_offload_for_free(xmem.profile(model, batch, loss_fn, offload="disk"))
    plan = xmem.plan(profile, budget=int(share * whole_bytes(profile)))
    assert "offload to disk" in plan.options
    print(plan.verified.measured_peak_bytes, plan.verified.predicted_peak_bytes)
    assert plan.verified.measured_peak_bytes == plan.verified.predicted_peak_bytes


def test_a_budget_below_what_recomputing_reaches_has_a_plan(model, batch):
    """A stage's inside is never on the device as a whole."""
    profile = xmem.profile(model, batch, loss_fn, offload="disk")
    least = least_bytes(replace(profile, stages=tuple(
        replace(stage, options=stage.options[:1]) for stage in profile.stages
    )))  # fmt: skip
    print(least_bytes(profile), least)
    assert least_bytes(profile) < least
    plan = xmem.plan(profile, budget=least_bytes(profile))
    assert "offload to disk" in plan.options
    assert plan.verified.measured_peak_bytes == plan.verified.predicted_peak_bytes
    exact = stepped(model, batch)
    plan.apply(model)
    assert_equal(stepped(model, batch), exact)


@pytest.mark.parametrize("ops", [None, every(DEPTH, 1)])
@pytest.mark.parametrize("to", ["disk", "host"])
def test_losses_and_gradients_are_those_of_the_plain_step(model, batch, to, ops):
    exact = stepped(model, batch)
    receipt = offloading_plan(to, ops).apply(model)
    [depot] = depots_of(model)
    for _ in range(3):
        assert_equal(stepped(model, batch), exact)
        assert depot.stats.count == 0
    print(depot.stats)
    assert depot.stats.written_bytes >= 3 * DEPTH * 2 * 1024 * 64 * 4
    receipt.undo()
    assert_equal(stepped(model, batch), exact)


def test_peaks_are_the_same_in_every_step(model, batch):
    offloading_plan().apply(model)
    peaks = {stepped(model, batch).peak_bytes for _ in range(20)}
    assert len(peaks) == 1, peaks


def test_a_depot_is_closed_with_its_plan(model, batch):
    receipt = offloading_plan().apply(model)
    [depot] = depots_of(model)
    closing = depot._close
    loss = loss_fn(model, batch)
    receipt.undo()
    del depot, receipt
    assert closing.alive  # backward reads from it
    loss.backward()
    del loss
    assert not closing.alive


def test_a_copied_and_a_pickled_model_have_depots_of_their_own(model, batch):
    exact = stepped(model, batch)
    offloading_plan().apply(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert depots_of(other) != depots_of(model)
        assert_equal(stepped(other, batch), exact)


@pytest.mark.parametrize("size", [1 << 16, 3 << 20])
def test_a_full_disk_raises_once_and_loses_nothing(model, batch, size):
    """At the second size two stages have been stored by then."""
    exact = stepped(model, batch)
    offloading_plan().apply(model)
    [depot] = depots_of(model)
    with files_of_at_most(size):
        with pytest.raises(OffloadError, match="make room"):
            stepped(model, batch)
        assert_equal(stepped(model, batch), exact)
    assert_equal(stepped(model, batch), exact)
    assert depot.stats.count == 0


def test_a_plan_is_put_to_use_in_another_process(tmp_path):
    offloading_plan().write(tmp_path / "plan.json")
    program = """
import sys, torch, test_torch_plans_offload as here, xmem
from torch import nn
from xmem.planner.plan import Plan
xmem.use("torch", device="cpu")
model = nn.Sequential(*(here.Block(64) for _ in range(here.DEPTH)))
batch = torch.randn(1024, 64)
exact = here.stepped(model, batch)
Plan.read(sys.argv[1]).apply(model, directory=sys.argv[2])
[depot] = here.depots_of(model)
assert str(depot.directory) == sys.argv[2]
here.assert_equal(here.stepped(model, batch), exact)
assert depot.stats.written_bytes > 0
"""
    command = [sys.executable, "-c", program, str(tmp_path / "plan.json"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, cwd="tests/on_torch")


def test_what_cannot_work_is_refused_beforehand(model, batch, tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(OffloadError, match="missing"):
        xmem.profile(model, batch, loss_fn, offload="disk", directory=missing)
    with pytest.raises(OffloadError, match="missing"):
        offloading_plan().apply(model, directory=missing)
    with pytest.raises(UsageError, match="for to='disk'"):
        offloading_plan("host").apply(model, directory=tmp_path)
    with pytest.raises(UsageError, match="offload is None"):
        xmem.profile(model, batch, loss_fn, directory=tmp_path)
    with pytest.raises(UsageError, match="nowhere"):
        xmem.profile(model, batch, loss_fn, offload="nowhere")
    assert not hasattr(model[0].forward, "conductor")


def test_host_on_a_cpu_warns(model, batch):
    with pytest.warns(XmemWarning, match="the device's memory is the host's"):
        profile = xmem.profile(model, batch, loss_fn, offload="host", repeats=1)
    assert profile.stages[0].options[1].name == "offload to host"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xmem.profile(model, batch, loss_fn, offload="disk", repeats=1)


class Changing(nn.Module):
    def forward(self, x):
        y = torch.exp(x)
        z = y * 2
        y.add_(1)
        return z + y


def test_an_offloaded_tensor_that_is_changed_in_place_raises(batch):
    model = nn.Sequential(nn.Linear(64, 64), Changing(), nn.Linear(64, 64))
    ops = [Op("G", 0), Op("G", 1, 1), Op("G", 2), Op("G", 3), Op("L")]
    ops += [Op("B", i) for i in (3, 2, 1, 0)]
    plan = offloading_plan(ops=ops)
    plan = replace(plan, stage_names=("0", "1", "2", "(loss)"), option_names=plan.option_names[:4])
    plan.apply(model)
    with pytest.raises(xmem.RecomputeMismatchError, match="in place"):
        loss_fn(model, batch).backward()


def test_parameters_stay(batch):
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(DEPTH)))
    offloading_plan().apply(layers)
    stepped(layers, torch.randn(64, 256))
    [depot] = depots_of(layers)
    assert depot.stats.written_bytes == 0
