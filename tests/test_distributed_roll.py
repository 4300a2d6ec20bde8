import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmem.distributed import roll
from xmem.errors import DistributedError

# Signs on as a rank in the table that another process offers, and does as it is told.
CHILD = """
import mmap, os, sys
from xmem.distributed.roll import Roll
path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
number = os.open(path, os.O_RDWR)
table = Roll(mmap.mmap(number, size * 512), rank, size)
table.sign_on()
print("here", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


@pytest.fixture
def table():
    number, path = roll._offer(3 * roll.RECORD_BYTES)
    table = roll.Roll(roll._map(path, 3 * roll.RECORD_BYTES), 0, 3)
    table.sign_on()
    table.path = path
    yield table
    os.close(number)


@pytest.fixture
def child(table):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, table.path, "1", "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.communicate()


def tell(child, line):
    child.stdin.write(line + "\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"


def wait_until(condition):
    ends = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_records_lie_where_native_readers_look_for_them(table):
    table.entered("all_reduce of 3 tensors")
    table.entered("broadcast")
    table.finished()
    table.fail("ValueError: no")
    raw = bytes(table._memory[: roll.RECORD_BYTES])
    process, _, state, seen, entered, finished = struct.unpack_from("<6q", raw)
    assert (process, state, entered, finished) == (os.getpid(), roll.FAILED, 2, 1)
    assert 0 <= time.monotonic_ns() - seen < 60e9
    assert raw[48:58] == b"broadcast\0"
    assert raw[256:271] == b"ValueError: no\0"
    import ctypes

    assert ctypes.string_at(table.address, roll.RECORD_BYTES) == raw


def test_a_rank_that_lives_is_neither_gone_nor_late(table, child):
    assert table.gone() == table.late() == table.left() == []
    assert table.entry(1).process == child.pid
    assert "alive, before its first communication" in str(table.entry(1))


def test_a_killed_rank_is_gone_though_nobody_has_waited_for_it(table, child):
    tell(child, "table.entered('all_reduce')")
    child.send_signal(signal.SIGKILL)
    wait_until(table.gone)
    [entry] = table.gone()
    assert entry.rank == 1
    assert str(entry) == (
        f"rank 1 (process {child.pid}) died without a word, in communication 1: all_reduce"
    )
    assert child.returncode is None, "it was a zombie all the time"


def test_a_process_that_took_over_the_number_is_not_the_rank(table, child):
    ticks = roll._start_ticks(child.pid)
    assert roll.life_of(child.pid, ticks) == "running"
    assert roll.life_of(child.pid, ticks + 1) == "dead"


def test_a_stopped_rank_is_late_and_not_gone(table, child):
    child.send_signal(signal.SIGSTOP)
    wait_until(table.late)
    assert table.gone() == []
    assert "is stopped (by SIGSTOP or a debugger)" in str(table.late()[0])
    child.send_signal(signal.SIGCONT)
    wait_until(lambda: not table.late())


def test_a_rank_with_fewer_communications_is_late(table, child):
    tell(child, "table.entered('barrier'); table.finished()")
    table.entered("barrier")
    assert table.late() == []
    table.entered("all_reduce")
    [entry] = table.late()
    assert (entry.rank, entry.entered) == (1, 1)
    assert "alive, after communication 1: barrier" in str(entry)


def test_a_rank_without_a_sign_of_life_is_late(table, child, monkeypatch):
    monkeypatch.setattr(roll, "_SILENT_SECONDS", 0.05)
    time.sleep(0.1)
    assert [entry.rank for entry in table.late()] == [1]
    assert "no sign of life" in str(table.late()[0])
    tell(child, "table.beat()")
    monkeypatch.setattr(roll, "_SILENT_SECONDS", 5.0)
    assert table.late() == []


def test_a_rank_that_left_is_not_gone_when_its_process_is(table, child):
    tell(child, "table.leave()")
    child.kill()
    child.wait()
    assert table.gone() == []
    assert [entry.rank for entry in table.left()] == [1]


def test_the_first_reason_of_a_failure_counts_and_leaving_does_not_undo_it(table, child):
    tell(child, "table.fail('ValueError: first'); table.fail('second'); table.leave()")
    [entry] = table.gone()
    assert str(entry) == f"rank 1 (process {child.pid}) failed: ValueError: first"


def test_a_rank_of_another_host_is_not_known_and_never_named(table, child):
    table.entered("all_reduce")
    tell(child, "table.entered('all_reduce')")
    assert table.entry(2).life is None
    assert "another host" in str(table.entry(2))
    assert [entry.rank for entry in table.late() + table.gone() + table.left()] == []


@given(st.text(max_size=400))
def test_texts_are_cut_at_whole_characters_and_stay_in_their_field(text):
    table = roll.Roll.alone()
    table.sign_on()
    table.entered(text)
    table.fail(text)
    entry = table.entry(0)
    whole = text.encode("utf-8", "replace").decode().split("\0")[0]
    assert whole.startswith(entry.doing)
    assert whole.startswith(entry.error)
    assert len(entry.doing.encode()) >= min(204, len(whole.encode()))
    assert len(entry.error.encode()) >= min(252, len(whole.encode()))
    assert (entry.process, entry.entered) == (os.getpid(), 1)


class Threads:
    """Ranks as threads of this process."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=10)
        self._given = [b""] * size

    def exchange_of(self, rank):
        def exchange(payload):
            self._given[rank] = payload
            self._barrier.wait()
            found = list(self._given)
            self._barrier.wait()
            return found

        return exchange

    def share(self):
        results = [None] * self.size

        def one(rank):
            try:
                results[rank] = roll.share(rank, self.size, self.exchange_of(rank))
            except DistributedError as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results


