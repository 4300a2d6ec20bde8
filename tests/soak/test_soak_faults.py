"""Faults: a comparison that is killed again and again loses one case at most, and ends whole."""

import os
import random
import signal
import subprocess
import sys

import pytest

from xmem.report.model import Report, Result, read_json

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("crashy")]

COMMAND = [
    *(sys.executable, "-m", "xmem", "compare", "--backend", "crashy", "--resume"),
    *("--workload", "mlp", "--workload", "gpt2", "--workload", "bert"),
]


@pytest.mark.parametrize("seed", range(5))
def test_a_comparison_killed_at_random_ends_whole(seed, tmp_path):
    generator = random.Random(seed)
    command = [*COMMAND, "-o", str(tmp_path)]
    seen = 0
    for _ in range(12):
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(generator.uniform(0.2, 2.5))
        except subprocess.TimeoutExpired:
            # the comparison only: its worker must not be able to spoil what comes after
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        cases = [read_json(p, Result) for p in sorted((tmp_path / "cases").glob("*.json"))]
        assert [r.reason for r in cases if r.status not in ("ok", "unsupported")] == []
        assert len(cases) >= seen - 1, "a finished case was lost"
        seen = len(cases)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    report = read_json(tmp_path / "report.json", Report)
    assert sorted(r.status for r in report.results) == ["ok"] * 6 + ["unsupported"] * 3


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path):
    """The size of files is limited to nothing, as on a disk that is full."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "from xmem.cli import main; sys.argv[0] = 'xmem'; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "compare", "--backend", "crashy", "-o", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 2
    assert "cannot write" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("report.json"))
