"""The command line: what it prints, writes and returns."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from fakes.results import MIB, make_bad, make_fake_report, make_result

import xmem
from xmem.cli import main
from xmem.plugins import BackendInfo
from xmem.report.model import Report, read_json, schema, write_json

XMEM = [sys.executable, "-m", "xmem"]
VERBS = (
    "backends",
    "compare",
    "conformance",
    "diff",
    "doctor",
    "find-batch",
    "launch",
    "monitor",
    "plan",
    "schema",
)


def invoke(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def compare(*arguments):
    return invoke("compare", "--backend", "crashy", "--workload", "mlp", *arguments)


def test_the_version_is_the_packages():
    ran = invoke("--version")
    assert ran.exit_code == 0
    assert xmem.__version__ in ran.stdout


def test_help_lists_every_verb_with_a_sentence():
    ran = invoke("--help")
    for verb in VERBS:
        assert re.search(rf"^  {verb} +[A-Z]", ran.stdout, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb):
    ran = invoke(verb, "--help")
    assert ran.exit_code == 0
    assert "Usage:" in ran.stdout


def test_python_m_xmem_is_the_command_line():
    ran = subprocess.run([*XMEM, "--help"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("Usage: xmem ")


def test_the_command_line_imports_only_what_a_verb_needs():
    code = (
        "import sys, xmem.cli\n"
        "try: xmem.cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy','rich','plotly','jinja2','msgspec','pluggy','torch','jittor'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "near", "valid"),
    [
        (["compar"], "compare", "backends, compare"),
        (["compare", "--backend", "crashi"], "crashy", "crashy"),
        (["compare", "--workload", "resnet81"], "resnet18", "bert, gpt2, gpt2-text, mlp"),
        (["compare", "--technique", "chekpoint"], "checkpoint", "autocast, baseline, checkpoint"),
        (["compare", "--preset", "quik"], "quick", "paper, quick, standard"),
        (["compare", "--device", "cude"], "cuda", "auto, cpu, cuda"),
        (["conformance", "--backend", "crashi"], "crashy", "crashy"),
        (["conformance", "--backend", "crashy", "--technique", "basline"], "baseline", "autocast"),
    ],
)
def test_an_unknown_name_is_exit_2_with_the_nearest_and_the_valid_ones(
    crashy, arguments, near, valid, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ran = invoke(*arguments)
    assert ran.exit_code == 2
    assert f"Did you mean {near!r}?" in ran.stderr
    assert valid in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "xmem-report").exists()


@pytest.mark.parametrize("limit", ["64 lemons", "-1", "1.5B"])
def test_a_limit_that_is_no_size_is_exit_2(crashy, limit):
    ran = compare("--limit", limit)
    assert ran.exit_code == 2
    assert limit in ran.stderr


def test_a_folder_that_cannot_be_written_is_exit_2(crashy, tmp_path):
    (tmp_path / "file").write_text("")
    ran = compare("-o", tmp_path / "file" / "report")
    assert ran.exit_code == 2
    assert "cannot write" in ran.stderr


def test_compare_writes_cases_and_three_reports_and_says_where(crashy, tmp_path):
    ran = compare("-o", tmp_path)
    assert ran.exit_code == 0
    for name in ("report.json", "report.md", "report.html"):
        assert (tmp_path / name).exists()
        assert str(tmp_path / name) in ran.stdout
    assert len(list((tmp_path / "cases").glob("*.json"))) == 6
    raw = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(raw, schema())
    assert [r["status"] for r in raw["results"]] == ["ok", "ok", *["unsupported"] * 4]


def test_without_a_terminal_each_case_is_one_plain_line(crashy, tmp_path):
    ran = compare("-o", tmp_path)
    lines = ran.stdout.splitlines()
    assert lines[0] == "crashy warms up first"
    assert lines[1].startswith("[1/6] mlp / baseline / crashy: ok; peak 1.86 KiB; above static")
    assert "saving 2.25x" in lines[2]
    assert lines[3].endswith("unsupported; backend 'crashy' does not offer 'plans'")
    assert lines[4].endswith("unsupported; backend 'crashy' does not offer 'precision'")
    assert lines[5].endswith("unsupported; backend 'crashy' does not offer 'saved'")
    assert lines[6].endswith("unsupported; backend 'crashy' does not offer 'saved'")
    assert "\x1b" not in ran.stdout


def test_json_is_all_there_is_on_stdout(crashy, tmp_path):
    ran = compare("-o", tmp_path, "--json", "--technique", "baseline")
    assert ran.exit_code == 0
    assert ran.stdout == (tmp_path / "report.json").read_text(encoding="utf-8")
    assert "[1/1] mlp / baseline / crashy: ok" in ran.stderr


def test_a_crash_is_a_row_the_rest_runs_and_the_exit_status_is_1(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "SIGKILL"})
    ran = compare("-o", tmp_path)
    assert ran.exit_code == 1
    assert "error; killed by SIGKILL" in ran.stdout
    report = read_json(tmp_path / "report.json", Report)
    assert [r.status for r in report.results] == ["error", "ok", *["unsupported"] * 4]
    assert "killed by SIGKILL" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_out_of_memory_is_expected_with_a_limit_and_a_failure_without(crashy, tmp_path):
    limited = compare("-o", tmp_path, "--limit", "1500", "--technique", "baseline")
    assert "out of memory" in limited.stdout
    assert limited.exit_code == 0
    crashy.plan({"mlp/baseline": "out_of_memory"})
    assert compare("-o", tmp_path, "--technique", "baseline").exit_code == 1


def test_a_timeout_is_exit_1(crashy, tmp_path):
    crashy.plan({"mlp/baseline": "hang"})
    ran = compare("-o", tmp_path, "--timeout", "1", "--technique", "baseline")
    assert ran.exit_code == 1
    assert "timeout; no result after 1 s" in ran.stdout


def test_a_named_backend_that_is_not_usable_is_a_row_with_its_install_hint(crashy, tmp_path):
    crashy.lose_framework()
    ran = compare("-o", tmp_path, "--technique", "baseline")
    assert ran.exit_code == 1
    assert "unavailable" in ran.stdout
    assert "pip install crashy-framework" in ran.stdout


def usable(name="crashy"):
    return BackendInfo(name, "xmem-crashy 1.0", usable=True, reason="", framework_version="1")


def unusable(name):
    return BackendInfo(
        name, "xmem-train", usable=False, reason="install it so", framework_version=None
    )


def test_without_a_name_only_usable_backends_run_and_the_others_are_mentioned(
    crashy, tmp_path, monkeypatch
):
    monkeypatch.setattr("xmem.plugins.backend_infos", lambda: [unusable("lost"), usable()])
    ran = invoke("compare", "--workload", "mlp", "--technique", "baseline", "-o", tmp_path)
    assert ran.exit_code == 0
    assert "lost is left out: install it so" in ran.stdout
    report = read_json(tmp_path / "report.json", Report)
    assert [r.case.backend for r in report.results] == ["crashy"]


def test_without_a_usable_backend_it_is_exit_2_with_how_to_get_one(monkeypatch):
    monkeypatch.setattr("xmem.plugins.backend_infos", lambda: [unusable("lost")])
    ran = invoke("compare")
    assert ran.exit_code == 2
    assert "pip install 'xmem-train[torch]'" in ran.stderr
    assert "lost: install it so" in ran.stderr


def test_names_given_twice_run_once_and_the_baseline_first(crashy, tmp_path):
    ran = compare(
        "-o", tmp_path, "--workload", "mlp", "--technique", "checkpoint", "--technique",
        "baseline", "--technique", "checkpoint",
    )  # fmt: skip
    assert ran.exit_code == 0
    report = read_json(tmp_path / "report.json", Report)
    assert [r.case.technique for r in report.results] == ["baseline", "checkpoint"]


def test_a_run_without_a_baseline_says_that_savings_are_missing(crashy, tmp_path):
    ran = compare("-o", tmp_path, "--technique", "checkpoint")
    assert "no savings are shown without --technique baseline" in ran.stdout


def test_older_results_are_replaced_unless_resumed(crashy, tmp_path):
    crashy.plan({"mlp/checkpoint": "exit"})
    compare("-o", tmp_path)
    first = read_json(tmp_path / "report.json", Report).results
    crashy.plan({})
    resumed = compare("-o", tmp_path, "--resume")
    assert "5 of 6 cases are taken from" in resumed.stdout
    second = read_json(tmp_path / "report.json", Report).results
    assert [r.status for r in second] == ["ok", "ok", *["unsupported"] * 4]
    assert second[0] == first[0]
    again = compare("-o", tmp_path)
    assert f"6 results in {tmp_path / 'cases'} are replaced" in again.stdout
    assert read_json(tmp_path / "report.json", Report).results[0] != first[0]


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_writes_what_finished_and_can_be_resumed(crashy, tmp_path, number, code):
    arguments = ["compare", "--backend", "crashy", "--workload", "mlp", "-o", str(tmp_path / "r")]
    assert invoke(*arguments).exit_code == 0  # results of an older run, not to be taken below
    crashy.plan({"mlp/checkpoint": "hang"})
    process = subprocess.Popen(
        [*XMEM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert wait_for(lambda: len(crashy.hanging_pids()) == 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == code
    assert "interrupted after 1 of 6 cases" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert wait_for(lambda: all(ended(pid) for pid in crashy.hanging_pids()), seconds=5)
    report = read_json(tmp_path / "r" / "report.json", Report)
    assert [r.status for r in report.results] == ["ok"]
    crashy.plan({})
    resumed = invoke(*arguments, "--resume")
    assert resumed.exit_code == 0
    assert "1 of 6 cases are taken from" in resumed.stdout


def test_a_terminal_gets_a_table_within_80_columns_and_a_bar(crashy, tmp_path):
    crashy.plan({"mlp/checkpoint": "SIGKILL"})
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*XMEM, "compare", "--backend", "crashy", "--workload", "mlp", "-o", str(tmp_path)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"},
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(20) == 1
    text = shown.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "\x1b[" in text
    assert "0/6" in plain
    rows = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    assert any(re.match("mlp +baseline +crashy +ok .*900 B", row) for row in rows)
    assert "  killed by SIGKILL; last output: about to be killed" in rows
    assert max(len(row) for row in rows if row.startswith("mlp ")) <= 80


def test_backends_shows_what_is_installed_as_table_and_as_json(crashy):
    table = invoke("backends")
    assert re.search(r"^crashy +xmem-crashy 1\.0 .* yes$", table.stdout, re.MULTILINE)
    records = json.loads(invoke("backends", "--json").stdout)
    (record,) = [r for r in records if r["name"] == "crashy"]
    assert record["usable"] is True
    assert record["distribution"] == "xmem-crashy 1.0"


def test_backends_says_why_one_is_not_usable(crashy):
    crashy.lose_framework()
    assert "no: backend 'crashy' needs 'no_such_framework'" in invoke("backends").stdout
    records = json.loads(invoke("backends", "--json").stdout)
    (record,) = [r for r in records if r["name"] == "crashy"]
    assert record["usable"] is False
    assert "pip install crashy-framework" in record["reason"]


def test_schema_prints_the_schema():
    assert json.loads(invoke("schema").stdout) == json.loads(json.dumps(schema()))
    for kind in ("report", "snapshot", "diagnosis", "monitor"):
        assert (
            jsonschema.Draft202012Validator.check_schema(json.loads(invoke("schema", kind).stdout))
            is None
        )
    assert invoke("schema", "nothing").exit_code == 2


@pytest.fixture
def two_reports(tmp_path):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    write_json(make_fake_report(make_result(), make_result(technique="checkpoint")), before)

    def write_after(*results):
        write_json(make_fake_report(*results), after)
        return before, after

    return write_after


def test_diff_of_equal_reports_is_exit_0(two_reports):
    ran = invoke("diff", *two_reports(make_result(), make_result(technique="checkpoint")))
    assert ran.exit_code == 0
    assert "0 of 2 cases are worse in B" in ran.stdout


def test_diff_is_exit_1_where_a_peak_grew_beyond_the_tolerance(two_reports):
    files = two_reports(make_result(above_static_bytes=21 * MIB))
    ran = invoke("diff", *files)
    assert ran.exit_code == 1
    assert "+1.00 MiB (+3.3%)" in ran.stdout
    assert invoke("diff", *files, "--tolerance", "5").exit_code == 0


def test_diff_is_exit_1_where_a_case_no_longer_runs(two_reports):
    ran = invoke("diff", *two_reports(make_bad("timeout", "slow")))
    assert ran.exit_code == 1
    assert "ok -> timeout" in ran.stdout


def test_diff_takes_folders_and_refuses_what_is_no_report(two_reports, tmp_path):
    before, after = two_reports(make_result())
    folder = tmp_path / "folder"
    folder.mkdir()
    nothing = invoke("diff", before, folder)
    assert nothing.exit_code == 2
    assert "no report.json" in nothing.stderr
    after.rename(folder / "report.json")
    assert invoke("diff", before, folder).exit_code == 0
    (folder / "report.json").write_text("{}", encoding="utf-8")
    broken = invoke("diff", before, folder)
    assert broken.exit_code == 2
    assert "schema version None" in broken.stderr


def test_doctor_finds_python_the_backend_and_no_foreign_package(crashy):
    ran = invoke("doctor")
    assert sys.executable in ran.stdout
    assert re.search(r"^backend crashy +ok", ran.stdout, re.MULTILINE)
    assert re.search(r"^foreign xmem +ok", ran.stdout, re.MULTILINE)


def test_doctor_is_exit_1_without_a_usable_backend(monkeypatch):
    monkeypatch.setattr("xmem.plugins.backend_infos", lambda: [unusable("lost")])
    ran = invoke("doctor")
    assert ran.exit_code == 1
    assert "none is usable" in ran.stdout


def test_conformance_hands_its_choice_to_pytest_and_returns_its_status(crashy, monkeypatch):
    calls = []

    def run(command, check):
        calls.append(command)
        return subprocess.CompletedProcess(command, 5)

    monkeypatch.setattr("subprocess.run", run)
    ran = invoke(
        "conformance", "--backend", "crashy", "--workload", "mlp", "--technique", "checkpoint",
        "--preset", "quick", "--device", "cpu", "--", "-x", "--tb=short",
    )  # fmt: skip
    assert ran.exit_code == 5
    assert calls[0][1:] == [
        "-m", "pytest", "--pyargs", "xmem.conformance", "-p", "xmem.conformance.plugin",
        "--backend", "crashy", "--workload", "mlp", "--technique", "checkpoint",
        "--preset", "quick", "--device", "cpu", "-x", "--tb=short",
    ]  # fmt: skip


def test_conformance_really_starts_the_suite(crashy, tmp_path):
    ran = subprocess.run(
        [*XMEM, "conformance", "--backend", "crashy", "--workload", "mlp", "--", "-q", "--co"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "crashy" in ran.stdout


def test_conformance_without_pytest_says_how_to_get_it(crashy, monkeypatch):
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "pytest" else find_spec(name)
    )
    ran = invoke("conformance", "--backend", "crashy")
    assert ran.exit_code == 2
    assert "pip install 'xmem-train[test]'" in ran.stderr


def test_a_second_comparison_into_the_same_folder_is_refused(crashy, tmp_path):
    from filelock import FileLock

    folder = tmp_path / "report"
    (folder / "cases").mkdir(parents=True)
    with FileLock(folder / "cases" / ".lock"):
        ran = CliRunner().invoke(main, ["compare", "--backend", "crashy", "-o", str(folder)])
    assert ran.exit_code == 2, ran.output
    assert "another comparison is writing to" in ran.output


def test_nan_is_no_time_limit(crashy, tmp_path):
    ran = invoke("compare", "--backend", "crashy", "--timeout", "nan", "-o", tmp_path / "report")
    assert ran.exit_code == 2
    assert "nan is not a time" in ran.output


def test_losses_that_differ_are_a_failure_and_show_no_saving():
    from xmem.cli.compare import exit_code
    from xmem.report.compare import compare_technique

    baseline = make_result("mlp", "baseline", "torch")
    same = make_result("mlp", "checkpoint", "torch")
    other = make_result("mlp", "checkpoint", "torch", losses=tuple(9.0 for _ in same.losses))
    assert exit_code([baseline, same], limited=False) == 0
    assert compare_technique(same, baseline).above_static_saving_factor is not None
    assert exit_code([baseline, other], limited=False) == 1
    compared = compare_technique(other, baseline)
    assert compared.losses_agree is False
    assert compared.above_static_saving_factor is None
    assert compared.peak_saving_bytes is None
