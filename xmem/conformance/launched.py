"""Programs on several ranks, started by `xmem launch`, which leaves nothing of them behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from xmem.children import deaths_survived, end
from xmem.distributed.keeping import die_with_parent
from xmem.errors import BackendUnavailableError, CapabilityError

END_SECONDS = 20.0
"""How long `xmem launch` may take to end its ranks before it is killed, and their keepers do it.
By itself it takes at most 15."""

_NAMES_AT_FIRST = frozenset(os.environ)
"""Variables from before a backend was in use here; what it sets for its framework, as a process
without other ranks, is not for the ranks."""


def launcher_of(backend: str) -> str:
    """Return what starts a backend's ranks.

    Raises:
        CapabilityError: nothing does.
        BackendUnavailableError: the backend cannot be used here.
    """
    from xmem.plugins import backend_infos

    for info in backend_infos():
        if info.name == backend and info.framework is not None and info.framework.launcher:
            if not info.usable:
                raise BackendUnavailableError(f"backend {backend!r} is not usable: {info.reason}")
            return info.framework.launcher
    raise CapabilityError(f"backend {backend!r} names no launcher of ranks")


def command_of(backend: str, ranks: int, arguments: list[str]) -> list[str]:
    """Return the command that runs `python ARGUMENTS`, a file or `-m module`, on a number of ranks.

    Raises:
        CapabilityError: the backend names no launcher.
        BackendUnavailableError: the backend cannot be used here.
        DistributedError: its launcher is not installed; it says how to get it.
    """
    from xmem.distributed.launching import find_mpirun

    if ranks == 1:
        return [sys.executable, *arguments]
    if launcher_of(backend) == "mpirun":
        find_mpirun()
    launch = ["-m", "xmem", "launch", "-n", str(ranks), "--backend", backend]
    return [sys.executable, *launch, *arguments]


def environment_of(threads: int) -> dict[str, str]:
    """Return the environment of the ranks."""
    count = str(threads)
    return {
        **{name: value for name, value in os.environ.items() if name in _NAMES_AT_FIRST},
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
    }


def start(
    command: list[str], log_path: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; what it prints goes to a file.

    It is told to end when this process does, however that is.
    """
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )


def end_launched(process: subprocess.Popen[bytes]) -> None:
    """End `xmem launch` and its ranks, which lead sessions of their own."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    end(process)


def run_program(
    backend: str, ranks: int, arguments: list[str], log_path: Path, *, limit_seconds: float
) -> int | None:
    """Run `python ARGUMENTS` on ranks, one thread each; returns the exit status.

    Returns:
        None if it was ended because time was up.
    """
    with deaths_survived():
        process = start(command_of(backend, ranks, arguments), log_path, environment_of(1))
        try:
            return process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_launched(process)
