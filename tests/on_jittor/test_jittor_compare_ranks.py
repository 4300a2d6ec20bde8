"""Cases of several ranks from launch to result on Jittor: whole, and killed."""

import case_ranks
import pytest

from xmem.conformance.runner import run_case
from xmem.report.compare import compare_techniques
from xmem.report.write import make_report

pytestmark = pytest.mark.jittor


def case(technique="zero1", **changes):
    return case_ranks.make_case("jittor", technique, **changes)


def test_two_ranks_give_one_result_with_the_losses_of_one_process(tmp_path):
    alone = run_case(case("baseline", world=1), tmp_path)
    result = run_case(case(), tmp_path)
    assert (result.status, result.reason) == ("ok", "")
    assert result.engine == "mpi"
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert compare_techniques(make_report([alone, result]))[1].losses_agree is True
    # The gradients fit into one bucket.
    assert [r.buffer_bytes for r in result.ranks] == [
        r.by_category["parameter"] for r in result.ranks
    ]
    assert result.ranks[0].by_category["optimizer"] < 0.55 * alone.by_category["optimizer"]


def test_a_rank_that_is_killed_is_a_row_that_names_it(tmp_path):
    with case_ranks.killing(tmp_path, rank=1):
        result = run_case(case(steps=100_000), tmp_path, timeout_seconds=120)
    assert result.status == "error"
    assert result.reason.startswith("rank 0: RankLostError: "), result.reason
    assert "rank 1" in result.reason
    assert "rank 1 was ended by SIGKILL, the first to fail" in result.reason
    assert case_ranks.none_left(tmp_path)
