"""Cases of several ranks from launch to result: whole, out of memory, out of time."""

import time
from pathlib import Path

import pytest

from xmem.conformance.runner import result_path, run_case
from xmem.report.compare import compare_techniques
from xmem.report.model import Case, Result, read_json
from xmem.report.write import make_report


def case(technique="zero1", **changes):
    settings = {"workload": "mlp", "backend": "torch", "device": "cpu", "threads": 1, "world": 2}
    return Case(technique=technique, **{**settings, **changes})


def processes_of(folder):
    """Return the processes whose command line names a folder."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                command = (place / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command:
                found.append(int(place.name))
    return found


def none_left(folder, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and processes_of(folder):
        time.sleep(0.05)
    return not processes_of(folder)


def test_two_ranks_give_one_result_with_the_losses_of_one_process(tmp_path):
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


def test_a_rank_that_runs_out_of_memory_ends_all_and_is_named(tmp_path):
    result = run_case(case(limit_bytes=16 * 2**20), tmp_path)
    assert result.status == "out_of_memory"
    assert result.reason.startswith("rank ")
    assert "the limit is 16777216 bytes" in result.reason
    assert none_left(tmp_path)


def test_ranks_that_take_too_long_are_a_timeout_and_none_is_left(tmp_path):
    result = run_case(case(steps=100_000), tmp_path, timeout_seconds=8)
    assert result.status == "timeout"
    assert "no result after 8 s" in result.reason
    assert none_left(tmp_path)
