"""Profiling, planning and verifying, on a framework of numbers."""

import copy
import pickle
import random
import weakref

import numpy as np
import pytest
from planning_fakes import Module, Tensor, fake, unequal

import xmem
from xmem.errors import CapabilityError, InvalidScheduleError
from xmem.planned import Conductor, PlannedForward
from xmem.planner import Op, Plan, heuristic, least_budget_bytes, parse_ops, solve
from xmem.planner.solver import store_all_peak_bytes
from xmem.playing import script
from xmem.records import Recompute
from xmem.steps import every


def loss_fn(model, batch):
    return model(batch)


def chain_model(chain):
    """Return a model whose modules return the chain's values, and its batch."""
    model = Module(children=[Module(size) for size in chain.value_bytes[1:-1]])
    return model, Tensor(chain.value_bytes[0])


@pytest.fixture
def made(monkeypatch):
    chain = unequal(random.Random(3), 6)
    backend = fake(monkeypatch, chain)
    model, batch = chain_model(chain)
    return backend, model, batch, chain


@pytest.mark.parametrize("seed", range(5))
def test_a_profile_is_the_chain_that_steps_take(monkeypatch, seed):
    chain = unequal(random.Random(seed), 3 + seed)
    fake(monkeypatch, chain)
    model, batch = chain_model(chain)
    found = xmem.profile(model, batch, loss_fn)
    assert found.value_bytes == chain.value_bytes
    assert [s.options for s in found.stages] == [s.options for s in chain.stages]
    assert [s.temporary_bytes for s in found.stages] == [s.temporary_bytes for s in chain.stages]
    assert [s.forward_seconds for s in found.stages] == [s.forward_seconds for s in chain.stages]
    assert [s.name for s in found.stages] == [*map(str, range(3 + seed)), "(loss)"]


def test_what_steps_take_beyond_their_operations_is_the_cost_of_recomputing(made):
    backend, model, batch, _ = made
    before = xmem.profile(model, batch, loss_fn)
    once = before.store_all_seconds + sum(s.forward_seconds for s in before.stages[:-1])
    backend.plans.step_seconds = once + 6 * 0.25
    after = xmem.profile(model, batch, loss_fn)
    more = [
        b.forward_seconds - a.forward_seconds
        for a, b in zip(before.stages, after.stages, strict=True)
    ]
    assert more == pytest.approx([0.25] * 6 + [0.0])
    assert after.store_all_seconds == before.store_all_seconds


def test_stages_of_the_same_bytes_share_their_times(monkeypatch):
    chain = unequal(random.Random(0), 4)
    stages = list(chain.stages)
    stages[2] = stages[1]
    sizes = list(chain.value_bytes)
    sizes[1] = sizes[2] = sizes[3] = 77
    from dataclasses import replace

    slow = replace(stages[2], forward_seconds=9.0)
    chain = replace(chain, stages=(*stages[:2], slow, *stages[3:]), value_bytes=tuple(sizes))
    fake(monkeypatch, chain)
    model, batch = chain_model(chain)
    found = xmem.profile(model, batch, loss_fn)
    assert found.stages[1].forward_seconds == found.stages[2].forward_seconds


def test_a_last_stage_that_returns_more_than_it_reads_goes_with_the_loss(monkeypatch):
    chain = unequal(random.Random(0), 4)
    backend = fake(monkeypatch, chain)
    model, batch = chain_model(chain)
    model.parts.append(Module(10 * chain.value_bytes[-2]))
    found = xmem.profile(model, batch, loss_fn)
    assert [s.name for s in found.stages] == ["0", "1", "2", "3", "(loss)"]
    backend.plans.called.clear()
    solve(found, store_all_peak_bytes(found)).apply(model)
    model(batch)
    assert backend.plans.called == [0, 1, 2, 3]


def test_a_plan_is_verified_and_leaves_the_model_alone(made):
    _, model, batch, chain = made
    profile = xmem.profile(model, batch, loss_fn)
    budget = (least_budget_bytes(chain) + store_all_peak_bytes(chain)) // 2
    plan = xmem.plan(profile, budget=budget)
    assert plan.verified.measured_peak_bytes == plan.peak_bytes <= budget
    assert plan.verified.error == 0
    assert plan.verified.rounds == 1
    assert all(m.forward == m.own_forward for m in (model, *model.parts))


