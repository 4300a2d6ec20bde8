"""One rank of several dies on PyTorch: every other one ends with an error that names it."""

import signal

import dying
import pytest

from xmem.distributed import checking
from xmem.plugins import backend_infos

pytestmark = pytest.mark.torch


def test_a_rank_killed_in_training_is_named_by_the_others(tmp_path):
    death = dying.die("torch", dying.training("torch"), tmp_path / "job", delay=dying.moment(1))
    dying.assert_others_name(death, 1)
    assert death.status == 128 + signal.SIGKILL
    # What backward, or the step, raised already said so, and could be caught as such.
    assert "as far as xmem knows" not in death.said(0), death.said(0)


def test_a_rank_killed_in_an_all_reduce_is_named_by_both_others(tmp_path):
    program = dying.PROGRAMS["all-reduce"]
    death = dying.die("torch", program, tmp_path / "job", size=3, delay=dying.moment(2))
    dying.assert_others_name(death, 1)
    assert death.status == 128 + signal.SIGKILL


def test_a_rank_killed_while_all_are_idle_is_named_by_the_others(tmp_path):
    program = dying.PROGRAMS["idle"]
    death = dying.die("torch", program, tmp_path / "job", victim=0, delay=dying.moment(3))
    dying.assert_others_name(death, 0)
    assert death.status == 128 + signal.SIGKILL


def test_a_rank_that_throws_ends_all_with_its_status(tmp_path):
    death = dying.die("torch", dying.PROGRAMS["throw"], tmp_path / "job", how=None)
    dying.assert_others_name(death, 1)
    assert "ValueError: the third batch is empty" in death.said(0)
    assert death.status == 1


def test_a_rank_stopped_in_the_frameworks_own_backward_is_named_as_late(tmp_path):
    program = dying.training("torch", short=True)
    death = dying.die(
        "torch",
        program,
        tmp_path / "job",
        delay=0.1,
        how=signal.SIGSTOP,
        options=("--grace", "2"),  # it ends by SIGKILL only, 5 s after that
    )
    dying.assert_others_name(death, 1, kind="CollectiveTimeoutError")
    assert "is stopped" in death.said(0)
    assert death.status == 1


def test_the_doctor_starts_ranks_and_finds_their_sum_right():
    [info] = [info for info in backend_infos() if info.name == "torch"]
    found = {finding.what: finding for finding in checking.findings([info])}
    assert found["torch: all-reduce"].verdict == "ok", found
    assert "rank 1 on cpu" in found["torch: ranks"].text
