"""Plans: whatever a schedule says is done, exactly so often, and the bytes are those predicted."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import xmem
from xmem.conformance.plugin import gap, need
from xmem.conformance.small import SmallRun, relative_error, small_workload
from xmem.planner import Chain, Op, Option, Stage, simulate
from xmem.planner.plan import Plan
from xmem.planning import least_bytes, whole_bytes
from xmem.playing import PACKED

if TYPE_CHECKING:
    from xmem.backend import Backend

_DEPTH = 5
_NAMES = tuple(f"blocks.{i}" for i in range(_DEPTH))


def random_schedule(stages: int, rand: random.Random) -> list[Op]:
    """Return some schedule of a chain with so many stages and the loss behind them.

    It keeps, drops and computes again as it comes: most are wasteful, all are valid.
    """
    ops: list[Op] = []
    values, kept = {0}, set[int]()

    def forward(i: int) -> None:
        if i not in kept and (i + 1 in values or rand.random() < 0.5):
            ops.append(Op("G", i))
            kept.add(i)
        elif i + 1 not in values:
            ops.append(Op("N", i))
            values.add(i + 1)

    def drop(needed: int) -> None:
        for j in sorted(values - {0, needed}):
            if rand.random() < 0.4:
                ops.append(Op("Da", j))
                values.remove(j)
        for i in sorted(kept - {needed - 1, needed}):
            if rand.random() < 0.15:
                ops.append(Op("Ds", i))
                kept.remove(i)

    def make(j: int) -> None:
        """See to it that a_j is there."""
        if j not in values and j - 1 not in kept:
            make(j - 1)
            forward(j - 1)

    for i in range(stages):
        forward(i)
        drop(i + 1)
    ops += [Op("G", stages), Op("L"), Op("B", stages)]
    for i in reversed(range(stages)):
        make(i)
        if i not in kept:
            ops.append(Op("G", i))
            kept.add(i)
        ops.append(Op("B", i))
        kept.remove(i)
        drop(i)
    equal = Stage("", 1.0, 0, (Option("keep all", 1.0, 1.0, 1, 0, 1),))
    simulate(Chain("", (equal,) * (stages + 1), (1,) * (stages + 2)), ops)
    return ops


def planned(ops: list[Op]) -> Plan:
    """Return a plan of a small model's blocks that has never been solved for."""
    return Plan(
        chain_name="drawn",
        budget_bytes=0,
        ops=tuple(ops),
        seconds=1.0,
        peak_bytes=0,
        store_all_seconds=1.0,
        bound_seconds=1.0,
        gap=0.0,
        options=("keep all",) * (_DEPTH + 1),
        stage_names=(*_NAMES, "(loss)"),
        store_all_peak_bytes=0,
    )


