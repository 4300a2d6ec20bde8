import json
import signal
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest

from xmem.distributed import failing, roll, watching, world
from xmem.distributing import World
from xmem.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributedError,
    RankLostError,
    UsageError,
)


class EngineError(RuntimeError):
    """What a framework raises."""


def others(size, **changes):
    """A roll of living ranks, this process's number 0, with changes by rank: a=..., b=..."""
    found = []
    for rank in range(size):
        values = {
            "rank": rank,
            "process": 100 + rank,
            "state": roll.HERE,
            "silent_seconds": 0.1,
            "entered": 1,
            "finished": 0,
            "doing": "all_reduce",
            "error": "",
            "life": "running",
        }
        found.append(roll.Entry(**{**values, **changes.get(f"rank{rank}", {})}))
    return found


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(failing, "_SETTLE_SECONDS", 0.05)
    table = roll.Roll.alone()
    table.sign_on()
    watch = failing.Watch(table, (EngineError,), 7.0)
    failing.begin(watch)
    yield watch
    failing.end()


def see(watch, monkeypatch, *entries):
    monkeypatch.setattr(watch.roll, "others", lambda: list(entries[1:]))


def test_a_failure_with_a_dead_rank_is_a_lost_rank_by_name(watch, monkeypatch):
    see(watch, monkeypatch, *others(3, rank2={"life": "dead"}))
    lost = r"rank 2 .* died .*communication 1: all_reduce"
    with pytest.raises(RankLostError, match=lost) as caught, failing.communicating("all_reduce"):
        raise EngineError("Connection closed by peer [127.0.0.1]:1")
    assert caught.value.ranks == (2,)
    assert isinstance(caught.value.__cause__, EngineError)
    assert watch.told is caught.value


def test_a_rank_that_dies_a_little_later_than_its_connections_is_found(watch, monkeypatch):
    monkeypatch.setattr(failing, "_SETTLE_SECONDS", 5.0)
    see(watch, monkeypatch, *others(2))
    threading.Timer(
        0.1, lambda: see(watch, monkeypatch, *others(2, rank1={"life": "dead"}))
    ).start()
    error = failing.explain(EngineError("Connection reset by peer"), "barrier")
    assert (type(error), error.ranks) == (RankLostError, (1,))


def test_the_first_cause_is_named_and_not_those_that_failed_for_it(watch, monkeypatch):
    followed = {"state": roll.FAILED, "error": "RankLostError: rank 2 (process 102) died"}
    see(watch, monkeypatch, *others(3, rank1=followed, rank2={"life": "dead"}))
    error = failing.explain(EngineError("Connection closed by peer"), "all_reduce")
    assert error.ranks == (2,)
    assert "rank 1" not in str(error)


def test_a_timeout_names_who_is_stopped_or_behind(watch, monkeypatch):
    see(watch, monkeypatch, *others(4, rank1={"life": "stopped"}, rank3={"entered": 0}))
    late = r"waited 7 s.*for ranks 1, 3"
    with pytest.raises(CollectiveTimeoutError, match=late) as caught, failing.communicating("x"):
        raise EngineError("Timed out waiting 7000ms for recv operation to complete")
    assert caught.value.ranks == (1, 3)


def test_a_timeout_names_who_does_not_run_into_it_where_nothing_was_counted(watch, monkeypatch):
    """As in a framework's own backward: the counts are equal, and only one rank does not wait."""
    seen = others(3, rank2={"entered": 1})
    see(watch, monkeypatch, seen[0], others(3, rank1={"entered": 1})[1], seen[2])
    watch.roll.entered("data_parallel")
    watch.roll.finished()
    own_count = watch.roll.entry(0).entered
    assert own_count == 1
    see(watch, monkeypatch, *others(3, rank1={"entered": 2}, rank2={"entered": 1}))
    error = failing.explain(EngineError("Timed out waiting"), "backward")
    assert (type(error), error.ranks) == (CollectiveTimeoutError, (2,))


