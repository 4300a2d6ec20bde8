"""Results and reports as data: files, schema, comparisons."""

import json
import math

import jsonschema
import msgspec
import pytest
from fakes.results import MACHINE, MIB, make_bad, make_fake_report, make_result
from hypothesis import given, settings
from hypothesis import strategies as st

from xmem.errors import SchemaError
from xmem.report import compare
from xmem.report.diff import diff, worse
from xmem.report.model import (
    STATUSES,
    Case,
    RankResult,
    Report,
    Result,
    TimelinePoint,
    read_json,
    schema,
    write_json,
)

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
COUNT = st.integers(0, 2**53)
MAYBE_COUNT = st.none() | COUNT
SECONDS = st.floats(0, 1e6, allow_nan=False, allow_subnormal=False)
RESULTS = st.builds(
    Result,
    case=st.builds(Case, workload=TEXT, technique=TEXT, backend=TEXT, limit_bytes=MAYBE_COUNT),
    status=st.sampled_from(STATUSES),
    reason=TEXT,
    losses=st.lists(
        st.none() | st.floats(allow_subnormal=False, allow_nan=False, allow_infinity=False)
    ).map(tuple),
    step_seconds=st.none() | SECONDS,
    static_bytes=MAYBE_COUNT,
    peak_allocated_bytes=MAYBE_COUNT,
    peaks_bytes=st.lists(COUNT).map(tuple),
    by_category=st.none() | st.dictionaries(TEXT, COUNT, max_size=3),
    timeline=st.lists(
        st.builds(
            TimelinePoint,
            name=TEXT,
            seconds=SECONDS,
            allocated_bytes=COUNT,
            peak_allocated_bytes=COUNT,
        ),
        max_size=2,
    ).map(tuple),
    settings=st.dictionaries(TEXT, TEXT, max_size=3),
    warnings=st.lists(TEXT, max_size=2).map(tuple),
    machine=st.none() | st.just(MACHINE),
    engine=st.none() | TEXT,
    ranks=st.lists(
        st.builds(
            RankResult,
            rank=st.integers(0, 1023),
            peak_allocated_bytes=MAYBE_COUNT,
            by_category=st.none() | st.dictionaries(TEXT, COUNT, max_size=2),
            sent_bytes=st.dictionaries(TEXT, COUNT, max_size=2),
            communication_seconds=st.none() | SECONDS,
        ),
        max_size=2,
    ).map(tuple),
)
REPORTS = st.builds(make_fake_report, RESULTS, RESULTS)


@settings(deadline=None)
@given(result=RESULTS)
def test_a_result_survives_its_file(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("r") / "result.json"
    write_json(result, path)
    assert read_json(path, Result) == result


@settings(deadline=None)
@given(report=REPORTS)
def test_every_report_fits_the_schema_and_survives_its_file(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("r") / "report.json"
    write_json(report, path)
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), schema())
    assert read_json(path, Report) == report


def test_the_schema_is_a_schema_and_refuses_an_unknown_status():
    jsonschema.Draft202012Validator.check_schema(schema())
    raw = msgspec.to_builtins(make_fake_report(make_result()))
    raw["results"][0]["status"] = "splendid"
    with pytest.raises(jsonschema.ValidationError, match="splendid"):
        jsonschema.validate(raw, schema())


def test_a_file_of_another_schema_version_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "report.json"
    raw = msgspec.to_builtins(make_fake_report(make_result()))
    raw["schema_version"] = 999
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(SchemaError, match=r"999.*reads 1"):
        read_json(path, Report)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"schema_version": 1}'])
def test_a_file_that_is_no_report_is_refused_by_name(text, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SchemaError, match=r"report\.json"):
        read_json(path, Report)


def test_a_loss_that_is_not_finite_is_null_in_the_file(tmp_path):
    path = tmp_path / "result.json"
    write_json(make_result(losses=(1.0, math.nan)), path)
    assert read_json(path, Result).losses == (1.0, None)


def test_writing_leaves_no_unfinished_file(tmp_path):
    write_json(make_result(), tmp_path / "result.json")
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_technique_is_held_against_the_baseline_of_its_own_backend_and_workload():
    report = make_fake_report(
        make_result(technique="baseline", backend="jittor", above_static_bytes=100 * MIB),
        make_result(technique="baseline", workload="bert", above_static_bytes=70 * MIB),
        make_result(technique="baseline"),
        make_result(technique="checkpoint", above_static_bytes=5 * MIB, step_seconds=0.75),
    )
    row = compare.compare_techniques(report)[-1]
    assert row.baseline == report.results[2]
    assert row.peak_saving_bytes == 15 * MIB
    assert row.peak_saving_factor == 2.0
    assert row.above_static_saving_bytes == 15 * MIB
    assert row.above_static_saving_factor == 4.0
    assert row.time_ratio == 1.5
    assert row.loss_difference == 0.0
    assert row.losses_agree is True
    assert row.repeatable is True


