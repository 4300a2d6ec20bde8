"""Steps on the backend `xmem_fitting`: parameters, states, activations; and ways to fail."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributions import make_distribution

STATIC, STATES, BY_ITEM = 10_000, 20_000, 1_000
SOURCE = Path(__file__).parent / "fakes" / "xmem_fitting.py"


@pytest.fixture
def fitting(monkeypatch, tmp_path):
    """The backend in use, in this process and in those that it starts; returns its module."""
    site = make_distribution(
        tmp_path / "site",
        "xmem-fitting",
        entry_points={"fitting": "xmem_fitting"},
        modules={"xmem_fitting.py": SOURCE.read_text(encoding="utf-8")},
    )
    monkeypatch.syspath_prepend(str(site))
    import xmem
    from xmem import api

    before = dict(api._loaded), api._active
    xmem.use("fitting")
    yield sys.modules["xmem_fitting"]
    api._loaded.clear()
    api._loaded.update(before[0])
    api._active = before[1]
    sys.modules.pop("xmem_fitting", None)


def plain(size, *, on_step=None, log=None):
    """Parameters, states that the first step makes, and activations while a step runs."""
    import xmem_fitting

    held = [xmem_fitting.Holding(STATIC)]

    def step():
        if log is not None:
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(f"{size} {os.getpid()}\n")
        if on_step is not None:
            on_step(size)
        activations = xmem_fitting.Holding(BY_ITEM * size)
        if len(held) == 1:
            held.append(xmem_fitting.Holding(STATES))
        return activations

    return step


def peak_of(size):
    """What a step in the middle of training takes."""
    return STATIC + STATES + BY_ITEM * size


def steps_of(log):
    """Return the sizes and process ids of all steps that were begun."""
    return [tuple(map(int, line.split())) for line in Path(log).read_text().splitlines()]


def crash_above(most, how):
    """Return a step that ends its process where it is larger."""
    return functools.partial(_crash, most, how)


def _crash(most, how, size):
    if size > most:
        print("about to go")
        os.kill(os.getpid(), getattr(signal, how))


def hang_above(most, pids):
    """Return a step that hangs with a child of its own where it is larger."""
    return functools.partial(_hang, most, pids)


def _hang(most, pids, size):
    if size > most:
        child = subprocess.Popen(["sleep", "60"])
        Path(pids).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)


def raise_above(most, size, *, survived=False):
    """A bug in the step, after a refusal that it has lived with."""
    import xmem_fitting

    if survived:
        with contextlib.suppress(RuntimeError):
            xmem_fitting.MEASURE.take(10**9)
    if size > most:
        raise KeyError(f"no such item: {size}")


def leave_above(most, size):
    """What `argparse` does where it does not understand."""
    if size > most:
        sys.exit(2)


def crash_with_a_heir_above(most, pids, size):
    """The process is gone, and one that it forked has all that it had open."""
    if size > most:
        heir = os.fork()
        if not heir:
            time.sleep(60)
            os._exit(0)
        Path(pids).write_text(str(heir))
        os.kill(os.getpid(), signal.SIGKILL)


def noise(size):
    """What frameworks print."""
    print('{"type": "outcome", "ended": "completed"}\n\x1b[31m' * 10, flush=True)
    print("\udcff not text \x00", file=sys.stderr, flush=True)
    os.write(1, b"\xff\x00\n")


def leave_behind(size):
    """What a failed step leaves: here it is never given back."""
    import xmem_fitting

    xmem_fitting.MEASURE.take(5)


def is_alive(pid):
    """Say whether a process is there and not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return text.rsplit(")", 1)[1].split()[0] != "Z"


def stays(pid, seconds=10.0):
    """Say whether a process goes on; one that has been killed may take a moment to end."""
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False