def test_a_rank_that_gave_up_waiting_passes_its_reason_on(watch, monkeypatch):
    gave_up = {"state": roll.FAILED, "error": "CollectiveTimeoutError: waited 7 s for rank 1"}
    see(watch, monkeypatch, *others(3, rank1={"life": "stopped"}, rank2=gave_up))
    error = failing.explain(EngineError("Connection closed by peer"), "all_reduce")
    assert (type(error), error.ranks) == (CollectiveTimeoutError, (1,))


@pytest.mark.parametrize("said", ["Connection closed by peer", "Timed out waiting"])
def test_a_rank_that_left_is_named_when_it_is_needed(watch, monkeypatch, said):
    see(watch, monkeypatch, *others(2, rank1={"state": roll.LEFT, "life": "dead"}))
    error = failing.explain(EngineError(said), "all_reduce")
    assert (type(error), error.ranks) == (RankLostError, (1,))
    assert "has left" in str(error)


def test_a_failure_that_nobody_explains_keeps_its_text(watch, monkeypatch):
    see(watch, monkeypatch, *others(2))
    error = failing.explain(EngineError("the wire is cut\nat 3 m"), "broadcast")
    assert type(error) is DistributedError
    assert str(error) == "broadcast failed: EngineError: the wire is cut"
    mismatch = failing.explain(EngineError("tensor size mismatch"), "broadcast")
    assert type(mismatch) is CollectiveMismatchError
    logged = EngineError("[f 1130 executor.cc:686]\nReason: xmem.distributed: rank 1 is lost.\nbye")
    assert str(failing.explain(logged, "reduce")) == "reduce failed: rank 1 is lost."


def test_errors_of_the_program_itself_pass_unchanged(watch):
    with pytest.raises(KeyError), failing.communicating("all_reduce"):
        raise KeyError("mine")
    assert watch.told is None


def test_a_mismatch_does_not_count_as_the_end(watch):
    """All ranks have got it, and may go on: a death that follows must still be told."""
    with pytest.raises(CollectiveMismatchError), failing.communicating("all_reduce"):
        raise CollectiveMismatchError("shapes differ")
    assert watch.told is None
    with pytest.raises(RankLostError) as caught, failing.communicating("all_reduce"):
        raise RankLostError("rank 1 has died", ranks=[1])
    assert watch.told is caught.value


def test_communications_inside_one_another_count_once(watch):
    with failing.communicating("outer"), failing.communicating("inner"):
        entry = watch.roll.entry(0)
        assert (entry.doing, entry.entered, entry.finished) == ("outer", 1, 0)
    entry = watch.roll.entry(0)
    assert (entry.entered, entry.finished, watch.depth) == (1, 1, 0)


def test_without_init_a_communication_is_a_plain_block():
    with pytest.raises(EngineError), failing.communicating("all_reduce"):
        raise EngineError("Connection closed by peer")