def test_ranks_share_one_table_and_leave_no_file():
    before = set(Path("/tmp").glob("xmem-roll*")), len(list(Path("/proc/self/fd").iterdir()))
    tables = Threads(3).share()
    tables[2].entered("broadcast")
    assert tables[0].entry(2).doing == tables[1].entry(2).doing == "broadcast"
    assert {entry.state for entry in tables[0].others()} == {roll.HERE}
    del tables
    after = set(Path("/tmp").glob("xmem-roll*")), len(list(Path("/proc/self/fd").iterdir()))
    assert after == before


def test_ranks_share_a_file_that_has_no_name_where_there_is_no_anonymous_memory(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delattr(os, "memfd_create")
    tables = Threads(2).share()
    tables[1].entered("broadcast")
    assert tables[0].entry(1).doing == "broadcast"
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_two_hosts_have_a_table_each(monkeypatch):
    names = iter(["a", "b"])
    local = threading.local()

    def host():
        if not hasattr(local, "name"):
            local.name = next(names)
        return local.name

    monkeypatch.setattr(roll, "_host", host)
    tables = Threads(2).share()
    for table in tables:
        other = table.entry(1 - table.rank)
        assert (other.state, other.life) == (roll.ABSENT, None)
        assert table.gone() == table.late() == []


def test_all_ranks_fail_when_one_cannot_map_the_table(monkeypatch):
    real = roll._map

    def broken(path, size_bytes):
        if threading.current_thread().name.startswith("Thread-") and next(turns) == 0:
            raise PermissionError(13, "no")
        return real(path, size_bytes)

    turns = iter(range(10))
    monkeypatch.setattr(roll, "_map", broken)
    errors = Threads(2).share()
    assert all(isinstance(error, DistributedError) for error in errors)
    assert all("cannot map the table" in str(error) for error in errors)
    assert all("same user" in str(error) for error in errors)


def test_what_ranks_exchange_to_share_the_table_is_short():
    assert len(json.dumps([roll._host(), f"/proc/{2**22}/fd/1000"])) < 248
