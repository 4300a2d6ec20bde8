"""The keeper of one rank: between torchrun or mpirun, and the rank's own process.

Run as a script, in isolated mode, by the launcher's command: `python -I keeping.py ADDRESS script`.
It starts `python script`, whose output goes into pipes of `xmem launch`, tells `xmem launch` its
exit status, and stays until all ranks have ended: torchrun and mpirun, which would end the others
within a second, see ranks end together. It ends the rank when `xmem launch` says so or is gone.

Imports the standard library only, and little of it: it is started once per rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any

ENVIRONMENT = "XMEM_LAUNCH"
"""JSON for the keepers: what to restore, and what to set, in a rank's environment."""

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_LOOK_SECONDS = 0.1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the system send a signal to this process when its parent's thread ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(number), 0, 0, 0)


def keep(address: str, script: list[str]) -> int:
    """Run one rank; returns this process's own exit status."""
    told = json.loads(os.environ.pop(ENVIRONMENT))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + address[1:] if address.startswith("@") else address)
    hello = {"rank": own_rank(told["rank_variable"]), "secret": told["secret"]}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    _, pipes, _, _ = socket.recv_fds(connection, 1, 2)
    if not pipes:
        return 0  # the job is over before this rank began
    process = _start(script, pipes, told["environment"])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: _signal(process, got))
    try:
        connection.sendall(json.dumps({"process": process.pid}).encode() + b"\n")
        in_order = _follow(connection, process)
    finally:
        _end(process)
    if in_order:
        return 0
    shutil.rmtree(told["folder"], ignore_errors=True)  # nobody else is left to do it
    return 1


def own_rank(variable: str) -> int:
    """Return what the launcher has numbered this process."""
    if variable not in os.environ:
        raise SystemExit(f"xmem launch: {variable} is not set: no launcher has started this")
    return int(os.environ[variable])


def _start(script: list[str], pipes: list[int], changes: dict[str, str | None]) -> subprocess.Popen:  # type: ignore[type-arg]
    environment = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value

    def prepare() -> None:
        os.setpgrp()  # what the rank leaves behind can be ended as one
        die_with_parent()

    process = subprocess.Popen(
        [sys.executable, *script],
        stdin=subprocess.DEVNULL,
        stdout=pipes[0],
        stderr=pipes[1],
        env=environment,
        preexec_fn=prepare,
    )
    for pipe in pipes:
        os.close(pipe)
    return process


def _follow(connection: socket.socket, process: subprocess.Popen) -> bool:  # type: ignore[type-arg]
    """Do what `xmem launch` says until it says go; False when it is gone."""
    reported = False
    rest = b""
    ended = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
    while True:
        if not reported and process.poll() is not None:
            _end(process)
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"status": process.returncode}).encode() + b"\n")
            reported = True
        watched: list[Any] = [connection] if reported or ended is None else [connection, ended]
        ready, _, _ = select.select(watched, [], [], _LOOK_SECONDS)
        if connection not in ready:
            continue
        try:
            data = connection.recv(4096)
        except OSError:
            return False
        if not data:
            return False
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == b"go":
                return True
            _signal(process, int(line))


def _signal(process: subprocess.Popen, number: int) -> None:  # type: ignore[type-arg]
    """Send a signal to the rank; the last one to all that it started."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def _end(process: subprocess.Popen) -> None:  # type: ignore[type-arg]
    """End the rank and what it has left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], sys.argv[2:]))