def test_what_a_step_holds_more_comes_off_the_next_plan(made):
    backend, model, batch, chain = made
    profile = xmem.profile(model, batch, loss_fn)
    budget = (least_budget_bytes(chain) + store_all_peak_bytes(chain)) // 2
    backend.plans.more_bytes = budget - xmem.plan(profile, budget=budget).peak_bytes + 150
    profile.source.plans.clear()
    plan = xmem.plan(profile, budget=budget)
    assert plan.verified.rounds > 1
    assert plan.verified.measured_peak_bytes <= plan.budget_bytes == budget
    assert plan.verified.error > 0


def test_a_budget_that_real_steps_exceed_is_infeasible_and_says_by_how_much(made):
    backend, model, batch, chain = made
    profile = xmem.profile(model, batch, loss_fn)
    backend.plans.more_bytes = 120
    least = least_budget_bytes(chain)
    with pytest.raises(xmem.InfeasibleBudgetError) as caught:
        xmem.plan(profile, budget=least)
    assert caught.value.budget_bytes == least
    assert caught.value.minimum_bytes >= least + 120
    assert xmem.plan(profile, budget=caught.value.minimum_bytes).verified is not None


def test_more_budget_never_gives_a_slower_plan_whatever_steps_take(made):
    backend, model, batch, chain = made
    profile = xmem.profile(model, batch, loss_fn)
    least, most = least_budget_bytes(chain), store_all_peak_bytes(chain)
    rand = random.Random(1)
    seconds = []
    for k in range(8):
        backend.plans.more_bytes = rand.choice([0, 200])
        seconds.append(xmem.plan(profile, budget=least + 250 + k * (most - least) // 8).seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_calls_that_a_plan_does_not_make_are_found(made):
    backend, model, batch, _ = made
    profile = xmem.profile(model, batch, loss_fn)
    backend.plans.more_forwards = 1
    with pytest.raises(InvalidScheduleError, match="forward"):
        xmem.plan(profile, budget=1.0)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0.0, "share"),
        (1.5, "share"),
        (-1, "negative"),
        ("many", "not a size"),
        ("x%", "share"),
        (True, "size"),
        (None, "size"),
    ],
)
def test_a_budget_that_makes_no_sense_is_named(made, budget, message):
    _, model, batch, _ = made
    with pytest.raises(xmem.UsageError, match=message):
        xmem.plan(xmem.profile(model, batch, loss_fn), budget=budget)


def test_a_chain_without_a_model_is_planned_and_not_run(made):
    backend, _, _, chain = made
    plan = xmem.plan(chain, budget=0.9)
    assert plan.verified is None
    assert plan.budget_bytes == int(0.9 * store_all_peak_bytes(chain))
    assert backend.plans.steps == 0


def test_a_model_alone_needs_its_loss(made):
    _, model, _, _ = made
    with pytest.raises(xmem.UsageError, match="loss"):
        xmem.plan(model, budget=0.5)


def test_a_step_that_does_not_call_the_stages_is_named(made):
    _, model, batch, _ = made
    with pytest.raises(xmem.UsageError, match="loss_fn"):
        xmem.profile(model, batch, lambda model, batch: batch, stages=["0", "1"])


def test_a_verified_plan_goes_through_json(made, tmp_path):
    _, model, batch, _ = made
    plan = xmem.plan(xmem.profile(model, batch, loss_fn), budget=0.9)
    assert Plan.from_json(plan.to_json()) == plan
    plan.write(tmp_path / "plan.json")
    receipt = Plan.read(tmp_path / "plan.json").apply(model)
    assert receipt.applied_to == 6
    receipt.undo()


# ------------------------------------------------------------------ what plays
def planned_model(made):
    backend, model, batch, chain = made
    names = tuple(map(str, range(6)))
    solved = solve(chain, store_all_peak_bytes(chain))
    assert solved.stage_names == (*names, "(loss)")
    return model, batch, solved.apply(model), backend.plans.called


def test_stages_are_called_in_order_and_outside_of_recording_not_at_all(made):
    model, batch, receipt, called = planned_model(made)
    model(batch)
    assert called == list(range(6))
    made[0].plans.records = False
    model(batch)
    assert called == list(range(6))
    receipt.undo()


