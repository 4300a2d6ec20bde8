"""Programs on several ranks, started by what the backend's framework uses, and ended for sure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from xmem.errors import CapabilityError

GRACE_SECONDS = 3.0
"""How long a launcher may take to end its ranks before all of them are killed."""


_NAMES_AT_FIRST = frozenset(os.environ)
"""Variables from before a backend was in use here; what it sets for its framework, as a process
without other ranks, is not for the ranks."""


def launcher_of(backend: str) -> str:
    """Return what starts a backend's ranks.

    Raises:
        CapabilityError: nothing does.
    """
    from xmem.plugins import backend_infos

    for info in backend_infos():
        if info.name == backend and info.framework is not None and info.framework.launcher:
            return info.framework.launcher
    raise CapabilityError(f"backend {backend!r} names no launcher of ranks")


def command_of(backend: str, ranks: int, arguments: list[str]) -> list[str]:
    """Return the command that runs `python ARGUMENTS` on a number of ranks."""
    from xmem.distributed.launching import command_for

    if ranks == 1:
        return [sys.executable, *arguments]
    return command_for(launcher_of(backend), ranks, arguments)


def environment_of(backend: str, threads: int) -> dict[str, str]:
    """Return the environment of the launcher and the ranks."""
    from xmem.distributed.launching import environment_for

    count = str(threads)
    inherited = environment_for(launcher_of(backend))
    since = set(os.environ) - _NAMES_AT_FIRST
    return {
        **{name: value for name, value in inherited.items() if name not in since},
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
    }


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and the ranks that it started; they lead sessions of their own.

    A launcher that is asked politely ends its ranks; what is left after a moment is killed.
    """
    started = _descendants(process.pid)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    started |= _descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid, born in started.items():
        if _born(pid) == born:  # not another process that was given the same number
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> dict[int, str]:
    """Return the processes that a process has started, and they in turn, with their births."""
    children: dict[int, list[int]] = {}
    for other, parent in _parents():
        children.setdefault(parent, []).append(other)
    found: dict[int, str] = {}
    left = list(children.get(pid, ()))
    while left:
        child = left.pop()
        born = _born(child)
        if born is not None:
            found[child] = born
        left += children.get(child, ())
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = _stat(int(folder.name))
            if fields:
                yield int(folder.name), int(fields[1])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; none if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _born(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else None


def run_program(
    backend: str, ranks: int, arguments: list[str], log_path: Path, *, limit_seconds: float
) -> int | None:
    """Run `python ARGUMENTS` on ranks, one thread each; returns the exit status.

    Returns:
        None if it was ended because time was up.
    """
    from xmem.children import deaths_survived

    deadline = time.monotonic() + limit_seconds
    with log_path.open("wb") as log, deaths_survived():
        process = subprocess.Popen(
            command_of(backend, ranks, arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment_of(backend, 1),
            start_new_session=True,
        )
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_all(process)
