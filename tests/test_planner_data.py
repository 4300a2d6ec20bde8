"""Chains, schedules and plans as data: read, written, refused."""

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_chains import DATA, REAL, chains, load

from xmem.errors import InvalidScheduleError, SchemaError, UsageError
from xmem.planner import (
    Chain,
    Op,
    Option,
    Plan,
    Skip,
    Stage,
    format_ops,
    parse_ops,
    plan_schema,
    solve,
)

KEEP = Option("keep all", 1.0, 2.0, 8, 1, 5)


def test_a_profile_is_read_stage_by_stage():
    raw = json.loads((DATA / "chains" / "gpt2s_B2_T256.json").read_text())
    chain = Chain.from_dict(raw)
    assert len(chain.stages) == raw["n"]
    assert chain.value_bytes == (*raw["input_bytes"], raw["output_bytes"][-1])
    block = chain.stages[1]
    assert block.name == "blk0"
    assert block.forward_seconds == raw["fwd_time_nograd"][1]
    assert block.temporary_bytes == raw["tmp_fwd_nograd"][1]
    assert block.options == (
        Option(
            "keep all",
            raw["fwd_time"][1],
            raw["bwd_time"][1],
            raw["saved_bytes"][1],
            raw["tmp_fwd"][1],
            raw["tmp_bwd"][1],
        ),
    )


def test_skips_are_read():
    chain = load("unet3d_b16_S48")
    assert Skip(source=0, target=6, size_bytes=7077888) in chain.skips
    assert sum(s.size_bytes for s in chain.skips) == 442368 + 1769472 + 7077888


def test_options_without_names_get_those_of_their_number():
    row = {"f": 1, "b": 2, "abar": 3, "tf": 0, "tb": 1}
    chain = Chain.from_dict({"name": "c", "a": [1, 1], "fng": [1], "tng": [0], "opt": [[row] * 5]})
    names = [o.name for o in chain.stages[0].options]
    assert names == ["keep all", "compressed", "offload", "half", "option 4"]


@settings(deadline=None)
@given(chains())
def test_a_chain_survives_its_dictionary(chain):
    assert Chain.from_dict(json.loads(json.dumps(chain.to_dict()))) == chain


@pytest.mark.parametrize("name", [*REAL, "rand_n10", "rand_n24"])
def test_a_chain_of_the_data_survives_its_dictionary(name):
    assert Chain.from_dict(load(name).to_dict()) == load(name)


@pytest.mark.parametrize(
    "broken", [{}, {"fwd_time": []}, {"a": [1], "fng": [1], "tng": [0], "opt": []}, {"opt": 3}]
)
def test_what_is_no_chain_is_refused(broken):
    with pytest.raises(SchemaError, match="no chain"):
        Chain.from_dict(broken)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kept_bytes": -1}, "abar"),
        ({"kept_bytes": 1.5}, "abar"),
        ({"backward_extra_bytes": 2**60}, "tb"),
        ({"forward_seconds": float("nan")}, "f of option 0"),
        ({"backward_seconds": -1.0}, "b of option 0"),
    ],
)
def test_impossible_costs_are_refused_by_name(change, word):
    stage = Stage("s", 1.0, 0, (dataclasses.replace(KEEP, **change),))
    with pytest.raises(UsageError, match=word):
        Chain("c", (stage,), (1, 1))


def test_chains_that_do_not_add_up_are_refused():
    stage = Stage("s", 1.0, 0, (KEEP,))
    with pytest.raises(UsageError, match="one value more than stages"):
        Chain("c", (stage,), (1,))
    with pytest.raises(UsageError, match="at least one stage"):
        Chain("c", (), (1,))
    with pytest.raises(UsageError, match="named apart"):
        Chain("c", (Stage("s", 1.0, 0, (KEEP, KEEP)),), (1, 1))
    with pytest.raises(UsageError, match="skip"):
        Chain("c", (stage,), (1, 1), (Skip(0, 3, 1),))


# ---------------------------------------------------------------- schedules
OPS = st.one_of(
    st.builds(Op, st.sampled_from(["N", "B", "Da", "Ds"]), st.integers(0, 999)),
    st.builds(Op, st.just("G"), st.integers(0, 999), st.integers(0, 9)),
    st.just(Op("L")),
)


@given(st.lists(OPS))
def test_a_schedule_survives_its_notation(ops):
    assert parse_ops(format_ops(ops)) == tuple(ops)


def test_the_notation_is_that_of_the_model():
    text = "N2 G3.0 B3 L Da2 Ds2"
    assert parse_ops(text) == (
        *(Op("N", 2), Op("G", 3, 0), Op("B", 3)),
        *(Op("L"), Op("Da", 2), Op("Ds", 2)),
    )


@pytest.mark.parametrize("word", ["G3", "L2", "N", "X1", "Da", "B-1", "G1.", "n2", "N2.0", "N٣"])
def test_a_word_that_is_no_operation_is_named(word):
    with pytest.raises(InvalidScheduleError, match="operation 1 is"):
        parse_ops(f"N0 {word}")


# ---------------------------------------------------------------- plans
@pytest.fixture(scope="module")
def plan():
    return solve(load("rand_n10"), 700_000_000, kernel=None)


def test_a_plan_survives_json_and_a_file(plan, tmp_path):
    assert Plan.from_json(plan.to_json()) == plan
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


def test_a_plan_in_json_meets_its_schema(plan):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(plan.to_json()), plan_schema())
    assert json.loads(plan.to_json())["ops"] == str(plan)


def test_plans_of_other_versions_are_refused(plan):
    raw = json.loads(plan.to_json())
    raw["plan_schema_version"] = 999
    with pytest.raises(SchemaError, match="version 999"):
        Plan.from_json(json.dumps(raw))


@pytest.mark.parametrize(
    "change", [{"ops": "N0 Q1"}, {"peak_bytes": "many"}, {"options": 3}, {"seconds": None}]
)
def test_what_is_no_plan_is_refused(plan, change):
    with pytest.raises(SchemaError, match="no plan"):
        Plan.from_json(json.dumps({**json.loads(plan.to_json()), **change}))


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}"])
def test_what_is_no_json_of_ours_is_refused(content):
    with pytest.raises(SchemaError):
        Plan.from_json(content)


def test_the_planner_imports_no_framework():
    code = "import sys, xmem.planner; print({'torch', 'jittor', 'scipy'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