def test_a_forward_that_breaks_off_leaves_nothing_behind(made):
    model, batch, receipt, called = planned_model(made)

    def refuse(x):
        raise ValueError("in the model")

    model.parts[3].forward, kept = refuse, model.parts[3].forward
    with pytest.raises(ValueError, match="in the model"):
        model(batch)
    model.parts[3].forward = kept
    called.clear()
    model(batch)
    assert called == list(range(6))
    receipt.undo()


def test_a_stage_called_by_itself_warns_and_runs_plainly(made):
    model, batch, receipt, called = planned_model(made)
    with pytest.warns(xmem.XmemWarning, match="out of the plan's"):
        assert model.parts[2](batch).nbytes == made[3].value_bytes[3]
    assert called == []
    receipt.undo()


def conductor_of(model):
    return model.parts[0].forward.conductor


def test_a_run_is_held_by_its_outputs_or_until_the_next_forward_pass(made):
    model, batch, receipt, _ = planned_model(made)
    local = conductor_of(model)._local
    model.parts[0](batch)
    first = weakref.ref(local.held)
    assert first() is not None
    model(batch)
    assert first() is None
    assert local.held is None
    made[0].plans.outputs_hold = True
    model.parts[0](batch)
    assert local.run() is None
    with pytest.warns(xmem.XmemWarning, match="out of the plan's"):
        model.parts[1](batch)
    receipt.undo()


def test_a_loss_that_calls_the_model_twice_is_named(made):
    _, model, batch, _ = made
    with pytest.raises(xmem.UsageError, match="2 times"):
        xmem.profile(model, batch, lambda model, batch: (model(batch), model(batch)))


def test_profiling_inside_a_measured_block_is_refused(made, monkeypatch):
    from xmem import meter

    _, model, batch, _ = made
    profile = xmem.profile(model, batch, loss_fn)
    monkeypatch.setattr(meter, "_open", object())
    with pytest.raises(xmem.MeasurementError, match=r"xmem\.profile"):
        xmem.profile(model, batch, loss_fn)
    with pytest.raises(xmem.MeasurementError, match=r"xmem\.plan"):
        xmem.plan(profile, budget=1.0)


def test_what_is_around_the_stages_counts_in_shares_and_in_the_least(made):
    from dataclasses import replace

    _, model, batch, chain = made
    profile = xmem.profile(model, batch, loss_fn)
    heavy = replace(profile, around_bytes=10 * store_all_peak_bytes(chain))
    plan = xmem.plan(heavy, budget=1.0)
    assert plan.overhead == 0
    assert plan.store_all_peak_bytes == heavy.around_bytes
    with pytest.raises(xmem.InfeasibleBudgetError) as caught:
        xmem.plan(heavy, budget=0.9)
    assert caught.value.minimum_bytes == heavy.around_bytes


def test_comparing_needs_something_to_run(made):
    _, model, batch, chain = made
    profile = xmem.profile(model, batch, loss_fn)
    with pytest.raises(xmem.UsageError, match="compare"):
        xmem.plan(chain, budget=1.0, compare=True)
    with pytest.raises(xmem.UsageError, match="compare"):
        xmem.plan(profile, budget=1.0, compare=True, verify=False)
    made[0].plans.step_seconds = 1.0
    assert xmem.plan(profile, budget=1.0, compare=True).verified.measured_overhead == 0


@pytest.mark.parametrize("budget", [1.0, "100%", np.float32(1.0), np.int64(1 << 40), "1TiB"])
def test_budgets_of_every_spelling(made, budget):
    _, _, _, chain = made
    assert xmem.plan(chain, budget=budget).overhead == 0


def test_a_module_in_two_places_is_two_stages(monkeypatch):
    chain = unequal(random.Random(5), 3)
    from dataclasses import replace

    sizes = (chain.value_bytes[0], 80, 90, 80, 0)
    chain = replace(chain, value_bytes=sizes)
    backend = fake(monkeypatch, chain)
    shared = Module(80)
    model = Module(children=[shared, Module(90), shared])
    model.parts[2] = shared
    plan = replace(solve(chain, store_all_peak_bytes(chain)), stage_names=("0", "1", "0", "(loss)"))
    receipt = plan.apply(model)
    model(Tensor(sizes[0]))
    assert backend.plans.called == [0, 1, 2]
    receipt.undo()
    assert shared.forward == shared.own_forward


