"""One rank of several dies on Jittor: every other one ends with an error that names it."""

import signal

import dying
import pytest

from xmem.distributed import checking
from xmem.plugins import backend_infos

pytestmark = pytest.mark.jittor


def test_a_rank_killed_in_training_is_named_by_the_others(tmp_path):
    death = dying.die("jittor", dying.training("jittor"), tmp_path / "job", delay=dying.moment(1))
    dying.assert_others_name(death, 1)
    assert death.status == 128 + signal.SIGKILL


def test_a_rank_killed_in_an_all_reduce_is_named_by_both_others(tmp_path):
    program = dying.PROGRAMS["all-reduce"]
    death = dying.die("jittor", program, tmp_path / "job", size=3, delay=dying.moment(2))
    dying.assert_others_name(death, 1)
    assert death.status == 128 + signal.SIGKILL


def test_a_rank_killed_while_all_are_idle_is_named_by_the_others(tmp_path):
    program = dying.PROGRAMS["idle"]
    death = dying.die("jittor", program, tmp_path / "job", victim=0, delay=dying.moment(3))
    dying.assert_others_name(death, 0)
    assert death.status == 128 + signal.SIGKILL


def test_a_rank_that_throws_ends_all_with_its_status(tmp_path):
    death = dying.die("jittor", dying.PROGRAMS["throw"], tmp_path / "job", how=None)
    dying.assert_others_name(death, 1)
    assert "ValueError: the third batch is empty" in death.said(0)
    assert death.status == 1


def test_a_rank_that_leaves_early_ends_the_job_with_its_own_status(tmp_path):
    program = """
        ready()
        if here.rank == VICTIM:
            sys.exit(3)
        xd.barrier()
    """
    death = dying.die("jittor", program, tmp_path / "job", how=None)
    assert "rank 1 has left" in death.said(0)
    assert death.status == 3


def test_a_rank_stopped_in_the_frameworks_own_backward_is_named_as_late(tmp_path):
    program = dying.training("jittor", short=True)
    death = dying.die("jittor", program, tmp_path / "job", delay=0.1, how=signal.SIGSTOP)
    dying.assert_others_name(death, 1, kind="CollectiveTimeoutError")
    assert "is stopped" in death.said(0)
    assert death.status == 1


def test_the_doctor_starts_ranks_and_finds_their_sum_right():
    [info] = [info for info in backend_infos() if info.name == "jittor"]
    found = {finding.what: finding for finding in checking.findings([info])}
    assert found["jittor: all-reduce"].verdict == "ok", found
    assert "rank 1 on cpu" in found["jittor: ranks"].text
