"""Cases of several ranks from launch to result: whole, killed, out of memory, out of time."""

import case_ranks
import pytest

from xmem.conformance import launched
from xmem.conformance.runner import result_path, run_case
from xmem.report.compare import compare_techniques
from xmem.report.model import Result, read_json
from xmem.report.write import make_report


def case(technique="zero1", **changes):
    return case_ranks.make_case("torch", technique, **changes)


def test_two_ranks_give_one_result_with_the_losses_of_one_process(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(launched, "_NAMES_AT_FIRST", launched._NAMES_AT_FIRST | {"TMPDIR"})
    alone = run_case(case("baseline", world=1), tmp_path)
    result = run_case(case(), tmp_path)
    assert (result.status, result.reason) == ("ok", "")
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert result.engine == "gloo"
    assert all(sum(rank.sent_bytes.values()) > 0 for rank in result.ranks)
    assert all(sum(r.by_category.values()) == r.peak_allocated_bytes for r in result.ranks)
    row = compare_techniques(make_report([alone, result]))[1]
    assert row.loss_difference == pytest.approx(0.0, abs=1e-6)
    assert row.losses_agree is True
    assert result.ranks[0].by_category["optimizer"] < 0.55 * alone.by_category["optimizer"]
    assert read_json(result_path(case(), tmp_path), Result) == result
    assert not list(tmp_path.glob("*.rank*"))
    assert not list(scratch.glob("torchelastic*"))


def test_a_rank_that_is_killed_is_a_row_that_names_it(tmp_path):
    with case_ranks.killing(tmp_path, rank=1):
        result = run_case(case(steps=100_000), tmp_path, timeout_seconds=120)
    assert result.status == "error"
    assert result.reason.startswith("rank 0: RankLostError: "), result.reason
    assert "rank 1" in result.reason
    assert "rank 1 was ended by SIGKILL, the first to fail" in result.reason
    assert case_ranks.none_left(tmp_path)


def test_a_rank_that_runs_out_of_memory_ends_all_and_is_named(tmp_path):
    result = run_case(case(limit_bytes=16 * 2**20), tmp_path)
    assert result.status == "out_of_memory"
    assert result.reason.startswith("rank ")
    assert "the limit is 16777216 bytes" in result.reason
    assert case_ranks.none_left(tmp_path)


def test_ranks_that_take_too_long_are_a_timeout_and_none_is_left(tmp_path):
    slow = case(steps=100_000)
    case_ranks.leave_old_parts(slow, tmp_path)
    result = run_case(slow, tmp_path, timeout_seconds=8)
    assert result.status == "timeout", result
    assert "no result after 8 s" in result.reason
    assert case_ranks.none_left(tmp_path)
