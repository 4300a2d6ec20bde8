"""The monitor: a line a step, never a tensor, and nothing that can end a training."""

import json
import os
import re
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from fakes.monitored import fake_backend

import xmem
from xmem import api, meter
from xmem.conformance.full_disk import files_of_at_most
from xmem.errors import NoActiveBackendError, ReportError, SchemaError, UsageError, XmemWarning
from xmem.monitor import Monitor
from xmem.monitor_log import last_step, read_log, schema


@pytest.fixture
def backend(monkeypatch):
    found = fake_backend()
    monkeypatch.setattr(api, "_active", found)
    return found


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path):
    return [line for line in lines(path) if line["kind"] == "step"]


def test_each_step_is_a_line_with_the_pools_figures(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    with Monitor(path) as monitor:
        backend.measure.allocate(500)
        backend.measure.allocate(-300)
        monitor.step(loss=0.5, lr=1e-3, phase="warm-up")
        assert steps(path)  # it is there at once, not at the end
    begin, step, end = lines(path)
    assert (begin["kind"], begin["backend"], begin["first_step"]) == ("run", "fake", 1)
    assert step["step"] == 1
    assert step["allocated_bytes"] == 1200
    assert step["peak_allocated_bytes"] == 1500
    assert step["reserved_bytes"] == 4000
    assert step["fragmentation"] == 1 - 1200 / 4000
    assert step["process_bytes"] > 10**6
    assert step["out_of_memory_count"] == 0
    assert step["values"] == {"loss": 0.5, "lr": 1e-3, "phase": "warm-up"}
    assert 0 <= step["step_seconds"] < 5
    assert abs(step["time"] - time.time()) < 60
    assert (end["kind"], end["step"], end.get("error", "")) == ("end", 1, "")


def test_every_line_is_valid_by_the_schema(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    with Monitor(path, model=object()) as monitor:
        monitor.step(loss=float("nan"), note="text", flag=True)
    assert len(lines(path)) == 3
    for line in lines(path):
        jsonschema.validate(line, schema())


def test_the_peak_is_that_since_the_line_before(backend, tmp_path):
    with Monitor(tmp_path / "run.jsonl") as monitor:
        backend.measure.allocate(9000)
        backend.measure.allocate(-9000)
        assert monitor.step().peak_allocated_bytes == 10_000
        backend.measure.allocate(10)
        assert monitor.step().peak_allocated_bytes == 1010
        assert monitor.step().peak_allocated_bytes == 1010


def test_a_peak_before_the_monitor_is_not_its_own(backend, tmp_path):
    backend.measure.allocate(9000)
    backend.measure.allocate(-9000)
    with Monitor(tmp_path / "run.jsonl") as monitor:
        assert monitor.step().peak_allocated_bytes == 1000


def test_monitors_share_the_one_peak(backend, tmp_path):
    with Monitor(tmp_path / "a.jsonl") as often, Monitor(tmp_path / "b.jsonl", every=2) as seldom:
        backend.measure.allocate(9000)
        backend.measure.allocate(-9000)
        assert often.step().peak_allocated_bytes == 10_000
        seldom.step()
        assert often.step().peak_allocated_bytes == 1000
        assert seldom.step().peak_allocated_bytes == 10_000


def test_inside_a_measured_block_the_peak_is_left_to_it(backend, tmp_path, monkeypatch):
    with Monitor(tmp_path / "run.jsonl") as monitor:
        backend.measure.allocate(9000)
        backend.measure.allocate(-9000)
        monkeypatch.setattr(meter, "_open", object())
        assert monitor.step().peak_allocated_bytes is None
        assert backend.measure.peak == 10_000
        monkeypatch.setattr(meter, "_open", None)
        # the block's peak may be older than the line before
        assert monitor.step().peak_allocated_bytes is None
        assert monitor.step().peak_allocated_bytes == 1000


def test_every_third_step_is_a_line_and_the_rest_comes_at_the_end(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    with Monitor(path, every=3) as monitor:
        for number in range(1, 8):
            backend.measure.allocate(10)
            assert (monitor.step(n=number) is not None) == (number % 3 == 0)
    found = steps(path)
    assert [(s["step"], s["values"]["n"]) for s in found] == [(3, 3), (6, 6), (7, 7)]
    assert [s["allocated_bytes"] for s in found] == [1030, 1060, 1070]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (True, True),
        (10**12, 10**12),
    ],
)
def test_numbers_are_written_as_numbers(backend, tmp_path, value, expected):
    path = tmp_path / "run.jsonl"
    with Monitor(path) as monitor:
        monitor.step(value=value)
    written = steps(path)[0]["values"]["value"]
    assert written == expected
    assert type(written) is type(expected)


class Tensor:
    """Says so if anybody reads it."""

    def __float__(self):
        raise AssertionError("it was read")

    __int__ = __bool__ = __index__ = __str__ = __repr__ = __array__ = item = __float__


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("value", [Tensor(), np.zeros(()), [1.0], 1j, b"text"])
def test_a_tensor_is_refused_unread_and_log_value_named(backend, tmp_path, value, every):
    path = tmp_path / "run.jsonl"
    with Monitor(path, every=every) as monitor:
        with pytest.raises(UsageError, match=r"loss is a .*attach loss=xmem\.log_value"):
            monitor.step(loss=value)
        monitor.step(loss=1.0)
    assert [s["step"] for s in steps(path)] == [1]
    assert hasattr(xmem, "log_value")


def test_model_and_optimizer_are_told_on_the_lines_1_2_4_8(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    with Monitor(path, model=object(), optimizer=object()) as monitor:
        for _ in range(9):
            monitor.step()
    found = {s["step"]: s["owned_bytes"] for s in steps(path) if s.get("owned_bytes")}
    assert list(found) == [1, 2, 4, 8]
    assert found[1] == {"parameter": 7, "optimizer": 10}


def test_where_blocks_have_no_categories_owned_bytes_are_those_of_the_tensors(backend, tmp_path):
    weight, tied = [0] * 4, [0] * 3
    backend.measure.gaps = {"by_category": "totals only"}
    backend.measure.owned = lambda *_: {"parameter": [weight, tied, tied], "gradient": []}
    backend.pool = SimpleNamespace(tensor_bytes=len)
    with Monitor(tmp_path / "run.jsonl", model=object()) as monitor:
        assert monitor.step().owned_bytes == {"parameter": 7}


def test_a_second_run_comes_behind_the_first_and_begins_at_1(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        with Monitor(path) as monitor:
            monitor.step()
            monitor.step()
    log = read_log(path)
    assert [[s.step for s in run.steps] for run in log.runs] == [[1, 2], [1, 2]]
    assert [run.begin.first_step for run in log.runs] == [1, 1]


def test_resume_goes_on_after_the_last_step_even_of_a_killed_run(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    with Monitor(path, resume=True) as monitor:  # nothing there yet: from 1
        monitor.step()
        monitor.step()
    with path.open("a") as file:
        file.write('{"kind":"step","step":3,"ti')  # killed while it wrote
    with Monitor(path, resume=True) as monitor:
        monitor.step()
    log = read_log(path)
    assert [[s.step for s in run.steps] for run in log.runs] == [[1, 2], [3]]
    assert log.cut_lines == 1
    assert log.last_step == last_step(path) == 3


def test_another_file_is_refused_and_left_alone(backend, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"my": "settings"}\n')
    with pytest.raises(SchemaError, match=r"no file of xmem\.Monitor"):
        Monitor(path)
    assert path.read_text() == '{"my": "settings"}\n'


def test_another_version_is_refused(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    Monitor(path).close()
    path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":9'))
    for read in (Monitor, read_log):
        with pytest.raises(SchemaError, match=r"schema version 9; this xmem reads 1"):
            read(path)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_every_is_a_whole_number_of_steps(backend, tmp_path, every):
    with pytest.raises(UsageError, match="every="):
        Monitor(tmp_path / "run.jsonl", every=every)
    assert list(tmp_path.iterdir()) == []


def test_a_monitor_that_writes_nowhere_is_refused(backend):
    with pytest.raises(UsageError, match="somewhere to write"):
        Monitor()
    with pytest.raises(UsageError, match="give its path"):
        Monitor(tensorboard="folder", resume=True)


def test_a_file_that_cannot_be_opened_is_refused_at_once(backend, tmp_path):
    for path in (tmp_path / "none" / "run.jsonl", tmp_path):
        with pytest.raises(ReportError, match=re.escape(str(path))):
            Monitor(path)


def test_without_a_backend_it_says_what_to_call(monkeypatch, tmp_path):
    monkeypatch.setattr(api, "_active", None)
    with pytest.raises(NoActiveBackendError, match=r"xmem\.use"):
        Monitor(tmp_path / "run.jsonl")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a\udcffb", "a\\udcffb"), (10**5000, None), (-(10**5000), None), (10**400, 10**400)],
    ids=["surrogate", "huge", "negative", "large"],
)
def test_a_value_that_json_cannot_hold_ends_no_training(backend, tmp_path, value, expected):
    path = tmp_path / "run.jsonl"
    with Monitor(path) as monitor:
        monitor.step(before=1, **{"name\udcff": 2})
        monitor.step(value=value, kept=3)
        monitor.step(after=1)
    log = read_log(path)
    assert log.cut_lines == 0
    first, second, third = log.runs[0].steps
    assert first.values == {"before": 1, "name\\udcff": 2}
    assert second.values == {"value": expected, "kept": 3}
    assert third.values == {"after": 1}


def test_any_name_can_be_attached(backend, tmp_path):
    with Monitor(tmp_path / "run.jsonl") as monitor:
        record = monitor.step(**{"self": 1, "step": 2, "values": 3, "a/b c": 4})
    assert record.values == {"self": 1, "step": 2, "values": 3, "a/b c": 4}
    assert record.step == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks of files there")
def test_a_second_monitor_on_one_file_is_told_and_a_later_one_is_not(backend, tmp_path):
    path = tmp_path / "run.jsonl"
    with Monitor(path), pytest.warns(XmemWarning, match="already") as said:
        Monitor(path).close()
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Monitor(path).close()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_written_and_never_read(backend, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with Monitor(pipe, resume=True) as monitor:
            monitor.step()
        kinds = [json.loads(line)["kind"] for line in os.read(reader, 1 << 16).splitlines()]
    finally:
        os.close(reader)
    assert kinds == ["run", "step", "end"]


def test_a_run_that_could_not_begin_leaves_the_file_as_it_was(backend, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: write(file, data[:20]))
        with pytest.raises(ReportError, match="room"):
            Monitor(path)
    assert path.read_bytes() == b""
    Monitor(path, resume=True).close()
    assert len(read_log(path).runs) == 1


def test_after_a_full_disk_training_goes_on_and_lines_come_back(backend, tmp_path):
    """A real limit of the system on the size of files cuts a line in the middle."""
    path = tmp_path / "run.jsonl"
    monitor = Monitor(path)
    monitor.step(n=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with files_of_at_most(path.stat().st_size + 50):
            for number in range(2, 6):
                monitor.step(n=number)
    monitor.step(n=6)
    monitor.close()
    told = [str(w.message) for w in caught if issubclass(w.category, XmemWarning)]
    assert len(told) == 1, told
    assert "Training goes on" in told[0]
    log = read_log(path)
    assert [s.values["n"] for s in log.runs[0].steps] == [1, 6]
    assert log.runs[0].end is not None
    assert log.cut_lines == 1


def test_what_ended_the_training_is_in_the_last_line_and_comes_through(backend, tmp_path):
    path = tmp_path / "run.jsonl"

    def train():
        with Monitor(path, every=100) as monitor:
            monitor.step(loss=1.0)
            raise MemoryError("too much")

    with pytest.raises(MemoryError, match="too much"):
        train()
    run = read_log(path).runs[0]
    assert run.end.error == "MemoryError"
    assert [s.step for s in run.steps] == [1]


def test_closing_twice_is_harmless_and_stepping_afterwards_is_not(backend, tmp_path):
    monitor = Monitor(tmp_path / "run.jsonl")
    monitor.close()
    monitor.close()
    with pytest.raises(UsageError, match="closed"):
        monitor.step()


def test_a_monitor_that_nobody_closes_is_closed_at_exit(tmp_path):
    path = tmp_path / "run.jsonl"
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from fakes.monitored import fake_backend\n"
        "from xmem import api; api._active = fake_backend()\n"
        "from xmem.monitor import Monitor\n"
        "monitor = Monitor(sys.argv[2], every=5); monitor.step(n=1)\n"
        "if os.fork() == 0: sys.exit()\n"  # a child must not end the parent's run
        "os.wait(); monitor.step(n=2)\n"
    )
    here = os.path.dirname(__file__)  # noqa: PTH120
    subprocess.run([sys.executable, "-c", code, here, str(path)], check=True, timeout=60)
    assert [line["kind"] for line in lines(path)] == ["run", "step", "end"]
    assert steps(path)[0]["values"] == {"n": 2}


def test_a_source_without_peaks_says_so(backend, tmp_path):
    backend.measure.gaps = {"peak": "the profiler knows none"}
    backend.measure.counters = lambda: SimpleNamespace(
        allocated_bytes=7, peak_allocated_bytes=None, reserved_bytes=None, out_of_memory_count=None
    )
    with pytest.warns(XmemWarning, match="profiler knows none"):
        monitor = Monitor(tmp_path / "run.jsonl")
    record = monitor.step()
    monitor.close()
    assert (record.allocated_bytes, record.fragmentation) == (7, None)


def test_a_line_costs_less_than_fifty_microseconds(backend, tmp_path):
    with Monitor(tmp_path / "run.jsonl") as monitor:
        best = 1.0
        for _ in range(20):
            started = time.process_time()
            for _ in range(50):
                monitor.step(loss=0.5, lr=1e-3)
            best = min(best, (time.process_time() - started) / 50)
    assert best < 50e-6, f"{best * 1e6:.1f} us"