def _small(
    backend: Backend, *, batch: int = 512
) -> tuple[SmallRun, Callable[[Any, Any], Any], list[int]]:
    """Return a model, its loss, and how often each block has been called."""
    run = SmallRun(backend, small_workload(depth=_DEPTH, batch=batch))
    calls = [0] * _DEPTH

    def counting(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[index] += 1
            return forward(*args, **kwargs)

        return call

    for index, block in enumerate(backend.models.blocks(run.model)):
        backend.checkpoint.replace_forward(block, functools.partial(counting, index))

    def loss_fn(model: Any, batch: Any) -> Any:
        return backend.models.loss("mse", model(batch[0]), batch[1])

    return run, loss_fn, calls


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_is_played_as_it_is_written(backend: Backend, seed: int) -> None:
    """Forward calls, loss and gradients; also of schedules that drop what they kept."""
    need(backend, "plans", "checkpoint", "models", "training")
    run, _, calls = _small(backend)
    loss, gradients = run.loss_and_gradients()
    ops = random_schedule(_DEPTH, random.Random(seed))
    receipt = planned(ops).apply(run.model)
    assert receipt.applied_to == _DEPTH
    calls[:] = [0] * _DEPTH
    again, found = run.loss_and_gradients()
    assert calls == [sum(o.code in "NG" and o.index == i for o in ops) for i in range(_DEPTH)]
    assert again == pytest.approx(loss, rel=1e-6)
    assert relative_error(found, gradients) < 1e-5
    receipt.undo()
    calls[:] = [0] * _DEPTH
    run.loss_and_gradients()
    assert calls == [1] * _DEPTH


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_a_plan_keeps_to_its_budget_and_to_what_it_predicts(backend: Backend, share: float) -> None:
    """The measured peak is within 0.5 % of the predicted one and within the budget."""
    need(backend, "plans", "checkpoint", "models", "training", "measure")
    run, loss_fn, _ = _small(backend, batch=2048)
    profile = xmem.profile(run.model, run.batch, loss_fn, repeats=1)
    assert len(profile) >= _DEPTH
    least = least_bytes(profile)
    budget = int(least + share * (whole_bytes(profile) - least))
    plan = xmem.plan(profile, budget=budget)
    found = plan.verified
    assert found is not None
    assert found.measured_peak_bytes <= budget
    assert abs(found.error) < 0.005
    plan.apply(run.model)
    with xmem.measure(model=run.model, inputs=run.batch) as m:
        run.loss_and_gradients()
    assert m.peak_above_static_bytes is not None
    # Counted by the meter, which knows nothing of plans; gradients, few here, come in between.
    counted = m.peak_above_static_bytes + profile.batch_bytes
    gradients = sum(array.nbytes for array in run.weights.values())
    assert counted <= budget + gradients
    assert found.measured_peak_bytes <= counted <= found.measured_peak_bytes + gradients


def test_packed_stages_keep_what_was_predicted_and_round(backend: Backend) -> None:
    """Taken for free, so that the plan packs; an error of zero would mean that nothing was."""
    need(backend, "plans", "checkpoint", "models", "training", "measure")
    if PACKED in backend.plans.gaps:
        gap(backend.plans.gaps[PACKED])
    run, loss_fn, _ = _small(backend, batch=2048)
    _, exact = run.loss_and_gradients()
    profile = xmem.profile(run.model, run.batch, loss_fn, compress=(8,), repeats=1)
    stages = []
    for stage in profile.stages:
        whole = stage.options[0]
        seconds: dict[str, Any] = {
            "forward_seconds": whole.forward_seconds,
            "backward_seconds": whole.backward_seconds,
        }
        options = tuple(dataclasses.replace(o, **seconds) for o in stage.options)
        stages.append(dataclasses.replace(stage, options=options))
    profile = dataclasses.replace(profile, stages=tuple(stages))
    plan = xmem.plan(profile, budget=int(0.8 * whole_bytes(profile)))
    assert "8 bits" in plan.options
    assert plan.verified is not None
    assert abs(plan.verified.error) < 0.005
    plan.apply(run.model)
    _, found = run.loss_and_gradients()
    assert 1e-6 < relative_error(found, exact) < 2e-2


def test_more_budget_never_gives_a_slower_plan(backend: Backend) -> None:
    """Of one profile."""
    need(backend, "plans", "checkpoint", "models", "training", "measure")
    run, loss_fn, _ = _small(backend)
    profile = xmem.profile(run.model, run.batch, loss_fn, repeats=1)
    least = least_bytes(profile)
    whole = whole_bytes(profile)
    budgets = [int(least + k / 5 * (whole - least)) for k in range(6)]
    seconds = [xmem.plan(profile, budget=budget).seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_too_small_a_budget_names_the_least(backend: Backend) -> None:
    """And nothing is left on the model."""
    need(backend, "plans", "checkpoint", "models", "training", "measure")
    run, loss_fn, calls = _small(backend)
    profile = xmem.profile(run.model, run.batch, loss_fn, repeats=1)
    with pytest.raises(xmem.InfeasibleBudgetError) as caught:
        xmem.plan(profile, budget=1000)
    least = caught.value.minimum_bytes or 0
    assert least > 1000
    assert xmem.plan(profile, budget=int(least * 1.01)).overhead > 0
    calls[:] = [0] * _DEPTH
    run.loss_and_gradients()
    assert calls == [1] * _DEPTH


def test_a_plan_of_another_model_is_refused(backend: Backend) -> None:
    """The stage that is missing is named."""
    need(backend, "plans", "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload(depth=_DEPTH - 1))
    ops = random_schedule(_DEPTH, random.Random(0))
    with pytest.raises(xmem.UsageError, match=r"blocks\.4"):
        planned(ops).apply(run.model)


def test_a_planned_model_is_not_planned_again(backend: Backend) -> None:
    """Nor checkpointed; and the refusal leaves the plan in force."""
    need(backend, "plans", "checkpoint", "models", "training")
    run, _, calls = _small(backend)
    plan = planned(random_schedule(_DEPTH, random.Random(1)))
    receipt = xmem.apply_checkpointing(run.model, plan)
    with pytest.raises(xmem.CompositionError, match="already"):
        plan.apply(run.model)
    with pytest.raises(xmem.CompositionError, match="already"):
        xmem.apply_checkpointing(run.model, "every")
    calls[:] = [0] * _DEPTH
    run.loss_and_gradients()
    assert sum(calls) > _DEPTH
    receipt.undo()
