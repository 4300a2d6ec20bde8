"""Depots hold bytes: in files without names or in memory, until they are dropped or closed."""

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xmem
from xmem.native import depot as native
from xmem.offload import opening
from xmem.offload.depot import GROWTH_BYTES, Depot, open_scratch

PAGE = 4096
KINDS = ("disk", "host")


def put(depot, number, data):
    depot.put(number, data.ctypes.data, data.nbytes)


def get(depot, number, nbytes):
    found = np.empty(nbytes, np.uint8)
    depot.get(number, found.ctypes.data, nbytes)
    return found


def some(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def opened(to, tmp_path):
    return Depot(to, directory=tmp_path if to == "disk" else None)


def in_a_process(code, *arguments, timeout=120):
    """Run code in a process of its own; returns what it printed."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ran.returncode == 0, (ran.returncode, ran.stdout, ran.stderr)
    return ran.stdout.split()


def scratch_files():
    return [p for p in Path("/proc/self/fd").iterdir() if "(deleted)" in _target(p)]


def _target(path):
    try:
        return str(path.readlink())
    except OSError:
        return ""


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "drop"]),
        st.integers(1, 6),
        st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 70_000]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("to", KINDS)
@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_a_depot_is_a_dictionary_of_bytes(to, actions):
    depot, held = Depot(to), {}
    for turn, (action, number, nbytes) in enumerate(actions):
        if action == "put":
            held[number] = some(nbytes, turn)
            put(depot, number, held[number])
        elif action == "drop":
            depot.drop(number)
            held.pop(number, None)
        for key, data in held.items():  # all of them: extents that overlap show here
            assert (get(depot, key, data.nbytes) == data).all()
        assert [n in depot for n in range(1, 7)] == [n in held for n in range(1, 7)]
        stats = depot.stats
        assert stats.count == len(held)
        assert stats.stored_bytes == sum(d.nbytes for d in held.values())
    depot.close()


def test_room_that_was_given_back_is_used_again(tmp_path):
    depot = Depot("disk", directory=tmp_path)
    quarter = some(GROWTH_BYTES // 4)
    for round_ in range(3):
        for number in range(4):
            put(depot, number, quarter)
        for number in (1, 0, 2, 3) if round_ % 2 else (3, 1, 2, 0):
            depot.drop(number)
    put(depot, 9, np.concatenate([quarter] * 4))  # the gaps have become one
    assert depot.stats.file_bytes == GROWTH_BYTES
    assert depot.stats.peak_stored_bytes == GROWTH_BYTES


@pytest.mark.parametrize("to", KINDS)
def test_a_number_takes_what_is_put_last(to, tmp_path):
    depot = opened(to, tmp_path)
    for nbytes in (PAGE, 5 * PAGE, 10, 0, 2 * PAGE):
        put(depot, 7, some(nbytes, nbytes))
        assert (get(depot, 7, nbytes) == some(nbytes, nbytes)).all()
    assert depot.stats.count == 1
    with pytest.raises(xmem.OffloadError, match="not there under this number"):
        get(depot, 7, PAGE)
    with pytest.raises(xmem.OffloadError, match="not there under this number"):
        get(depot, 8, PAGE)


@pytest.mark.parametrize("to", KINDS)
def test_threads_may_put_and_get_at_once(to, tmp_path):
    depot, wrong = opened(to, tmp_path), []

    def work(seed):
        for turn in range(60):
            number, data = depot.new_number(), some(3000 + 977 * (turn % 9), seed * 1000 + turn)
            put(depot, number, data)
            depot.will_need(number)
            if (get(depot, number, data.nbytes) != data).any():
                wrong.append(number)
            depot.drop(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert depot.stats.count == depot.stats.stored_bytes == 0


def test_a_scratch_file_has_no_name_and_goes_with_its_depot(tmp_path):
    before = len(scratch_files())
    depot = Depot("disk", directory=tmp_path)
    put(depot, 1, some(PAGE))
    assert list(tmp_path.iterdir()) == []
    assert len(scratch_files()) == before + 1
    del depot
    gc.collect()
    assert len(scratch_files()) == before


def test_where_files_without_names_cannot_be_made_the_name_goes_at_once(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *rest, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refusing)
    file = open_scratch(tmp_path)
    assert list(tmp_path.iterdir()) == []
    os.close(file)


@pytest.mark.parametrize("to", KINDS)
def test_a_closed_depot_raises_and_crashes_nothing(to, tmp_path):
    depot, data = opened(to, tmp_path), some(PAGE)
    put(depot, 1, data)
    depot.close()
    depot.close()
    for call in (depot.put, depot.get):
        with pytest.raises(xmem.OffloadError, match="was closed"):
            call(1, data.ctypes.data, data.nbytes)
    depot.drop(1)
    depot.will_need(1)
    assert 1 not in depot
    assert depot.stats.stored_bytes == depot.stats.count == depot.stats.file_bytes == 0
    assert depot.stats.written_bytes == PAGE
    assert depot.failure is None
    another = opened(to, tmp_path)  # and never takes the place of the closed one
    assert another.address != depot.address
    assert 1 not in another


def test_a_depot_is_closed_while_threads_use_it(tmp_path):
    for _ in range(20):
        depot, data, ended = Depot("disk", directory=tmp_path), some(1 << 20), []

        def work(depot=depot, data=data, ended=ended):
            try:
                for number in range(1000):
                    put(depot, number, data)
            except xmem.OffloadError as error:
                ended.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        depot.close()
        for thread in threads:
            thread.join()
        assert len(ended) == 2
        assert all("was closed" in message for message in ended)


def test_an_interpreter_may_end_while_threads_use_a_depot(tmp_path):
    in_a_process(
        """
        import ctypes, sys, threading, time
        from xmem.offload.depot import Depot
        depot, data = Depot("disk", directory=sys.argv[1]), ctypes.create_string_buffer(8 << 20)
        def work(number):
            while True:
                depot.put(number, ctypes.addressof(data), len(data))
        for number in range(3):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        time.sleep(0.2)
        """,
        tmp_path,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_cannot_reach_its_parents_file(tmp_path):
    depot, data = Depot("disk", directory=tmp_path), some(PAGE)
    put(depot, 1, data)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            depot.put(1, some(PAGE, 5).ctypes.data, PAGE)
        except xmem.OffloadError as error:
            own = Depot("disk", directory=tmp_path)  # it may have one of its own
            put(own, 1, data)
            well = "forked from" in str(error) and (get(own, 1, PAGE) == data).all()
            depot.close()
            code = 0 if well and len(scratch_files()) >= 1 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (get(depot, 1, PAGE) == data).all()


def test_two_processes_share_a_directory(tmp_path):
    code = """
    import sys
    import numpy as np
    from xmem.offload.depot import Depot
    depot, seed = Depot("disk", directory=sys.argv[1]), int(sys.argv[2])
    pieces = [np.random.default_rng(seed + n).integers(0, 256, 40_000, np.uint8) for n in range(99)]
    for n, piece in enumerate(pieces):
        depot.put(n, piece.ctypes.data, piece.nbytes)
    found = np.empty_like(pieces[0])
    for n, piece in enumerate(pieces):
        depot.get(n, found.ctypes.data, found.nbytes)
        assert (found == piece).all()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    running = [subprocess.Popen([*command, str(seed)]) for seed in (1, 1000)]
    assert [r.wait(timeout=120) for r in running] == [0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_is_an_error_and_never_other_bytes(tmp_path):
    before = {p.name for p in scratch_files()}
    depot, data = Depot("disk", directory=tmp_path), some(8 * PAGE)
    put(depot, 1, data)
    (ours,) = [p for p in scratch_files() if p.name not in before]
    os.truncate(f"/proc/self/fd/{ours.name}", 3 * PAGE)
    with pytest.raises(xmem.OffloadError, match="it ends before them"):
        get(depot, 1, data.nbytes)


def test_what_cannot_be_read_is_not_said_to_be_safe(tmp_path):
    before = {p.name for p in scratch_files()}
    depot, data = Depot("disk", directory=tmp_path), some(PAGE)
    put(depot, 1, data)
    (ours,) = [p for p in scratch_files() if p.name not in before]
    writable = os.open(os.devnull, os.O_WRONLY)
    os.dup2(writable, int(ours.name))
    os.close(writable)
    with pytest.raises(xmem.OffloadError, match="could not be read back from") as caught:
        get(depot, 1, data.nbytes)
    assert "Nothing is lost" not in str(caught.value)


def test_a_depot_is_usable_until_it_fails_or_is_closed_in_its_own_process(tmp_path):
    depot, closed = Depot("disk", directory=tmp_path), Depot("host")
    closed.close()
    assert depot.is_usable
    assert not closed.is_usable
    child = os.fork()
    if child == 0:
        os._exit(depot.is_usable)
    assert os.waitpid(child, 0)[1] == 0
    code = """
    import resource, sys
    import numpy as np
    import xmem
    from xmem.offload.depot import Depot
    depot, piece = Depot("disk", directory=sys.argv[1]), np.zeros(4096, np.uint8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
    try:
        depot.put(1, piece.ctypes.data, piece.nbytes)
    except xmem.OffloadError:
        print(depot.is_usable)
    """
    assert in_a_process(code, tmp_path) == ["False"]


def test_a_directory_that_is_missing_or_a_file_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in ("missing", "file"):
        with pytest.raises(xmem.OffloadError, match="Give directory=") as caught:
            Depot("disk", directory=tmp_path / wrong)
        assert wrong in str(caught.value)
        assert caught.value.directory == tmp_path / wrong


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    user = os.geteuid()
    try:
        if user == 0:
            for folder in [tmp_path, *tmp_path.parents[:2]]:
                folder.chmod(0o555)
            os.seteuid(65534)
        with pytest.raises(xmem.OffloadError, match="Permission denied"):
            Depot("disk", directory=tmp_path)
    finally:
        os.seteuid(user)
        for folder in [tmp_path, *tmp_path.parents[:2]] if user == 0 else [tmp_path]:
            folder.chmod(0o700)


def test_the_directory_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XMEM_OFFLOAD_DIR", str(tmp_path))
    assert Depot("disk").directory == tmp_path
    monkeypatch.setenv("XMEM_OFFLOAD_DIR", str(tmp_path / "missing"))
    with pytest.raises(xmem.OffloadError, match="missing"):
        Depot("disk")


def test_other_places_are_refused():
    with pytest.raises(xmem.UsageError, match="'disc'"):
        Depot("disc")
    with pytest.raises(xmem.UsageError, match="is for to='disk'"):
        Depot("host", directory="/tmp")


FULL = """
    import resource, signal, sys
    import numpy as np
    import xmem
    from xmem.offload.depot import Depot
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
    depot, piece = Depot("disk", directory=sys.argv[1]), np.arange(1 << 17, dtype=np.int64)  # 1 MiB
    stored = 0
    try:
        while True:
            depot.put(stored, piece.ctypes.data, piece.nbytes)
            stored += 1
    except xmem.OffloadError as error:
        assert error.errno, error
        assert "Nothing is lost" in str(error), error
        assert depot.failure.errno == error.errno
    found = np.empty_like(piece)
    depot.drop(0)
    try:  # nothing is stored from here on, also where there is room
        depot.put(0, piece.ctypes.data, piece.nbytes)
        raise SystemExit("stored")
    except xmem.OffloadError:
        pass
    for number in range(1, stored):
        depot.get(number, found.ctypes.data, found.nbytes)
        assert (found == piece).all()
    print(stored, depot.stats.file_bytes)
"""


def test_a_full_disk_is_known_when_bytes_leave_and_what_was_stored_is_read(tmp_path):
    """The limit is less than the file would grow by: all of the room that there is is used."""
    stored, file_bytes = map(int, in_a_process(FULL, tmp_path, 5 << 20))
    assert (stored, file_bytes) == (5, 5 << 20)


def test_a_small_disk_is_filled_and_no_more():
    """A real file system that has no more room, where mounting one is allowed."""
    folder = Path(f"/tmp/xmem-small-{os.getpid()}")
    folder.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip("mounting is not allowed here")
        stored, file_bytes = map(int, in_a_process(FULL, folder))
        subprocess.run(["umount", folder], check=True)
    finally:
        folder.rmdir()
    assert stored == 3
    assert file_bytes == 3 << 20


@pytest.fixture
def cpu(monkeypatch):
    class Session:
        device = "cpu"

    monkeypatch.setattr(opening, "active", Session)


def test_memory_of_the_machine_is_said_to_be_so(cpu, tmp_path):
    with pytest.warns(xmem.XmemWarning, match="use to='disk'"):
        opening.opened("host", None, "offload_optimizer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disk = opening.opened("disk", tmp_path, "offload_optimizer")
    if disk.in_memory:
        pytest.skip("tests run in memory")
    if not Path("/dev/shm").is_dir() or not Depot("disk", directory="/dev/shm").in_memory:
        pytest.skip("/dev/shm is not memory here")
    with pytest.warns(xmem.XmemWarning, match=r"'/dev/shm' is memory \(tmpfs\)"):
        opening.opened("disk", "/dev/shm", "offload_optimizer")


def test_a_piece_can_be_worked_on_where_it_is(tmp_path):
    for to in KINDS:
        depot, data = opened(to, tmp_path), some(3 * PAGE + 5)
        put(depot, 1, data)
        library = native.load()
        address = library.xmem_depot_map(depot.address, 1)
        piece = np.ctypeslib.as_array((ctypes.c_uint8 * data.nbytes).from_address(address))
        assert (piece == data).all()
        piece[:] = ~data
        library.xmem_depot_unmap(depot.address, data.nbytes, address)
        assert (get(depot, 1, data.nbytes) == ~data).all()
