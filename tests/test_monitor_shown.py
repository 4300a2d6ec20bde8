"""What a monitor wrote, shown: on the terminal, in TensorBoard, in Weights & Biases."""

import json
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fakes.monitored import FakeRun, fake_backend, fake_tensorboard

from xmem import api
from xmem.cli.monitor import command
from xmem.errors import SchemaError, UsageError, XmemWarning
from xmem.monitor import Monitor


@pytest.fixture
def backend(monkeypatch):
    found = fake_backend()
    monkeypatch.setattr(api, "_active", found)
    return found


def steps(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if line["kind"] == "step"]


def show(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.fixture
def log(backend, tmp_path):
    """Return a run of 40 steps with its peak at step 17, cut off in the last line."""
    path = tmp_path / "run.jsonl"
    with Monitor(path) as monitor:
        monitor.step(loss=9.0)
    with Monitor(path, model=object()) as monitor:
        for number in range(1, 41):
            if number == 17:
                backend.measure.allocate(1 << 30)
                backend.measure.allocate(-(1 << 30))
            monitor.step(loss=1 / number, phase="train")
    with path.open("a") as file:
        file.write('{"kind":"step","st')
    return path


def test_the_terminal_shows_the_latest_steps_the_peak_and_where_it_was(log):
    ran = show(log, "--last", 3)
    assert ran.exit_code == 0, ran.output
    table, summary = ran.output.split("\n\n", 1)
    rows = [row.split() for row in table.splitlines()]
    assert rows[0][:4] == ["Step", "loss", "phase", "Allocated"]
    assert [row[0] for row in rows[1:]] == ["38", "39", "40"]
    assert rows[3][1:3] == ["0.025", "train"]
    assert "peak 1.00 GiB at step 17\n" in summary
    assert "fake 1.0 on cpu, 40 lines" in summary
    assert "owned: parameter 7 B" in summary
    assert "growth: none that goes on" in summary
    assert "earlier runs in this file, not shown: 1\n" in summary
    assert "cut off and left out: 1\n" in summary


def test_growth_that_goes_on_is_told_per_step(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    with Monitor(path) as monitor:
        for _ in range(30):
            backend.measure.allocate(4096)
            monitor.step()
    assert "growth: 4.00 KiB a step" in show(path).output


def test_what_ended_a_run_is_shown(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    backend.measure.refused = 2
    monitor = Monitor(path, every=4)
    for _ in range(5):
        monitor.step()
    monitor.close(error="OutOfMemoryError")
    told = show(path).output
    assert "ended by OutOfMemoryError after step 5" in told
    assert "refused for want of memory: 2\n" in told
    assert "or one of the 3 before it" in told
    assert "14 lines are needed" in told


def test_a_file_without_steps_and_one_of_another_kind_are_told_apart(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    Monitor(path).close()
    assert "no steps yet" in show(path).output
    path.write_text("a,b\n1,2\n")
    assert isinstance(show(path).exception, SchemaError)
    assert show(tmp_path / "none.jsonl").exit_code == 2


@pytest.mark.parametrize("target", ["tensorboard", "tensorboard:", "mlflow:x", "x"])
def test_a_target_that_is_none_is_refused_with_the_two(log, target):
    ran = show(log, "--to", target)
    assert isinstance(ran.exception, UsageError)
    assert "tensorboard:FOLDER or wandb:PROJECT" in str(ran.exception)


def test_a_file_is_sent_to_a_dashboard_afterwards(log, monkeypatch):
    written = []
    for name, module in fake_tensorboard(written).items():
        monkeypatch.setitem(sys.modules, name, module)
    ran = show(log, "--to", "tensorboard:folder")
    assert ran.exit_code == 0, ran.output
    assert "sent 41 steps to TensorBoard folder" in ran.output
    assert [e.step for e in written[:-1]] == [1, *range(1, 41)]
    assert show(log, "--to", "tensorboard:folder", "--follow").exit_code == 2


def test_follow_shows_steps_as_they_come_until_it_is_interrupted(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    monitor = Monitor(path)
    monitor.step(n=1)
    code = "import sys; from xmem.cli.monitor import command; command()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(path), "--follow"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while not process.stdout.readline().startswith("growth"):
            pass
        for number in range(2, 5):
            monitor.step(n=number)
        monitor.close()
        seen = [process.stdout.readline().split()[0] for _ in range(4)]
        assert seen == ["2", "3", "4", "ended"]
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()


def test_tensorboard_gets_numbers_by_name(backend, monkeypatch):
    written = []
    for name, module in fake_tensorboard(written).items():
        monkeypatch.setitem(sys.modules, name, module)
    with Monitor(tensorboard="folder") as monitor:
        monitor.step(loss=0.5, note="text", nothing=None)
    event, closed = written
    assert closed == "closed"
    found = {v.tag: v.simple_value for v in event.summary.value}
    assert event.step == 1
    assert found["loss"] == 0.5
    assert found["memory/allocated_bytes"] == 1000
    assert "note" not in found
    assert "nothing" not in found


def test_tensorboardx_is_the_second_choice(backend, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, *values):
            written.append(values)

        def close(self):
            written.append(self.folder)

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    with Monitor(tensorboard="folder") as monitor:
        monitor.step(loss=0.5)
    assert ("loss", 0.5, 1) in {w[:3] for w in written}
    assert written[-1] == "folder"


def test_missing_dashboards_are_named_with_the_command_and_no_file_is_begun(
    backend, monkeypatch, tmp_path
):
    for name in ("tensorboard", "tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        Monitor(tmp_path / "run.jsonl", tensorboard="folder")
    with pytest.raises(UsageError, match="pip install wandb"):
        Monitor(tmp_path / "run.jsonl", wandb="project")
    with pytest.raises(UsageError, match="neither a project's name nor a run"):
        Monitor(tmp_path / "run.jsonl", wandb=3)
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_weights_and_biases_is_begun_and_finished_or_given(backend, monkeypatch):
    begun = []

    def init(**how):
        begun.append(FakeRun(**how))
        return begun[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    given = FakeRun()
    for run in ("project", given):
        with Monitor(wandb=run) as monitor:
            monitor.step(loss=0.5, note="text")
    for run in (begun[0], given):
        values = run.logged[0][1]
        assert (values["loss"], values["note"]) == (0.5, "text")
        assert values["memory/peak_allocated_bytes"] == 1000
    # W&B drops what comes with an earlier step than others have logged in the same run
    assert [r.logged[0][0] for r in (begun[0], given)] == [1, None]
    assert given.logged[0][1]["memory/step"] == 1
    assert ("memory/*", "memory/step") in given.defined
    assert begun[0].started == {"project": "project"}
    assert (begun[0].finished, given.finished) == (True, False)


def test_a_dashboard_that_fails_is_told_once_and_the_file_goes_on(backend, tmp_path):
    class Broken:
        def log(self, values):
            raise ConnectionError("no network")

    path = tmp_path / "run.jsonl"
    monitor = Monitor(path, wandb=Broken())
    with pytest.warns(XmemWarning, match="no network"):
        monitor.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            monitor.step()
        monitor.close()
    assert len(steps(path)) == 5
