"""Plans that offload what stages keep: bytes as predicted, gradients those of the plain step."""

import copy
import gc
import subprocess
import sys
from dataclasses import replace

import pytest
from chain import normal
from plan_runs import live

import xmem
from xmem.conformance.full_disk import files_of_at_most
from xmem.conformance.small import relative_error
from xmem.errors import OffloadError
from xmem.planner import Op
from xmem.planner.plan import Plan
from xmem.planning import whole_bytes
from xmem.stage_options import offload_option
from xmem.steps import every

WIDTH, DEPTH = 64, 6


def block(width=WIDTH):
    from jittor import nn

    class Block(nn.Module):
        def __init__(self):
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)
            self.dropout = nn.Dropout(0.1, is_train=True)

        def execute(self, x):
            return x + self.dropout(self.down(nn.relu(self.up(self.norm(x)))))

    return Block()


def loss_fn(model, batch):
    return ((model(batch) - batch) ** 2).mean()


@pytest.fixture
def model(backend):
    from jittor import nn

    return nn.Sequential(*(block() for _ in range(DEPTH)))


@pytest.fixture
def batch(backend):
    return normal(1024, WIDTH)


def stepped(model, batch):
    import jittor as jt

    jt.set_global_seed(1)
    return xmem.active().plans.step(model, batch, loss_fn, gradients=True)


def assert_equal(found, exact):
    """What relu hands on is made again; Jittor may fuse and so round that otherwise."""
    assert found.loss == pytest.approx(exact.loss, rel=1e-6)
    assert relative_error(found.gradients, exact.gradients) < 1e-5


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
        ops = [Op("G", i, 1) for i in range(DEPTH)]
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
    execute = model.layers["0"].execute if hasattr(model, "layers") else model[0].execute
    choices = execute.conductor.script.choices
    return {choice.away.depot for choice in choices if choice.away is not None}


@pytest.fixture(scope="module")
def profile(backend):
    import jittor as jt
    from jittor import nn

    jt.set_global_seed(0)
    model = nn.Sequential(*(block() for _ in range(DEPTH)))
    return xmem.profile(model, normal(1024, WIDTH), loss_fn, offload="disk")


def test_a_profile_has_an_option_that_keeps_little(profile):
    for stage in profile.stages[:-1]:
        assert [o.name for o in stage.options] == ["keep all", "offload to disk"]
        whole, away = stage.options
        print(whole.kept_bytes, away.kept_bytes)
        # Its output and what is below 64 KiB stay: of 8 widths with masks, one and a bit.
        assert away.kept_bytes < 0.25 * whole.kept_bytes


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_an_offloading_plan_keeps_to_its_bytes(profile, share):
    profile = with_offload_for_free(profile)
    plan = xmem.plan(profile, budget=int(share * whole_bytes(profile)))
    assert "offload to disk" in plan.options
    print(plan.verified.measured_peak_bytes, plan.verified.predicted_peak_bytes)
    assert plan.verified.measured_peak_bytes == plan.verified.predicted_peak_bytes


@pytest.mark.parametrize("ops", [None, every(DEPTH, 1)])
@pytest.mark.parametrize("to", ["disk", "host"])
def test_losses_and_gradients_are_those_of_the_plain_step(model, batch, to, ops):
    exact = stepped(model, batch)
    before = live(xmem.active())
    receipt = offloading_plan(to, ops).apply(model)
    [depot] = depots_of(model)
    for _ in range(3):
        assert_equal(stepped(model, batch), exact)
        assert depot.stats.count == 0
        assert live(xmem.active()) == before
    print(depot.stats)
    assert depot.stats.written_bytes >= 3 * DEPTH * 1024 * 4 * WIDTH * 4
    receipt.undo()
    assert_equal(stepped(model, batch), exact)


def test_peaks_are_the_same_in_every_step(model, batch):
    offloading_plan().apply(model)
    stepped(model, batch)
    peaks = {stepped(model, batch).peak_bytes for _ in range(10)}
    assert len(peaks) == 1, peaks


def test_a_depot_is_closed_with_its_plan(model, batch):
    receipt = offloading_plan().apply(model)
    [depot] = depots_of(model)
    closing = depot._close
    stepped(model, batch)
    receipt.undo()
    del depot, receipt
    gc.collect()
    assert not closing.alive


def test_a_copied_model_has_a_depot_of_its_own(model, batch):
    exact = stepped(model, batch)
    offloading_plan().apply(model)
    other = copy.deepcopy(model)
    assert depots_of(other) != depots_of(model)
    assert_equal(stepped(other, batch), exact)


@pytest.mark.parametrize("size", [1 << 16, 3 << 20])
def test_a_full_disk_raises_once_and_loses_nothing(model, batch, size):
    """At the second size two stages have been stored by then."""
    exact = stepped(model, batch)
    offloading_plan().apply(model)
    [depot] = depots_of(model)
    stepped_on = None
    with files_of_at_most(size):
        with pytest.raises(OffloadError, match="make room"):
            stepped(model, batch)
        stepped_on = stepped(model, batch)
    assert_equal(stepped_on, exact)
    assert_equal(stepped(model, batch), exact)
    assert depot.stats.count == 0


def test_a_plan_is_put_to_use_in_another_process(tmp_path):
    offloading_plan().write(tmp_path / "plan.json")
    program = """
import sys, xmem
xmem.use("jittor", device="cpu")
import test_jittor_plans_offload as here
from jittor import nn
from xmem.planner.plan import Plan
model = nn.Sequential(*(here.block() for _ in range(here.DEPTH)))
batch = here.normal(1024, here.WIDTH)
exact = here.stepped(model, batch)
Plan.read(sys.argv[1]).apply(model, directory=sys.argv[2])
[depot] = here.depots_of(model)
assert str(depot.directory) == sys.argv[2]
here.assert_equal(here.stepped(model, batch), exact)
assert depot.stats.written_bytes > 0
print("done", flush=True)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "plan.json"), str(tmp_path)]
    found = subprocess.run(
        command, check=False, timeout=120, cwd="tests/on_jittor", capture_output=True, text=True
    )
    assert "done" in found.stdout, found.stderr
