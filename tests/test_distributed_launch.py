"""`xmem launch`, with a launcher of the tests in the place of torchrun and mpirun."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import dying
import pytest
import ranks
from click.testing import CliRunner

from xmem.cli import launch as verb
from xmem.cli import main
from xmem.distributed import launching
from xmem.distributed.output_lines import Lines
from xmem.errors import DistributedError, UsageError
from xmem.plugins import BackendInfo
from xmem.records import Framework

HERE = str(Path(__file__).parent)
DRIVER = f"import sys; sys.path[:0] = [{HERE!r}]; from fakes.launcher import main; main()"


class Launched:
    """A run of `xmem launch`, under way or over."""

    def __init__(
        self, folder, body, *options, ranks=2, arguments=(), prepare=None, out=None, **environment
    ):
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        script = folder / "script.py"
        head = "import os, signal, sys, time\nRANK = int(os.environ['RANK'])\n"
        noted = f"open({str(folder)!r} + f'/pid{{RANK}}', 'w').write(str(os.getpid()))\n"
        script.write_text(head + noted + textwrap.dedent(body))
        command = [sys.executable, "-c", DRIVER, "-n", str(ranks), *options, str(script)]
        self.out, self.err = out or folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=prepare or heed_signals,  # the tests may run in the background
                env={**os.environ, "TMPDIR": str(self.temporary), **environment},
            )

    def wait(self):
        """Wait for the end; returns the exit status."""
        try:
            return self.process.wait(40)
        finally:
            ranks.end(self.process)

    def ready(self, count=2):
        """Wait until ranks have printed, and return the job's processes."""
        ranks.wait_for(lambda: self.stdout().count("ready") == count, self.stderr(), limit=30)
        return ranks.session_of(self.process.pid)

    def stdout(self):
        return self.out.read_text()

    def stderr(self):
        return self.err.read_text()

    def pid(self, rank):
        return int((self.folder / f"pid{rank}").read_text())

    def assert_nothing_is_left(self, processes):
        def gone():
            return not any(map(dying.is_running, processes))

        ranks.wait_for(gone, f"the end of {processes}", limit=10)
        dying.assert_nothing_is_left(self.process.pid, processes, set(), self.temporary)


def heed_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def launched(tmp_path):
    started = []

    def launch(body, *options, **others):
        started.append(Launched(tmp_path, body, *options, **others))
        return started[-1]

    yield launch
    for one in started:
        ranks.end(one.process)