# What is installed between init and destroy, in a process of its own.

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from xmem.distributed import failing, keeping, roll, watching
number, path = roll._offer(1024)
table = roll.Roll(roll._map(path, 1024), 0, 2)
other = roll.Roll(roll._map(path, 1024), 1, 2)
table.sign_on()
child = os.fork()
if child == 0:
    keeping.die_with_parent()
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
other._words[other._own] = child
other._words[other._own + 1] = roll._start_ticks(child)
other._words[other._own + 2] = roll.HERE
other.beat()
watch = failing.Watch(table, (RuntimeError,), 5.0)
watcher = watching.Watcher(watch)
failing.begin(watch)
watcher.begin()
"""


def ran(body, *, kill=None):
    """Run the program and a body; returns its exit status and stderr."""
    source = PROGRAM + textwrap.dedent(body)
    started = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        if kill is not None:
            assert started.stdout.readline() == "ready\n"
            started.send_signal(kill)
        _, errors = started.communicate(timeout=30)
    finally:
        started.kill()
    return started.returncode, errors


def test_a_rank_that_computes_is_told_of_a_death():
    status, errors = ran("os.kill(child, 9)\nwhile True: sum(range(1000))")
    assert status == 1
    assert errors.startswith("Traceback"), "raised where the program was, so that it can clean up"
    assert "xmem.errors.RankLostError: rank 1" in errors


def test_a_rank_that_waits_where_no_handler_runs_is_ended():
    """The main thread runs no Python."""
    status, errors = ran("os.kill(child, 9)\nctypes.CDLL(None).sleep(20)")
    assert status == 1
    assert "The main thread was here:" in errors
    assert "xmem.errors.RankLostError: rank 1" in errors
    assert "where no handler runs" in errors


def test_a_program_that_was_told_may_take_its_time():
    status, errors = ran(
        """
        os.kill(child, 9)
        try:
            with failing.communicating("all_reduce"):
                raise RuntimeError("Connection closed by peer")
        except failing.RankLostError:
            time.sleep(3.5)
            print("saved", file=sys.stderr)
        """
    )
    assert (status, errors) == (0, "saved\n")


def test_an_uncaught_error_is_written_on_the_roll_and_ends_the_process_at_once():
    status, errors = ran(
        """
        import atexit
        atexit.register(lambda: print("an orderly exit waits for the others", file=sys.stderr))
        os.kill(child, 9)
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1. gloo")
        """
    )
    assert status == 1
    assert "Traceback" in errors
    assert "The cause, as far as xmem knows:\nxmem.errors.RankLostError: rank 1" in errors
    assert "orderly" not in errors


def test_an_error_of_its_own_is_not_blamed_on_others():
    status, errors = ran('os.kill(child, 9)\nraise RuntimeError("a list is no tuple")')
    assert status == 1
    assert "as far as xmem knows" not in errors


def test_a_keyboard_interrupt_keeps_its_status():
    assert ran("raise KeyboardInterrupt")[0] == 130


def test_sigterm_ends_a_rank_as_ever_when_nobody_is_gone():
    body = 'print("ready", flush=True)\ntime.sleep(30)'
    status, errors = ran(body, kill=signal.SIGTERM)
    assert (status, errors) == (-signal.SIGTERM, "")


def test_sigterm_ends_a_rank_that_runs_no_python():
    body = 'print("ready", flush=True)\nwhile True: ctypes.CDLL(None).sleep(20)'
    status, _ = ran(body, kill=signal.SIGTERM)
    assert status in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_everything_is_undone_by_the_end():
    status, errors = ran(
        """
        watcher.end()
        assert sys.excepthook is sys.__excepthook__
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        assert not [t for t in threading.enumerate() if t.name == "xmem-roll"]
        os.kill(child, 9)
        time.sleep(2)
        assert table.entry(0).state == roll.HERE
        """
    )
    assert (status, errors) == (0, "")


def test_children_of_a_rank_are_not_the_rank():
    status, errors = ran(
        """
        import multiprocessing
        def work():
            raise ValueError("in a child")
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        sleeping = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        sleeping.start()
        sleeping.terminate()
        sleeping.join()
        assert sleeping.exitcode == -15, sleeping.exitcode
        time.sleep(watching.HANDLER_SECONDS + 1)  # a signal of the child's would end this one
        assert table.entry(0).state == roll.HERE
        os.kill(child, 9)
        os.waitpid(child, 0)
        os._exit(7)
        """
    )
    assert status == 7, errors


# init and destroy, on a backend that is alone.


class Alone:
    """A backend's capability for one process."""

    failures = (EngineError,)

    def __init__(self):
        self.calls = []

    def start(self, engine, timeout_seconds):
        self.calls.append((engine, timeout_seconds))
        return World(0, 1, 0, 1, "none")

    def exchange(self, payload):
        return [payload]

    def stop(self):
        self.calls.append("stop")

    def abort(self):
        self.calls.append("abort")


@pytest.fixture
def alone(monkeypatch):
    backend = Alone()
    monkeypatch.setattr(world, "active", lambda: SimpleNamespace(distributed=backend, name="fake"))
    monkeypatch.delenv(world.TIMEOUT_VARIABLE, raising=False)
    monkeypatch.delenv(world.LAUNCHED_VARIABLE, raising=False)
    yield backend
    if world.is_initialized():
        world.destroy()


