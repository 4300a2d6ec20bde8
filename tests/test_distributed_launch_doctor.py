"""`xmem doctor --distributed`, with ranks that are made up."""

import json
import socket

import pytest
from click.testing import CliRunner

from xmem.cli import main
from xmem.distributed import checking, launching
from xmem.distributed.supervising import Outcome
from xmem.errors import DistributedError
from xmem.plugins import BackendInfo
from xmem.records import Framework


def info(name="torch", launcher="torchrun", *, usable=True):
    fields = dict.fromkeys(BackendInfo.__dataclass_fields__)
    framework = Framework(name, name, f"pip install {name}", launcher=launcher)
    return BackendInfo(**{**fields, "name": name, "usable": usable, "framework": framework})


def report(rank, **changes):
    values = {
        "rank": rank,
        "engine": "gloo",
        "device": "cpu",
        "found": [3.0, 3.0],
        "expected": 3.0,
        "seconds": 0.001 * (rank + 1),
    }
    return f"[{rank}] xmem-checked {json.dumps({**values, **changes})}\n".encode()


@pytest.fixture
def ranks_say(monkeypatch):
    monkeypatch.delenv("XMEM_TIMEOUT", raising=False)
    monkeypatch.setattr(launching, "launcher_version", lambda launcher: f"{launcher} 1.0")

    def say(outcome, *lines, errors=b""):
        def launch(job, *, output, errors):
            seen.append(job)
            for line in lines:
                output.write(line)
            errors.write(said)
            return outcome

        said, seen = errors, []
        monkeypatch.setattr(launching, "launch", launch)
        return seen

    return say


def found(*infos):
    return {finding.what: (finding.verdict, finding.text) for finding in checking.findings(infos)}


def test_ranks_that_add_up_right_are_ok(ranks_say):
    jobs = ranks_say(Outcome(0), report(1), b"[0] a line of the framework\n", report(0))
    all_found = found(info(), info("broken", usable=False))
    assert {verdict for verdict, _ in all_found.values()} == {"ok"}
    assert list(all_found) == [
        "interfaces",
        "timeout",
        "torch: launcher",
        "torch: ranks",
        "torch: all-reduce",
    ]
    assert all_found["torch: launcher"][1] == "torchrun 1.0"
    assert "over gloo: rank 0 on cpu, rank 1 on cpu" in all_found["torch: ranks"][1]
    assert "1024 KiB in 2.0 ms" in all_found["torch: all-reduce"][1]
    assert (jobs[0].ranks, jobs[0].launcher, jobs[0].script[:2]) == (
        2,
        "torchrun",
        ("-m", "xmem.distributed.checking"),
    )


def test_a_wrong_sum_is_a_problem_with_a_remedy(ranks_say):
    ranks_say(Outcome(0), report(0), report(1, found=[2.0, 3.0]))
    verdict, text = found(info())["torch: all-reduce"]
    assert verdict == "problem"
    assert "[2.0, 3.0] on rank 1, and should be 3.0" in text
    assert "xmem conformance --backend torch" in text


def test_ranks_that_fail_are_a_problem_that_quotes_them(ranks_say):
    ranks_say(Outcome(137, rank=1), report(0), errors=b"[1] out of memory\n")
    verdict, text = found(info())["torch: ranks"]
    assert verdict == "problem"
    assert "1 of 2 ranks" in text
    assert "rank 1 failed first, with 137" in text
    assert "out of memory" in text


def test_a_missing_launcher_is_a_problem_and_nothing_is_started(ranks_say, monkeypatch):
    jobs = ranks_say(Outcome(0))

    def missing(launcher):
        raise DistributedError("there is no mpirun. Install Open MPI")

    monkeypatch.setattr(launching, "launcher_version", missing)
    all_found = found(info("jittor", "mpirun"))
    assert all_found["jittor: launcher"] == ("problem", "there is no mpirun. Install Open MPI")
    assert "jittor: ranks" not in all_found
    assert jobs == []


def test_a_backend_without_a_launcher_is_a_note(ranks_say):
    ranks_say(Outcome(0))
    assert found(info("numpy", ""))["numpy: launcher"][0] == "note"


@pytest.mark.parametrize(
    ("value", "verdict", "text"),
    [
        (None, "ok", "600 s for a rank that waits, the default"),
        ("5", "ok", "5 s for a rank that waits, from XMEM_TIMEOUT"),
        ("86400", "note", "86400 s"),
        ("soon", "problem", "XMEM_TIMEOUT is 'soon'"),
    ],
)
def test_the_timeout_in_force_is_said(ranks_say, monkeypatch, value, verdict, text):
    if value is not None:
        monkeypatch.setenv("XMEM_TIMEOUT", value)
    found_verdict, found_text = found()["timeout"]
    assert found_verdict == verdict
    assert text in found_text


def test_a_host_without_loopback_is_a_problem(ranks_say, monkeypatch):
    def refuse(self, address):
        raise OSError(99, "Cannot assign requested address")

    class Refusing(socket.socket):
        bind = refuse

    monkeypatch.setattr(checking.socket, "socket", Refusing)
    verdict, text = found()["interfaces"]
    assert verdict == "problem"
    assert "ip link set lo up" in text


def test_the_command_prints_every_finding_and_fails_for_a_problem(ranks_say, monkeypatch):
    monkeypatch.setattr("xmem.plugins.backend_infos", lambda: [info()])
    monkeypatch.setattr("xmem.cli.doctor._findings", lambda: iter([("python", "ok", "3")]))
    ranks_say(Outcome(0), report(0), report(1))
    ran = CliRunner().invoke(main, ["doctor", "--distributed"])
    assert ran.exit_code == 0, ran.output
    assert "torch: all-reduce" in ran.output
    ranks_say(Outcome(0), report(0), report(1, found=[1.0, 1.0]))
    assert CliRunner().invoke(main, ["doctor", "--distributed"]).exit_code == 1
    ran = CliRunner().invoke(main, ["doctor"])
    assert ran.exit_code == 0
    assert "all-reduce" not in ran.output