def test_other_threads_or_another_limit_are_no_baseline():
    other = Case(workload="mlp", technique="baseline", backend="torch", threads=8)
    limited = Case(workload="mlp", technique="baseline", backend="torch", limit_bytes=1)
    report = make_fake_report(
        make_result(case=other), make_result(case=limited), make_result(technique="checkpoint")
    )
    assert compare.compare_techniques(report)[-1].baseline is None


def test_a_baseline_that_kept_its_gradients_is_still_the_baseline():
    kept = Case(workload="mlp", technique="baseline", backend="torch", save_gradients=True)
    report = make_fake_report(make_result(case=kept), make_result(technique="checkpoint"))
    assert compare.compare_techniques(report)[-1].baseline is not None


def test_what_is_not_known_stays_none():
    report = make_fake_report(
        make_bad("timeout", "slow"),
        make_result(technique="checkpoint"),
        make_result(
            technique="from_a_plugin",
            peaks_bytes=(),
            losses=(),
            step_seconds=None,
            peak_allocated_bytes=None,
            peak_above_static_bytes=None,
        ),
    )
    _, checkpoint, unknown = compare.compare_techniques(report)
    assert checkpoint.baseline is None
    assert checkpoint.peak_saving_factor is None
    assert checkpoint.losses_agree is None
    assert unknown.loss_tolerance is None
    assert unknown.repeatable is None


@pytest.mark.parametrize(
    ("technique", "difference", "agree"),
    [("checkpoint", 1e-7, True), ("checkpoint", 1e-5, False), ("autocast", 1e-3, True)],
)
def test_losses_agree_within_the_tolerance_of_the_technique(technique, difference, agree):
    report = make_fake_report(
        make_result(losses=(1.0, 1.0)),
        make_result(technique=technique, losses=(1.0, 1.0 - difference)),
    )
    row = compare.compare_techniques(report)[-1]
    assert row.loss_difference == pytest.approx(difference)
    assert row.losses_agree is agree


def test_a_loss_that_is_not_finite_never_agrees():
    report = make_fake_report(
        make_result(losses=(1.0, 1.0)), make_result(technique="autocast", losses=(1.0, None))
    )
    row = compare.compare_techniques(report)[-1]
    assert math.isnan(row.loss_difference)
    assert row.losses_agree is False
    assert not compare.finite(report.results[1])


def test_loss_curves_of_different_length_are_not_compared():
    assert compare.loss_difference((1.0,), (1.0, 2.0)) is None
    assert compare.loss_difference((), ()) is None


def test_peaks_that_differ_by_one_byte_are_not_repeatable():
    assert compare.repeatable(make_result(peaks_bytes=(5, 5, 6))) is False
    assert compare.repeatable(make_result(peaks_bytes=(5,))) is None


def test_frameworks_are_compared_by_their_baselines():
    report = make_fake_report(
        make_result(losses=(1.0, 1.0)),
        make_result(backend="jittor", losses=(1.0, 1.00005), above_static_bytes=50 * MIB),
        make_result(technique="checkpoint"),
        make_result(technique="checkpoint", backend="jittor"),
        make_result(workload="bert"),
    )
    (row,) = compare.compare_frameworks(report)
    assert (row.first.case.backend, row.second.case.backend) == ("torch", "jittor")
    assert row.peak_ratio == 2.0
    assert row.losses_agree is True


def test_frameworks_whose_losses_are_farther_apart_than_1e4_do_not_agree():
    report = make_fake_report(
        make_result(losses=(1.0,)), make_result(backend="jittor", losses=(1.001,))
    )
    assert compare.compare_frameworks(report)[0].losses_agree is False


def test_a_diff_shows_what_grew_what_broke_and_what_only_one_report_has():
    before = make_fake_report(
        make_result(),
        make_result(technique="checkpoint"),
        make_result(technique="autocast"),
        make_result(workload="bert"),
    )
    after = make_fake_report(
        make_result(above_static_bytes=20 * MIB + 1),
        make_bad("error", "killed by SIGSEGV", technique="checkpoint"),
        make_result(technique="autocast", above_static_bytes=10 * MIB),
        make_result(workload="gpt2"),
    )
    changes = diff(before, after)
    assert [c.peak_change_bytes for c in changes] == [1, None, -10 * MIB, None, None]
    assert [c.broke for c in changes] == [False, True, False, False, False]
    assert worse(changes, tolerance=0.0) == changes[:2]
    assert worse(changes, tolerance=0.01) == changes[1:2]
    assert changes[3].after is None
    assert changes[4].before is None