def test_a_single_process_needs_no_launcher(alone):
    assert world.init() == World(0, 1, 0, 1, "none")
    assert (world.rank(), world.world_size(), world.local_rank()) == (0, 1, 0)
    world.barrier()
    world.destroy()
    assert alone.calls == [("auto", 600.0), "stop"]
    assert failing.current() is None
    world.init("gloo", timeout=3)
    assert alone.calls[-1] == ("gloo", 3.0)


def test_a_second_init_is_refused_and_changes_nothing(alone):
    world.init()
    with pytest.raises(UsageError, match="joined already, as rank 0 of 1"):
        world.init()
    assert alone.calls == [("auto", 600.0)]
    assert world.is_initialized()


@pytest.mark.parametrize("call", ["destroy", "barrier", "rank", "world_size", "local_rank"])
def test_calls_before_init_say_what_to_do(alone, call):
    with pytest.raises(DistributedError, match=r"Call xmem\.distributed\.init\(\) first"):
        getattr(world, call)()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon", True, [3]])
def test_a_timeout_that_is_none_is_refused_before_anything_starts(alone, timeout):
    with pytest.raises(UsageError, match=r"timeout is .*number of seconds above 0"):
        world.init(timeout=timeout)
    assert alone.calls == []


def test_the_launchers_timeout_holds_where_init_has_none(alone, monkeypatch):
    monkeypatch.setenv(world.TIMEOUT_VARIABLE, "12.5")
    world.init()
    world.destroy()
    world.init(timeout=3)
    assert [call for call in alone.calls if call != "stop"] == [("auto", 12.5), ("auto", 3.0)]
    world.destroy()
    monkeypatch.setenv(world.TIMEOUT_VARIABLE, "x")
    with pytest.raises(UsageError, match="XMEM_TIMEOUT is 'x'"):
        world.init()


def test_a_barrier_that_meets_other_calls_names_them(alone):
    world.init()
    asked = json.dumps({"what": "all_reduce", "is": "4f", "error": "", "tells": 1}).encode()
    alone.exchange = lambda payload: [payload, asked, b"destroy"]
    told = "ranks called different things: 'barrier', 'all_reduce', 'destroy', by rank"
    with pytest.raises(CollectiveMismatchError, match=told) as caught:
        world.barrier()
    assert caught.value.ranks == (1, 2)
    alone.exchange = lambda payload: [payload]


@pytest.mark.parametrize("seconds", [1e300, 1e10])
def test_a_timeout_that_no_clock_can_hold_is_refused(alone, monkeypatch, seconds):
    monkeypatch.setenv(world.TIMEOUT_VARIABLE, str(seconds))
    with pytest.raises(UsageError, match=r"XMEM_TIMEOUT is .* at most"):
        world.init()
    assert alone.calls == []


def test_ranks_started_for_another_backend_are_told(alone, monkeypatch):
    monkeypatch.setenv(world.LAUNCHED_VARIABLE, "2 torch")
    with pytest.raises(UsageError, match=r"started 2 ranks for backend 'torch'.*uses 'fake'"):
        world.init()
    assert alone.calls[-1] == "abort"
    assert not world.is_initialized()


def test_a_failing_destroy_leaves_without_the_others(alone):
    world.init()

    def broken(payload):
        raise EngineError("Connection closed by peer")

    alone.exchange = broken
    with pytest.raises(DistributedError):
        world.destroy()
    assert alone.calls[-1] == "abort"
    assert not world.is_initialized()


def test_handlers_are_patient_enough_for_the_launcher():
    """Its grace is 5 s: what a rank may take to explain itself must fit in."""
    assert roll.BEAT_SECONDS / 2 + watching.EXPLAIN_SECONDS + watching.HANDLER_SECONDS < 5
    assert failing._SETTLE_SECONDS < 5
