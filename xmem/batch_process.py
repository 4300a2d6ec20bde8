"""Tries in a process of their own, seen from the one that asks for them."""

from __future__ import annotations

import base64
import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xmem.batch_child import Begin, Begun, Failure, Message, Ready
from xmem.batch_trials import Asked, MakeStep, Outcome, name_size
from xmem.children import deaths_survived, end
from xmem.errors import MeasurementError, UsageError, XmemWarning

if TYPE_CHECKING:
    from xmem.backend import Backend

_LOG_LINES = 8
_GONE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
"""So often it is seen to that the process lives: one that it forked may hold the socket open."""

HANG_SECONDS = 600.0
"""A process from which nothing is heard for so long hangs, or for `_PATIENCE` times as long as it
has taken so far."""

_PATIENCE = 20


class ChildTrials:
    """Tries in a fresh process; it is started anew after one that it did not survive.

    Args:
        backend: the one in use; the process uses the same, on as many threads.
        make_step: pickled once, with what it refers to.

    Raises:
        UsageError: `make_step` cannot be pickled.
    """

    def __init__(self, backend: Backend, make_step: MakeStep) -> None:
        self._backend = backend
        self._stack = contextlib.ExitStack()
        pickled = _pickled(make_step)
        with self._stack:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._payload = self._folder / "make_step"
            self._payload.write_bytes(pickled)
            self._log = self._folder / "log"
            self._stack.enter_context(deaths_survived())
            self._stack.callback(self._end)
            self._stack = self._stack.pop_all()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready: Ready | None = None
        self._slowest_seconds = 0.0  # from one message to the next

    def free_bytes(self) -> int | None:
        """Ask the driver, in that process."""
        self._started(None)
        return None if self._ready is None else self._ready.free_bytes

    def attempt(self, asked: Asked) -> Outcome:
        """Send it there, and wait for the answer."""
        begun = time.monotonic()
        deadline = None if asked.seconds is None else begun + asked.seconds
        if not self._started(deadline):
            return _ended("late", 0, time.monotonic() - begun)
        assert self._connection is not None
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        self._send(msgspec.structs.replace(asked, seconds=left))
        steps = 0
        while True:
            message = self._heard(deadline)
            if isinstance(message, Begun):
                steps = message.step
            elif isinstance(message, Outcome):
                if message.ended == "refused" and message.left_bytes:
                    self._end()  # what a failed try leaves would count against the next one
                return message
            elif isinstance(message, Failure):
                raise self._error(message, asked.size)
            else:
                reason = "" if message is None else str(message) or self._death()
                self._end()
                ended = "late" if message is None else "died"
                return _ended(ended, steps, time.monotonic() - begun, reason)

    def close(self) -> None:
        """End the process, and take its files away."""
        self._stack.close()

    def _started(self, deadline: float | None) -> bool:
        """Start the process if there is none; False when time is up.

        Raises:
            MeasurementError: it does not come up.
        """
        if self._process is not None:
            return True
        here, there = multiprocessing.Pipe()
        with there, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "xmem.batch_child", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        self._connection = here
        self._send(
            Begin(
                backend=self._backend.name,
                device=self._backend.device,
                sys_path=tuple(sys.path),
                payload=str(self._payload),
                pool=self._backend.pool.in_force() if self._backend.offers("pool") else {},
            )
        )
        message = self._receive(deadline)
        if message is None:
            self._end()
            return False
        if isinstance(message, Failure):
            raise self._error(message, None)
        if not isinstance(message, Ready):
            reason = self._death()
            raise MeasurementError(
                f"the process for the tries did not come up: {reason}. With isolate=False the tries"
                " run in this process."
            )
        if self._ready is None:
            self._compare(message)
        self._ready = message
        return True

    def _environment(self) -> dict[str, str]:
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        settings = self._backend.measure.settings()
        threads = settings.get("threads", settings.get("omp_num_threads", ""))
        if threads.isdecimal():
            found["OMP_NUM_THREADS"] = found["MKL_NUM_THREADS"] = threads
        return found

    def _compare(self, ready: Ready) -> None:
        here = self._backend.measure.settings()
        names = sorted(here.keys() | ready.settings.keys())
        others = [
            f"{name} is {ready.settings.get(name)}, not {here.get(name)}"
            for name in names
            if here.get(name) != ready.settings.get(name)
        ]
        if others:
            warnings.warn(
                f"the process for the tries differs from this one: {'; '.join(others)}. Peaks may"
                " depend on it: set it in make_step, or pass isolate=False.",
                XmemWarning,
                stacklevel=2,
            )

    def _send(self, message: Begin | Asked) -> None:
        assert self._connection is not None
        # A process that is gone is noticed when the answer is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(msgspec.json.encode(message))

    def _heard(self, deadline: float | None) -> Message | EOFError | None:
        """Return the next message of a try; EOFError also where the process hangs, with text."""
        begun = time.monotonic()
        patience = max(HANG_SECONDS, _PATIENCE * self._slowest_seconds)
        hangs_at = begun + patience
        message = self._receive(hangs_at if deadline is None else min(deadline, hangs_at))
        if message is None and (deadline is None or hangs_at < deadline):
            return EOFError(f"it hung: nothing was heard for {patience:.0f} s")
        if isinstance(message, (Begun, Outcome)):
            self._slowest_seconds = max(self._slowest_seconds, time.monotonic() - begun)
        return message

    def _receive(self, deadline: float | None) -> Message | EOFError | None:
        """Return the next message; EOFError if the process is gone, None when time is up."""
        assert self._connection is not None
        assert self._process is not None
        try:
            while not self._connection.poll(_slice(deadline)):
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                if self._process.poll() is not None and not self._connection.poll():
                    return EOFError()
            found: Message = msgspec.json.decode(self._connection.recv_bytes(), type=Message)
        except (EOFError, ConnectionResetError):
            return EOFError()
        return found

    def _death(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(_GONE_SECONDS)
        except subprocess.TimeoutExpired:
            ended = "it closed its end of the socket"
        else:
            ended = f"it ended with exit status {code}"
            if code < 0:
                ended = f"it was ended by {signal.Signals(-code).name}"
                if code == -signal.SIGKILL:
                    ended += " (where the system itself runs out of memory, it does so)"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = [line.strip() for line in lines if line.strip()][-_LOG_LINES:]
        return f"{ended}; last output: {' | '.join(tail)}" if tail else ended

    def _error(self, failure: Failure, size: int | None) -> Exception:
        """Return what went wrong there as an exception, caused by the traceback of there."""
        self._end()
        there = _There(failure.text)
        if failure.where == "load":
            error: Exception = UsageError(
                "make_step was sent to a process of its own, and cannot be put together there:"
                f" {failure.text.strip().splitlines()[-1]}. Define it in a module that can be"
                " imported, build the model inside it, or pass isolate=False."
            )
        else:
            what = "the process for the tries" if size is None else f"the step of size {size}"
            error = _unpickled(failure.error) or MeasurementError(
                f"{what} failed: {failure.text.strip().splitlines()[-1]}"
            )
        error.__cause__ = there
        if size is not None:
            name_size(error, size)
        return error

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            end(self._process)
        self._process = self._connection = None


def _slice(deadline: float | None) -> float:
    if deadline is None:
        return _LOOK_SECONDS
    return min(max(deadline - time.monotonic(), 0.0), _LOOK_SECONDS)


class _There(Exception):  # noqa: N818  shown as the cause of an error, as it was printed there
    """The traceback of the other process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def _ended(ended: Any, steps: int, seconds: float, reason: str = "") -> Outcome:
    return Outcome(
        ended=ended,
        peak_bytes=None,
        static_bytes=None,
        left_bytes=0,
        steps=steps,
        seconds=seconds,
        reason=reason,
    )


def _pickled(make_step: MakeStep) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    try:
        found: bytes = cloudpickle.dumps(make_step)
    except Exception as error:
        raise UsageError(
            f"make_step cannot be sent to a process of its own: {type(error).__name__}: {error}."
            " Let it build model, optimizer and data itself instead of referring to those of this"
            " process, or pass isolate=False."
        ) from error
    return found


def _unpickled(packed: str) -> Exception | None:
    try:
        found = pickle.loads(base64.b64decode(packed))
    except Exception:  # noqa: BLE001  whatever its class does; its text is there
        return None
    return found if isinstance(found, Exception) else None
