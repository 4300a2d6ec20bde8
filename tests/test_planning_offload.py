"""Offload as a way to keep a stage: when plans take it, and how it is written down."""

import copy
import gc
import pickle
from dataclasses import replace

import pytest
from planning_fakes import Module, fake

import xmem
from xmem.errors import CapabilityError, InfeasibleBudgetError, OffloadError
from xmem.offload.stages import Depots
from xmem.planned import conduct
from xmem.planner import Chain, Option, Plan, Stage, least_budget_bytes, parse_ops, solve
from xmem.playing import AWAY, script
from xmem.report.plan_plots import plan_table, predicted_timeline
from xmem.staging import Stages
from xmem.steps import every

NAMES = ("keep all", "offload to disk")
OPS = parse_ops("G0.1 G1.0 L B1 B0")


def slow_chain(depth=8, transfer_seconds=0.1):
    """Return a chain whose forwards are slow, and whose insides leave tensor by tensor."""
    whole = Option(NAMES[0], 1.0, 2.0, 1000, 100, 300)
    away = Option(NAMES[1], 1.0 + transfer_seconds, 2.0 + transfer_seconds, 150, 200, 400)
    stage = Stage("block", 1.0, 200, (whole, away))
    return Chain("slow", (stage,) * depth, (100,) * (depth + 1))


def without_offload(chain):
    stages = tuple(replace(s, options=s.options[:1]) for s in chain.stages)
    return replace(chain, stages=stages)


def test_offload_is_chosen_where_it_is_cheaper_than_recomputing():
    chain = slow_chain()
    budget = least_budget_bytes(without_offload(chain))
    plain, plan = solve(without_offload(chain), budget), solve(chain, budget)
    assert NAMES[1] in plan.options
    print(plan.seconds, plain.seconds)
    # By offload and some recomputing 27.4 s, by recomputing alone 52.
    assert plan.seconds < 28 < 50 < plain.seconds
    plan.check(chain)


def test_recomputing_is_chosen_where_offload_is_slower():
    chain = slow_chain(transfer_seconds=10.0)
    plan = solve(chain, least_budget_bytes(without_offload(chain)))
    assert set(plan.options) == {NAMES[0]}


def test_a_budget_below_what_recomputing_reaches_has_a_plan():
    chain = slow_chain()
    least = least_budget_bytes(without_offload(chain))
    with pytest.raises(InfeasibleBudgetError, match="offload"):
        solve(without_offload(chain), least - 1)
    plan = solve(chain, least - 1)
    assert NAMES[1] in plan.options
    plan.check(chain)


def test_a_plan_on_paper_keeps_where_its_stages_go():
    plan = solve(slow_chain(), least_budget_bytes(slow_chain()))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    cut = script(again.ops, 8, again.option_names)
    gone = [choice.away.depot.to for choice in cut.choices if choice.away is not None]
    assert set(gone) == {"disk"}


def test_tables_and_timelines_say_which_stages_leave():
    chain = slow_chain()
    plan = solve(chain, least_budget_bytes(chain))
    rows = {name.text: value.text for name, value in plan_table(plan).rows}
    assert rows["stages by 'offload to disk'"] == str(plan.options.count(NAMES[1]))
    names = [instant.name for instant in predicted_timeline(chain, plan)]
    assert any(name.endswith(".1 (offload to disk)") for name in names)


def test_one_depot_serves_a_script_and_a_copy_has_its_own():
    cut = script(every(3, 1), 3, [NAMES] * 3)
    depots = {choice.away.depot for choice in cut.choices if choice.away is not None}
    assert len(depots) == 1
    for other in (copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        [own] = {choice.away.depot for choice in other.choices if choice.away is not None}
        assert own not in depots
        assert own.address != next(iter(depots)).address


def test_depots_are_opened_when_needed_and_closed_with_the_last_user(tmp_path):
    missing = Depots(tmp_path / "missing")
    script(every(2), 2, [NAMES] * 2, depots=missing)
    with pytest.raises(OffloadError, match="missing"):
        script(OPS, 2, [NAMES] * 2, depots=missing)
    cut = script(OPS, 2, [NAMES] * 2, depots=Depots(tmp_path))
    closing = cut.choices[0].away.depot._close
    assert closing.alive
    del cut
    gc.collect()
    assert not closing.alive


def test_a_stage_that_leaves_is_not_left_to_the_framework():
    assert script(OPS, 2, [NAMES] * 2).undisturbed == {1}


def test_a_backend_that_cannot_offload_says_so(monkeypatch):
    backend = fake(monkeypatch, slow_chain(2))
    backend.plans.gaps = {AWAY: "it has no hooks"}
    stages = Stages(("0", "1"), [("0", Module()), ("1", Module())], None)
    with pytest.raises(CapabilityError, match="it has no hooks"):
        conduct(backend, stages, OPS, options=[NAMES] * 2)


def test_a_directory_without_offload_is_refused(monkeypatch, tmp_path):
    fake(monkeypatch, slow_chain(2))
    with pytest.raises(xmem.UsageError, match="offload is None"):
        xmem.profile(Module(), None, None, directory=tmp_path)
