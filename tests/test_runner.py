"""The runner: one case, one process, one file, whatever the process does."""

import os
import sys
import time
from pathlib import Path

import pytest

from xmem.conformance import worker
from xmem.conformance.launched import start
from xmem.conformance.runner import _wait, finished, matrix, result_path, run_case, run_cases
from xmem.errors import BackendNotFoundError, UsageError
from xmem.report.model import Case, Result, read_json

pytestmark = pytest.mark.usefixtures("crashy")


def case(technique="baseline", **changes):
    return Case(**{"workload": "mlp", "technique": technique, "backend": "crashy", **changes})


def gone(pid):
    """Say whether a process has ended; a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_until_gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(gone(pid) for pid in pids):
        time.sleep(0.05)
    return all(gone(pid) for pid in pids)


def test_a_case_gives_bytes_losses_and_calls(tmp_path):
    result = run_case(case(), tmp_path)
    assert (result.status, result.reason) == ("ok", "")
    assert result.static_bytes == 1000
    assert result.peak_allocated_bytes == 1900
    assert result.peaks_bytes == (1900, 1900, 1900)
    assert result.block_forward_calls == 3
    assert len(result.losses) == 5
    assert result.losses[0] > result.losses[-1]
    assert result.device == "cpu"
    assert result.by_category == {"parameter": 1000, "activation": 900}
    assert read_json(result_path(case(), tmp_path), Result) == result


def test_checkpointing_calls_each_block_twice(tmp_path):
    result = run_case(case("checkpoint"), tmp_path)
    assert result.applied_to == 3
    assert result.block_forward_calls == 6
    assert result.peak_above_static_bytes == 400


def test_what_a_backend_says_while_it_works_is_passed_on(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "status"})
    said = []
    assert run_case(case(), tmp_path, on_status=said.append).status == "ok"
    assert set(said) == {"xmem: half way there"}


def test_what_all_ranks_say_while_they_work_is_passed_on_once(tmp_path):
    lines = ["[1] xmem: compiling", "[0] xmem: compiling", "[0] [1] xmem: no", "[0] xmem: done"]
    log = tmp_path / "log"
    process = start([sys.executable, "-c", f"print({chr(10).join(lines)!r})"], log, {})
    said = []
    assert _wait(process, 60.0, log, said.append) == 0
    assert said == ["xmem: compiling", "xmem: done"]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_worker_killed_by_a_signal_is_an_error_with_the_signals_name(name, crashy, tmp_path):
    crashy.plan({"mlp/baseline": name})
    result = run_case(case(), tmp_path)
    assert result.status == "error"
    assert result.reason == f"killed by {name}; last output: about to be killed"
    assert read_json(result_path(case(), tmp_path), Result) == result


def test_a_worker_that_exits_without_a_result_is_an_error_with_its_status(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "exit"})
    result = run_case(case(), tmp_path)
    assert (result.status, result.reason) == (
        "error",
        "exit status 3 without a result; no output",
    )


def test_a_worker_that_hangs_is_a_timeout_and_its_children_end_with_it(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "hang"})
    result = run_case(case(), tmp_path, timeout_seconds=4)
    assert result.status == "timeout"
    assert result.reason == "no result after 4 s; the process was ended"
    pids = crashy.hanging_pids()
    assert len(pids) == 2
    assert wait_until_gone(pids)


def test_what_a_worker_prints_goes_nowhere_near_its_result(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "noise"})
    result = run_case(case(), tmp_path)
    assert result.status == "ok"
    log = result_path(case(), tmp_path).with_suffix(".log").read_bytes()
    assert b'{"status": "ok"}' in log


def test_an_exception_in_a_worker_is_told_by_type_first_and_last_line(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "raise"})
    result = run_case(case(), tmp_path)
    assert result.status == "error"
    assert result.reason == ("RuntimeError: first line <script>alert(1)</script> [...] last | line")


def test_the_reason_inside_a_page_of_facts_is_told():
    page = (
        "\x1b[38;5;1m[f 1130 executor.cc:686]\nExecute fused operator(0/2) failed.\n[Input]:\n"
        "[Reason]: no room for 4000 bytes\x1b[m\n****\nrerun your code with\n>>> export JT_SYNC=1"
    )
    assert worker.reason_of(RuntimeError(page)) == (
        "RuntimeError: [f 1130 executor.cc:686] [...] [Reason]: no room for 4000 bytes [...] ****"
        " [...] >>> export JT_SYNC=1"
    )
    assert worker.reason_of(RuntimeError("")) == "RuntimeError: "


def test_a_case_that_failed_is_run_again_where_asked_and_says_so(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "raise_once"})
    [result] = run_cases([case()], tmp_path, retries=1)
    assert result.status == "ok"
    [told] = result.warnings
    assert told.startswith("it was run again; before, it ended as error: RuntimeError: first line")
    assert read_json(result_path(case(), tmp_path), Result) == result
    assert "first line" in result_path(case(), tmp_path).with_suffix(".failed.log").read_text()
    crashy.plan({"mlp/baseline": "raise"})
    [result] = run_cases([case()], tmp_path, retries=1)
    assert result.status == "error"
    assert "it was run again" in result.warnings[0]


def test_a_refused_request_is_out_of_memory_by_the_allocators_own_count(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "out_of_memory"})
    result = run_case(case(), tmp_path)
    assert (result.status, result.reason) == ("out_of_memory", "MemoryError: no room")


def test_a_limit_between_two_peaks_lets_only_the_lower_one_run(tmp_path):
    assert run_case(case(limit_bytes=1500), tmp_path).status == "out_of_memory"
    assert run_case(case("checkpoint", limit_bytes=1500), tmp_path).status == "ok"


def test_a_missing_framework_is_unavailable_with_the_install_hint(crashy, tmp_path):
    crashy.lose_framework()
    result = run_case(case(), tmp_path)
    assert result.status == "unavailable"
    assert "pip install crashy-framework" in result.reason


def test_a_missing_device_is_unavailable(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "unavailable"})
    assert run_case(case(), tmp_path).status == "unavailable"


def test_a_missing_capability_is_unsupported(tmp_path):
    result = run_case(case("autocast"), tmp_path)
    assert (result.status, result.reason) == (
        "unsupported",
        "backend 'crashy' does not offer 'precision'",
    )


def test_a_loss_that_is_not_a_number_is_null_and_the_result_is_kept(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "nan"})
    result = run_case(case(), tmp_path)
    assert result.status == "ok"
    assert result.losses == (None,) * 5


def test_gradients_are_kept_when_they_are_asked_for(tmp_path):
    kept = case(save_gradients=True)
    run_case(kept, tmp_path)
    assert result_path(kept, tmp_path).with_suffix(".npz").exists()
    assert finished(kept, tmp_path) is not None
    result_path(kept, tmp_path).with_suffix(".npz").unlink()
    assert finished(kept, tmp_path) is None


def test_one_bad_case_does_not_stop_the_others(crashy, tmp_path):
    crashy.plan({"mlp/checkpoint": "SIGKILL"})
    cases = matrix(["crashy"], ["mlp", "bert"], ["baseline", "checkpoint"])
    results = list(run_cases(cases, tmp_path))
    assert [r.status for r in results] == ["ok", "error", "ok", "ok"]
    assert [r.case for r in results] == cases


def test_a_resumed_run_takes_what_settled_and_repeats_what_failed(crashy, tmp_path):
    cases = matrix(["crashy"], ["mlp"], ["baseline", "checkpoint", "autocast"])
    crashy.plan({"mlp/checkpoint": "SIGKILL"})
    first = list(run_cases(cases, tmp_path))
    assert [r.status for r in first] == ["ok", "error", "unsupported"]
    crashy.plan({})
    second = list(run_cases(cases, tmp_path, resume=True))
    assert [r.status for r in second] == ["ok", "ok", "unsupported"]
    assert (second[0], second[2]) == (first[0], first[2])


def test_a_result_of_other_settings_or_a_broken_file_is_not_taken(tmp_path):
    run_case(case(), tmp_path)
    assert finished(case(), tmp_path) is not None
    assert finished(case(threads=1), tmp_path) is None
    assert finished(case(limit_bytes=10**9), tmp_path) is None
    result_path(case(), tmp_path).write_text('{"schema_version": 1, "ca', encoding="utf-8")
    assert finished(case(), tmp_path) is None


def test_an_unknown_name_is_refused_before_anything_runs():
    with pytest.raises(BackendNotFoundError, match="Did you mean 'crashy'"):
        matrix(["crashi"], ["mlp"], ["baseline"])
    with pytest.raises(UsageError, match="Did you mean 'checkpoint'"):
        matrix(["crashy"], ["mlp"], ["chekpoint"])


def test_threads_reach_the_worker_through_its_environment(tmp_path, monkeypatch):
    from xmem.conformance import runner

    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert runner._environment(case(threads=3))["OMP_NUM_THREADS"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "64"


def test_a_result_that_no_report_can_hold_is_an_error_and_the_rest_still_runs(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "bad_settings"})
    found = list(run_cases([case(), case("checkpoint")], tmp_path))
    assert [r.status for r in found] == ["error", "ok"]
    assert "Expected `str`, got `int`" in found[0].reason


def test_what_another_version_or_machine_measured_is_measured_again(tmp_path):
    import msgspec

    from xmem.report.model import Machine, write_json

    result = run_case(case(), tmp_path)
    assert finished(case(), tmp_path) == result
    elsewhere = msgspec.structs.replace(Machine.here(), processor_count=1000)
    for change in ({"machine": elsewhere}, {"distribution": "xmem-crashy 0.0"}):
        write_json(msgspec.structs.replace(result, **change), result_path(case(), tmp_path))
        assert finished(case(), tmp_path) is None
