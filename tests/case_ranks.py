"""Cases of several ranks, and what becomes of their processes."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from xmem.conformance.gathering import rank_path
from xmem.conformance.runner import result_path
from xmem.report.model import Case, Result, write_json

_WORKER = [b"-m", b"xmem.conformance.worker"]
_ROLL = "xmem-roll"  # the memory that ranks share once they have found each other


def make_case(backend, technique="zero1", **changes):
    """Return a case of two ranks."""
    settings = {"workload": "mlp", "device": "cpu", "threads": 1, "world": 2}
    return Case(technique=technique, backend=backend, **{**settings, **changes})


def commands_of(folder):
    """Return the processes whose command line names a folder, with their command lines."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (place / "cmdline").read_bytes().split(b"\0")
            if any(str(folder).encode() in word for word in command):
                found[int(place.name)] = command
    return found


def none_left(folder, seconds=5.0):
    """Say whether no process of a folder is left, at last."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and commands_of(folder):
        time.sleep(0.05)
    return not commands_of(folder)


def leave_old_parts(case, folder):
    """Leave what the ranks of a run that was killed may have left: parts that ended well."""
    for rank in range(case.world):
        write_json(Result(case=case, status="ok"), rank_path(result_path(case, folder), rank))


@contextlib.contextmanager
def killing(folder, rank):
    """Kill a rank of the case that runs in a folder, a second after the ranks have met."""
    stop = threading.Event()
    thread = threading.Thread(target=_kill, args=(folder, rank, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _kill(folder, rank, stop):
    while not stop.wait(0.05):
        for pid, command in commands_of(folder).items():
            if command[1:3] == _WORKER and _rank(pid) == rank and _has_met_others(pid):
                stop.wait(1.0)
                os.kill(pid, signal.SIGKILL)
                return


def _rank(pid):
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = word.partition(b"=")
            if name in (b"RANK", b"OMPI_COMM_WORLD_RANK"):
                return int(value)
    return None


def _has_met_others(pid):
    with contextlib.suppress(OSError):
        return _ROLL in Path(f"/proc/{pid}/maps").read_text()
    return False
