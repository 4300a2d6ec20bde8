"""Tries in a process of their own: `python -m xmem.batch_child FD`, started by `batch_process`.

FD is one end of a socket; what frameworks and steps print goes nowhere near it. Messages are JSON:
`Begin` and then `Asked` one way, `Ready`, `Begun`, `Outcome` or `Failure` the other.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xmem.batch_trials import Asked, MakeStep, Outcome, attempt, free_bytes

if TYPE_CHECKING:
    from xmem.backend import Backend

_PR_SET_PDEATHSIG = 1


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is for.

    Attributes:
        backend: its name.
        device: the one in use, "cpu" or "cuda".
        sys_path: where modules are found.
        payload: the file with the pickled `make_step`.
        pool: the pool's settings in force, to be put in force there.
    """

    backend: str
    device: str
    sys_path: tuple[str, ...]
    payload: str
    pool: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The framework is imported, and `make_step` is there.

    Attributes:
        settings: the framework's, see `Measure.settings`.
        free_bytes: what a step could take of the device's memory, or None.
    """

    settings: dict[str, str]
    free_bytes: int | None


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A step is about to begin.

    Attributes:
        step: how many it makes in this try.
    """

    step: int


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """Something went wrong that has nothing to do with how much memory there is.

    Attributes:
        where: "start", "load" (of `make_step`) or "step".
        text: the traceback.
        error: the exception, pickled, in base 64; "" where it cannot be.
    """

    where: str
    text: str
    error: str


Message = Ready | Begun | Outcome | Failure


def send(connection: Connection, message: Message) -> None:
    """Write a message."""
    connection.send_bytes(msgspec.json.encode(message))


def main(arguments: list[str]) -> None:
    """Serve tries until the other end is closed."""
    _die_with_parent()
    descriptor = int(arguments[0])
    os.set_inheritable(descriptor, False)  # compilers must not hold it open
    connection = Connection(descriptor)
    begin = msgspec.json.decode(connection.recv_bytes(), type=Begin)
    sys.path[:] = begin.sys_path
    where = "start"
    try:
        import xmem

        backend = xmem.use(begin.backend, device=begin.device)
        _shape_pool(backend, begin.pool)
        where = "load"
        make_step: MakeStep = pickle.loads(Path(begin.payload).read_bytes())
        ready = Ready(settings=backend.measure.settings(), free_bytes=free_bytes(backend))
    except BaseException as error:  # noqa: BLE001  raised again on the other side
        send(connection, _failure(where, error))
        return
    send(connection, ready)
    while True:
        asked = msgspec.json.decode(connection.recv_bytes(), type=Asked)
        send(connection, _answer(connection, backend, make_step, asked))


def _answer(
    connection: Connection, backend: Backend, make_step: MakeStep, asked: Asked
) -> Outcome | Failure:
    def on_step(step: int) -> None:
        send(connection, Begun(step))

    try:
        return attempt(backend, make_step, asked, on_step)
    except BaseException as error:  # noqa: BLE001  raised there; SystemExit is no lack of memory
        return _failure("step", error)


def _shape_pool(backend: Backend, wanted: dict[str, Any]) -> None:
    """Put in force what differs; a setting that comes too late here is refused with its reason."""
    if not wanted:
        return
    now = backend.pool.in_force()
    changed = {name: value for name, value in wanted.items() if now.get(name) != value}
    on_oom = changed.pop("on_oom", None)
    if changed or on_oom is not None:
        backend.pool.configure(changed, on_oom)


def _failure(where: str, error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    try:
        packed = base64.b64encode(pickle.dumps(error.with_traceback(None))).decode()
    except Exception:  # noqa: BLE001  whatever it holds; its text is there
        packed = ""
    return Failure(where=where, text=text, error=packed)


def _die_with_parent() -> None:
    """Have the system end this process when the one that started it ends (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    # As `__main__` these classes would be others than those that xmem's modules import.
    from xmem import batch_child

    code = 1
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        batch_child.main(sys.argv[1:])
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Frameworks may abort while they shut down; all that counts has been sent.
    os._exit(code)