def test_output_comes_line_by_line_behind_the_rank_on_the_stream_it_was_written_to(launched):
    job = launched(
        """
        print("hello", RANK, sys.argv[1:], os.environ["XMEM_LAUNCHED"], os.environ["XMEM_TIMEOUT"])
        print("no end of line", end="")
        print("10 %\\r20 %", end="\\r", file=sys.stderr)
        print(os.environ.get("TMPDIR"), os.environ.get("XMEM_LAUNCH"), file=sys.stderr)
        """,
        "--backend",
        "mine",
        "--timeout",
        "7.5",
        arguments=("--lr", "1e-3", "-n", "x"),
    )
    assert job.wait() == 0
    said = "hello {} ['--lr', '1e-3', '-n', 'x'] 2 mine 7.5"
    for rank in (0, 1):
        lines = [line[4:] for line in job.stdout().splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [said.format(rank), "no end of line"]
        lines = [line[4:] for line in job.stderr().splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == ["10 %", "20 %", f"{job.temporary} None"]
    job.assert_nothing_is_left([])


@pytest.mark.parametrize(
    ("end", "status", "word"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with 3, the first to fail"),
        ("raise ValueError", 1, "rank 1 ended with 1, the first to fail"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by SIGKILL, the first to fail"),
    ],
)
def test_the_first_failing_ranks_status_is_the_jobs_and_the_others_are_ended(
    launched, end, status, word
):
    job = launched(
        f"""
        print("ready", flush=True)
        if RANK == 1:
            {end}
        time.sleep(60)
        """,
        "--grace",
        "0.3",
    )
    began = time.monotonic()
    assert job.wait() == status
    assert time.monotonic() - began < 30
    assert job.stderr().splitlines()[-1] == f"xmem launch: {word}"
    job.assert_nothing_is_left([job.pid(0), job.pid(1)])


def test_a_killed_rank_is_the_first_though_one_that_saw_it_die_is_heard_of_before(launched):
    job = launched(
        """
        print("ready", flush=True)
        if RANK == 0:
            while not os.path.exists(os.path.join(os.path.dirname(__file__), "pid1")):
                time.sleep(0.01)
            os._exit(1)
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
        """
    )
    assert job.wait() == 137
    assert "rank 1 was ended by SIGKILL, the first to fail" in job.stderr()


def test_what_is_killed_for_not_obeying_is_not_the_first(launched):
    job = launched(
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print("ready", flush=True)
        if RANK == 0:
            os._exit(4)
        time.sleep(90)
        """,
        "--grace",
        "0.1",
    )
    assert job.wait() == 4


def test_a_rank_that_does_not_obey_is_killed_with_its_children(launched, monkeypatch):
    job = launched(
        """
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"])
        print("ready", child.pid, flush=True)
        if RANK == 1:
            os._exit(5)
        time.sleep(90)
        """,
        "--grace",
        "0.1",
    )
    processes = job.ready()
    children = [int(line.split()[-1]) for line in job.stdout().splitlines()]
    assert job.wait() == 5
    job.assert_nothing_is_left([*processes, *children])


def test_ranks_that_end_well_at_different_times_are_left_alone(launched):
    job = launched("time.sleep(1.0 * RANK)\nprint('done', RANK)", "--grace", "0")
    assert job.wait() == 0
    assert sorted(job.stdout().splitlines()) == ["[0] done 0", "[1] done 1"]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_are_passed_on_to_the_ranks(launched, number, status):
    job = launched(
        """
        def tell(number, frame):
            print("got", signal.Signals(number).name, flush=True)
            os._exit(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, tell)
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
        """
    )
    processes = job.ready()
    job.process.send_signal(number)
    assert job.wait() == status
    assert job.stdout().count(f"got {number.name}") == 2
    assert job.stderr() == f"xmem launch: ended by {number.name}\n"
    job.assert_nothing_is_left(processes)


def test_what_nohup_ignores_is_not_passed_on(launched):
    job = launched(
        'print("ready", flush=True)\ntime.sleep(2)',
        prepare=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    job.ready()
    job.process.send_signal(signal.SIGHUP)
    assert job.wait() == 0, job.stderr()


def test_a_signal_while_ranks_are_started_ends_those_and_starts_no_more(launched):
    job = launched('print("ready", flush=True)\ntime.sleep(90)', FAKE_LAUNCHER_PAUSES="4")
    processes = job.ready(1)
    job.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert job.wait() == 130
    assert time.monotonic() - began < 3.5
    assert not (job.folder / "pid1").exists()
    job.assert_nothing_is_left(processes)


def test_a_rank_that_comes_when_another_has_failed_is_not_started(launched):
    job = launched("sys.exit(4 if RANK == 0 else time.sleep(90))", FAKE_LAUNCHER_PAUSES="1")
    assert job.wait() == 4
    assert not (job.folder / "pid1").exists()


def test_strangers_who_connect_change_nothing(launched):
    job = launched('print("ready", flush=True)\ntime.sleep(3)')
    words = [word for pid in job.ready() for word in command_of(pid).split()]
    [name] = {word for word in words if word.startswith("@xmem-launch-")}
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"status": 9}\n',
        b'{"rank": 0}\n',
        b"3\n",
        b"x" * 9999,
    ):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(10)
            stranger.connect("\0" + name[1:])
            stranger.sendall(said)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
    assert job.wait() == 0, job.stderr()


def test_output_that_cannot_be_written_ends_the_job_and_says_so(launched):
    job = launched("while True: print('y' * 100)", "--grace", "0.1", out=Path("/dev/full"))
    assert job.wait() == 1
    assert "what the ranks print cannot be written" in job.stderr()
    assert "No space left" in job.stderr()
    job.assert_nothing_is_left([])


def test_without_a_stdout_of_its_own_it_runs_all_the_same(launched):
    job = launched('print("x", flush=True)', prepare=lambda: os.close(1))
    assert job.wait() == 0, job.stderr()
    assert job.stdout() == ""


def test_variables_of_another_launcher_do_not_number_the_ranks(launched):
    job = launched('print("x", flush=True)', OMPI_COMM_WORLD_RANK="7")
    assert job.wait() == 0, job.stderr()
    assert sorted(job.stdout().splitlines()) == ["[0] x", "[1] x"]


@pytest.mark.parametrize("victim", ["xmem launch", "torchrun", "keeper"])
def test_killing_any_part_of_it_leaves_nothing_running(launched, victim):
    job = launched(
        """
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"])
        print("ready", flush=True)
        time.sleep(90)
        """,
        "--grace",
        "0.1",
    )
    processes = job.ready()
    keepers = [pid for pid in processes if "keeping.py" in command_of(pid)]
    keepers = [pid for pid in keepers if "fakes/launcher.py" not in command_of(pid)]
    assert len(keepers) == 2
    started = [pid for pid in processes if "fakes/launcher.py" in command_of(pid)]
    pids = {"xmem launch": job.process.pid, "torchrun": started[0], "keeper": keepers[1]}
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "torchrun":
        time.sleep(0.5)
        job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(40) in (-9, 137, 143)
    job.assert_nothing_is_left(processes)


def test_a_launcher_that_fails_is_quoted(launched):
    job = launched("", FAKE_LAUNCHER_FAILS="1")
    assert job.wait() == 1
    assert "has not started 2 ranks: it ended with 213" in job.stderr()
    assert "no slots are free" in job.stderr()
    job.assert_nothing_is_left([])


def test_a_reader_that_goes_away_ends_the_job(launched, tmp_path):
    script = tmp_path / "chatty.py"
    script.write_text("while True: print('y' * 100)")
    command = [sys.executable, "-c", DRIVER, "-n", "2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"[")
        process.stdout.close()
        assert process.wait(40) == 141
        assert process.stderr.read() == b""


def test_a_module_is_run_as_by_python(tmp_path, monkeypatch):
    (tmp_path / "trained.py").write_text("import sys; print(__name__, sys.argv[1:])")
    command = [sys.executable, "-c", DRIVER, "-n", "1", "-m", "trained", "-m", "--fast"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "[0] __main__ ['-m', '--fast']\n")


def command_of(pid):
    """Return a process's command line."""
    with contextlib.suppress(OSError):
        raw = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        return raw.replace(b"\0", b" ").decode()
    return ""


def test_only_whole_lines_are_passed_on():
    class Target(list):
        write = list.append

        def flush(self):
            pass

    target = Target()
    lines = Lines(b"[7] ", target)
    lines.add(b"a")
    assert target == []
    lines.add(b"b\nc\r\nd")
    assert target == [b"[7] ab\n[7] c\n"]
    lines.close()
    assert target[1:] == [b"[7] d\n"]
    lines.close()
    assert len(target) == 2
    for piece in (b"e\r", b"\nf\r", b"g\n"):
        lines.add(piece)
    assert target[2:] == [b"[7] e\n", b"[7] f\n", b"[7] g\n"]
    lines.add(b"x" * 70000)
    assert len(target[-1]) == 70005, "a line without an end does not fill the memory"


# The command line, before anything starts.


def info(name, launcher, *, usable=True):
    framework = Framework(name, name, f"pip install {name}", launcher=launcher)
    fields = dict.fromkeys(BackendInfo.__dataclass_fields__)
    fields |= {"name": name, "usable": usable, "reason": "" if usable else "it is broken"}
    return BackendInfo(**{**fields, "framework": framework})


@pytest.mark.parametrize(
    ("infos", "arguments", "message"),
    [
        (
            [info("jittor", "mpirun"), info("torch", "torchrun")],
            (),
            "several backends are usable; say which one the script uses:"
            " --backend jittor or --backend torch",
        ),
        ([info("numpy", "")], (), "the ranks of 'numpy' cannot be started"),
        ([info("torch", "torchrun", usable=False)], ("--backend", "torch"), "it is broken"),
        ([info("torch", "torchrun")], ("--backend", "trch"), "Did you mean 'torch'"),
    ],
)
def test_what_cannot_be_started_is_exit_2(monkeypatch, tmp_path, infos, arguments, message):
    monkeypatch.setattr("xmem.plugins.backend_infos", lambda: infos)
    script = tmp_path / "script.py"
    script.touch()
    ran = CliRunner().invoke(main, ["launch", "-n", "2", *arguments, str(script)])
    assert ran.exit_code == 2, ran.output
    assert message in " ".join(ran.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0", "x.py"), "0 is not in the range"),
        (("-n", "2", "nowhere.py"), "there is no file 'nowhere.py'"),
        (("-n", "2", "--timeout", "0", "x.py"), "--timeout"),
        (("-n", "2", "--bakend", "torch", "x.py"), "No such option '--bakend'"),
        (("x.py",), "--ranks"),
        (("-n", "2"), "SCRIPT"),
    ],
)
def test_a_wrong_command_line_is_exit_2(arguments, message):
    ran = CliRunner().invoke(main, ["launch", *arguments])
    assert ran.exit_code == 2
    assert message in ran.output


def test_a_missing_mpirun_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(launching.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DistributedError, match=r"pip install 'xmem-train\[distributed\]'"):
        launching.command_for("mpirun", 2, ["script.py"])
    job = launching.Job("jittor", "mpirun", 2, ("script.py",))
    with pytest.raises(DistributedError, match="there is no mpirun"):
        launching.launch(job, output=sys.stdout.buffer, errors=sys.stderr.buffer)


@pytest.mark.parametrize(
    ("body", "message"),
    [("echo 'HYDRA build details: 4.1'", "is not Open MPI's but"), ("exit 3", "does not run")],
)
def test_another_mpirun_is_refused(monkeypatch, tmp_path, body, message):
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setattr(launching.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(DistributedError, match=message):
        launching.launcher_version("mpirun")


def test_a_launcher_or_number_that_is_none_is_refused():
    for job, message in (
        (launching.Job("numpy", "", 2, ("x.py",)), "has no launcher"),
        (launching.Job("torch", "torchrun", 0, ("x.py",)), "0 ranks"),
        *(
            (launching.Job("torch", "torchrun", 2, ("x.py",), timeout), "timeout is")
            for timeout in (math.nan, math.inf, 1e300)
        ),
        *(
            (launching.Job("torch", "torchrun", 2, ("x.py",), 9, grace), "grace is")
            for grace in (math.nan, math.inf, -1)
        ),
    ):
        with pytest.raises(UsageError, match=message):
            launching.launch(job, output=sys.stdout.buffer, errors=sys.stderr.buffer)


def test_one_host_keeps_to_loopback_and_what_the_user_has_set_wins(monkeypatch):
    monkeypatch.delenv("OMPI_MCA_btl_tcp_if_include", raising=False)
    assert launching.environment_for("mpirun")["OMPI_MCA_btl_tcp_if_include"] == "lo"
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "eth7")
    assert launching.environment_for("mpirun")["OMPI_MCA_btl_tcp_if_include"] == "eth7"
    assert "OMPI_MCA_pml" not in launching.environment_for("torchrun")


def test_the_launchers_files_go_where_there_is_room(monkeypatch, tmp_path):
    def usage(free_bytes):
        return lambda path: SimpleNamespace(free=free_bytes)

    monkeypatch.setattr(launching.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launching, "_SHARED_MEMORY", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(launching.shutil, "disk_usage", usage(1 << 40))
    assert Path(launching._made_folder(4)).parent == tmp_path / "shared"
    monkeypatch.setattr(launching.shutil, "disk_usage", usage(64 << 20))
    assert Path(launching._made_folder(2)).parent == tmp_path / "shared"
    assert Path(launching._made_folder(4)).parent == tmp_path
    monkeypatch.setattr(launching.tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(DistributedError, match=r"nowhere.*TMPDIR"):
        launching._made_folder(4)


def test_threads_are_those_that_this_process_may_use(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launching.os, "sched_getaffinity", lambda process: range(6))
    job = launching.Job("torch", "torchrun", 2, ("x.py",))
    assert launching._environment(job, str(tmp_path), "")["OMP_NUM_THREADS"] == "3"


def test_launching_imports_no_framework():
    source = (
        "import sys, json; import xmem.cli.launch, xmem.distributed.launching, xmem.distributed;"
        "print(json.dumps([m for m in ('torch', 'jittor', 'numpy') if m in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stdout) in ([], ["numpy"])


def test_the_last_word_of_a_job_names_signals():
    from xmem.distributed.supervising import Outcome

    assert verb._last_word(Outcome(139, rank=2)) == (
        "xmem launch: rank 2 was ended by SIGSEGV, the first to fail"
    )
    assert verb._last_word(Outcome(255, rank=0)).startswith("xmem launch: rank 0 ended with 255")