def test_conductors_are_copied_and_pickled_without_what_is_under_way():
    how = Recompute()
    conductor = Conductor("fake", ("a",), script(every(1), 1), how)
    conductor._local.next = 1
    for copied in (copy.deepcopy(conductor), pickle.loads(pickle.dumps(conductor))):
        assert copied.script == conductor.script
        assert not hasattr(copied._local, "next")
    forward = copy.deepcopy(PlannedForward(conductor, (0,), len))
    assert forward.conductor is not conductor


# ------------------------------------------------------------------ finding stages
def found(backend, model, batch, how="auto"):
    from xmem.staging import find_stages

    return find_stages(backend, model, lambda: model(batch), how).names


def test_what_hands_on_from_one_to_the_next_is_opened(made):
    backend, _, batch, _ = made
    inner = Module(children=[Module(children=[Module(10)]), Module(children=[Module(20)])])
    model = Module(children=[Module(5), inner, Module(7)])
    assert found(backend, model, batch) == ("0", "1.0", "1.1", "2")


def test_glue_between_calls_ends_a_run_and_the_lighter_rest_is_left_outside(made):
    backend, _, batch, _ = made
    blocks = Module(children=[Module(children=[Module(100)]) for _ in range(4)])
    model = Module(children=[Module(5), blocks, Module(7)], glue=True)
    assert found(backend, model, batch) == ("1.0", "1.1", "1.2", "1.3")


def test_a_module_that_changes_its_input_is_no_stage(made):
    backend, _, batch, _ = made
    model = Module(children=[Module(100), Module(100), Module(100), Module(100), Module(100)])
    model.parts[3].inplace = True
    assert found(backend, model, batch) == ("0", "1", "2")


def test_no_stages_is_an_error_that_says_what_to_do(made):
    backend, _, batch, _ = made
    with pytest.raises(xmem.UsageError, match="name them"):
        found(backend, Module(children=[Module(3)]), batch)
    with pytest.raises(xmem.UsageError, match="modules"):
        found(backend, Module(children=[Module(3), Module(4)]), batch, "traced")
    with pytest.raises(xmem.UsageError, match="Valid"):
        found(backend, Module(children=[Module(3), Module(4)]), batch, "guess")


# ------------------------------------------------------------------ scripts
def test_a_script_is_cut_where_the_framework_hands_over():
    cut = script(parse_ops("N0 G1.0 Da1 G2.0 L B2 B1 N0 Da2 G0.0 B0"), 2)
    ops = [str(op) for op in cut.ops]
    assert ops == ["N0", "G1.0", "Da1", "L", "B1", "N0", "Da2", "G0.0", "B0"]
    assert cut.sweep == ((0,), (1, 2))
    assert cut.back == ((5, 6, 7), ())
    assert [ops[k] for k in cut.backward] == ["B0", "B1"]
    assert ops[cut.loss] == "L"


@pytest.mark.parametrize(
    ("ops", "stages", "error"),
    [
        ("G0.1 L B0", 1, CapabilityError),
        ("G0.0 G1.0 G2.0 L B2 B1 Ds0 B0", 1, None),
        ("N0 N1 L G1.0 B1 G0.0", 2, InvalidScheduleError),
        ("G0.0 L B0 B0", 1, InvalidScheduleError),
        ("G1.0 G0.0 L B1 B0", 2, InvalidScheduleError),
        ("G0.0 N1 G1.0 L B1 B0", 1, InvalidScheduleError),
    ],
)
def test_schedules_that_cannot_be_played_are_refused(ops, stages, error):
    if error is None:
        script(parse_ops(ops), stages)
        return
    with pytest.raises(error):
        script(parse_ops(ops), stages)


def test_rules_of_thumb_can_be_played(made):
    chain = made[3]
    for rule in ("none", "every", "sqrt", "uniform", "interval"):
        ops = heuristic(chain, rule)
        assert len(script(ops, 6)) == 6
    assert len(script([*every(6), Op("Da", 6)], 6)) == 6
