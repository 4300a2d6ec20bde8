"""xmem.find_batch_size with its tries in a process of their own, which may die, hang and print."""

import functools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import fitting as fits
import pytest
from fitting import fitting, peak_of, plain, steps_of

from xmem.batch_size import find_batch_size
from xmem.errors import BackendLoadError, MeasurementError, UsageError, XmemWarning

__all__ = ["fitting"]

find = functools.partial(find_batch_size, margin=0)


def test_the_tries_are_run_in_one_other_process_that_ends(fitting, tmp_path):
    log = tmp_path / "log"
    found = find(functools.partial(plain, log=log), budget=peak_of(100))
    assert found == 100
    pids = {pid for _, pid in steps_of(log)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert not any(map(fits.stays, pids))
    assert len(steps_of(log)) == found.full_steps
    assert fitting.MEASURE.allocated == fitting.MEASURE.peak == 0
    own = find(plain, budget=peak_of(100), isolate=False)
    assert [(t.size, t.peak_bytes) for t in own.tries] == [
        (t.size, t.peak_bytes) for t in found.tries
    ]


@pytest.mark.parametrize("how", ["SIGSEGV", "SIGKILL", "SIGABRT"])
def test_a_size_at_which_the_process_crashes_does_not_fit(fitting, tmp_path, how):
    log = tmp_path / "log"
    make = functools.partial(plain, log=log, on_step=fits.crash_above(11, how))
    found = find(make, budget=peak_of(100))
    assert found == 11
    crashed = [t for t in found.tries if not t.fits]
    assert all(how in t.reason and "about to go" in t.reason for t in crashed)
    assert all(t.steps == 1 for t in crashed), "the step that crashed counts"
    assert len({pid for _, pid in steps_of(log)}) in (len(crashed), len(crashed) + 1)


def test_a_step_that_crashes_at_any_size_is_told_with_what_it_printed(fitting):
    make = functools.partial(plain, on_step=fits.crash_above(0, "SIGSEGV"))
    with pytest.raises(MeasurementError, match=r"crashes at the minimum.*SIGSEGV.*about to go"):
        find(make, budget=peak_of(100))


def test_a_try_that_hangs_is_ended_with_all_that_it_started(fitting, tmp_path):
    pids = tmp_path / "pids"
    make = functools.partial(plain, on_step=fits.hang_above(11, pids))
    begun = time.monotonic()
    found = find(make, budget=peak_of(100), time_limit=6)
    assert 5 < time.monotonic() - begun < 20
    assert found.limited_by == "time"
    assert found == max(t.size for t in found.tries if t.fits) <= 11
    assert [t.how for t in found.tries][-1] == "stopped"
    assert not any(fits.stays(int(pid)) for pid in pids.read_text().split())


def test_a_try_that_hangs_without_a_time_limit_does_not_fit(fitting, tmp_path, monkeypatch):
    from xmem import batch_process

    monkeypatch.setattr(batch_process, "HANG_SECONDS", 2.0)
    make = functools.partial(plain, on_step=fits.hang_above(11, tmp_path / "pids"))
    found = find(make, budget=peak_of(100), maximum=12)
    assert (found, found.limited_by) == (11, "budget")
    assert [t.reason for t in found.tries if not t.fits] == ["it hung: nothing was heard for 2 s"]


def test_a_crash_is_seen_though_a_forked_process_holds_the_socket(fitting, tmp_path):
    pids = tmp_path / "pids"
    on_step = functools.partial(fits.crash_with_a_heir_above, 11, pids)
    begun = time.monotonic()
    assert find(functools.partial(plain, on_step=on_step), budget=peak_of(100), maximum=12) == 11
    assert time.monotonic() - begun < 30
    assert not fits.stays(int(pids.read_text()))


def test_a_step_that_leaves_python_is_an_error_and_no_size_that_does_not_fit(fitting):
    make = functools.partial(plain, on_step=functools.partial(fits.leave_above, 3))
    with pytest.raises(MeasurementError, match=r"the step of size \d+ failed: SystemExit: 2"):
        find(make, budget=peak_of(100))


def test_ctrl_c_leaves_no_process(fitting, tmp_path):
    pids = tmp_path / "pids"
    make = functools.partial(plain, on_step=fits.hang_above(0, pids))

    def interrupt():
        while not pids.exists() or not pids.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        find(make, budget=peak_of(100), time_limit=60)
    assert not any(fits.stays(int(pid)) for pid in pids.read_text().split())


def test_the_process_does_not_outlive_one_that_is_killed(fitting, tmp_path):
    pids = tmp_path / "pids"
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import functools, fitting, xmem
        from xmem.batch_size import find_batch_size
        xmem.use("fitting")
        step = fitting.hang_above(0, {str(pids)!r})
        find_batch_size(functools.partial(fitting.plain, on_step=step), budget=10**6)
        """)
    )
    path = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        deadline = time.monotonic() + 30
        while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        pid, grandchild = map(int, pids.read_text().split())
    finally:
        process.kill()
        process.wait()
    stays = fits.stays(pid)
    os.kill(grandchild, signal.SIGKILL)
    assert not stays


def test_what_steps_print_does_not_get_in_the_way(fitting):
    assert find(functools.partial(plain, on_step=fits.noise), budget=peak_of(9)) == 9


def test_functions_of_a_script_and_closures_are_sent(fitting):
    extra = 7

    def make(size):
        return plain(size + extra)

    assert find(make, budget=peak_of(10)) == 3


def test_what_cannot_be_sent_is_named_with_the_remedy(fitting):
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"lock.*isolate=False"):
        find(lambda size: lambda: lock, budget=10**6)


def test_what_cannot_be_put_together_there_is_named_with_the_remedy(fitting, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    (folder / "leaves_soon.py").write_text("def make(size): pass")
    sys.path.insert(0, str(folder))
    try:
        from leaves_soon import make
    finally:
        sys.path.remove(str(folder))
        del sys.modules["leaves_soon"]
    sys.modules["leaves_soon"] = sys.modules[__name__]
    sys.modules[__name__].make = make
    try:
        with pytest.raises(UsageError, match=r"No module named 'leaves_soon'.*isolate=False"):
            find(make, budget=10**6)
    finally:
        del sys.modules["leaves_soon"], sys.modules[__name__].make


def test_an_error_of_the_step_is_raised_here_with_the_traceback_of_there(fitting):
    make = functools.partial(plain, on_step=functools.partial(fits.raise_above, 3))
    with pytest.raises(KeyError, match="no such item") as caught:
        find(make, budget=peak_of(100))
    assert "raise_above" in str(caught.value.__cause__)


def test_a_backend_that_does_not_load_there_says_why(fitting):
    source = Path(fitting.__file__)
    source.write_text("raise OSError('no framework here')\n")
    with pytest.raises(BackendLoadError, match="no framework here"):
        find(plain, budget=10**6)


def test_what_a_failed_try_leaves_does_not_count_against_the_next_one(fitting, tmp_path):
    """The first size that is refused leaves bytes for good; a process without them goes on."""
    log = tmp_path / "log"
    found = find(_leaving, budget=peak_of(20) + 3)
    assert found == 20
    del log


def _leaving(size):
    inner = plain(size)

    def step():
        try:
            return inner()
        except RuntimeError:
            fits.leave_behind(size)
            raise

    return step


def test_the_process_has_as_many_threads_and_other_differences_are_told(fitting, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(fitting.MEASURE, "settings", lambda: {"threads": "2"})
    find(_only_on_two_threads, budget=peak_of(5))
    monkeypatch.setenv("XMEM_FITTING_FLAG", "1")
    with pytest.warns(XmemWarning, match="flag is"):
        find(plain, budget=peak_of(5))


def _only_on_two_threads(size):
    assert os.environ["OMP_NUM_THREADS"] == "2"
    return plain(size)


def test_observers_see_tries_as_they_come(fitting, caplog):
    told = []
    with caplog.at_level(logging.INFO, logger="xmem"):
        found = find(plain, budget=peak_of(5), on_try=told.append)
    assert tuple(told) == found.tries
    assert "fits" in caplog.text

    def stop(made):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        find(plain, budget=peak_of(5), on_try=stop)
