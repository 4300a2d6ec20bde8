"""The tools do what the Makefile says of them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from xmem.report.model import Report, read_json

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.fixture
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", TOOLS / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_the_gpu_check_says_so_and_ends_well(gpu_check):
    if gpu_check.gpu_name() is not None:
        pytest.skip("there is a GPU here")
    ran = subprocess.run(
        [sys.executable, TOOLS / "gpu_check.py"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "no NVIDIA GPU" in ran.stdout


@pytest.mark.torch
def test_the_gpu_checks_matrix_writes_its_report(gpu_check, tmp_path, monkeypatch, capsys):
    """On a CPU, since that is what every machine has."""
    pytest.importorskip("torch")
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path)
    assert gpu_check.run_matrix("cpu", backends=("torch",), workloads=("mlp",)) == 0
    report = read_json(tmp_path / "cpu-quick.json", Report)
    assert [r.status for r in report.results] == ["ok"] * 3
    assert "3 of 3 cases" in capsys.readouterr().out
    assert "checkpoint" in (tmp_path / "cpu-quick.md").read_text()


@pytest.mark.torch
def test_what_the_time_does_not_allow_is_named_and_a_failure(
    gpu_check, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("torch")
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_check, "BUDGET_SECONDS", 0.0)
    assert gpu_check.run_matrix("cpu", backends=("torch",), workloads=("mlp",)) == 1
    assert capsys.readouterr().out.count("not run") == 3


def outlived(*command):
    return subprocess.run(
        [sys.executable, TOOLS / "outlive.py", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_command_that_a_signal_killed_is_run_once_more_and_it_is_said(tmp_path):
    code = (
        "import os, pathlib; seen = pathlib.Path('seen'); count = len(seen.read_text()) "
        "if seen.exists() else 0; seen.write_text('x' * (count + 1)); "
        "os.abort() if count == 0 else print('alive')"
    )
    command = ["sh", "-c", f'cd {tmp_path} && exec {sys.executable} -c "{code}"']
    ran = outlived(*command)
    assert ran.returncode == 0
    assert "SIGABRT KILLED" in ran.stderr
    assert "run once more" in ran.stderr
    assert ran.stdout == "alive\n"


def test_a_command_that_dies_every_time_fails(tmp_path):
    ran = outlived(sys.executable, "-c", "import os; os.abort()")
    assert ran.returncode == 128 + 6
    assert ran.stderr.count("SIGABRT KILLED") == 2


def test_a_command_that_fails_is_not_run_again(tmp_path):
    seen = tmp_path / "seen"
    ran = outlived(
        sys.executable, "-c", f"open({str(seen)!r}, 'a').write('x'); raise SystemExit(3)"
    )
    assert ran.returncode == 3
    assert seen.read_text() == "x"
