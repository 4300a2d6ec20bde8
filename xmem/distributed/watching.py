"""Watch the other ranks while the program runs, and end this process when they are gone.

A thread gives signs of life and looks at the roll. A rank that has gone shows in one of three ways:

- a communication of this rank fails, and is explained (`failing`); the thread leaves it the time;
- else this rank computes, or waits in Python: the thread has SIGTERM's handler run in the main
  thread, and that raises the error which names the rank;
- else it waits where no handler runs (in the framework's C++): the thread prints the error and
  where the main thread is, and ends the process.

The launcher's SIGTERM, which all of them send when a rank dies, has the same handler.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from xmem.distributed import failing
from xmem.distributed.roll import BEAT_SECONDS
from xmem.errors import DistributedError

EXPLAIN_SECONDS = 1.0
"""How long a communication that fails is given to raise by itself."""

HANDLER_SECONDS = 2.0
"""How long the main thread is given to run the handler."""

_COMMUNICATION = re.compile(
    r"xmem\.distributed|gloo|nccl|\bMPI|ProcessGroup|TCPStore|connection|broken pipe|socket"
    r"|time(d)?[ -]?out|peer|\bpair\b",
    re.IGNORECASE,
)
_BY_SIGNAL = "ended by SIGTERM"
_COMPUTATION = "computation"
_FRAMEWORKS_OWN = "communication of the framework's own"


_installed: Watcher | None = None


class Watcher:
    """What is installed between `init` and `destroy`.

    Args:
        watch: the roll, and what the program has been told.
    """

    def __init__(self, watch: failing.Watch) -> None:
        self._watch = watch
        self._process = os.getpid()
        self._handled = threading.Event()
        self._signalled_at: float | None = None
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._ended = threading.Event()
        self._undo: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name="xmem-roll", daemon=True)

    def begin(self) -> None:
        """Install the handlers and start the thread."""
        global _installed
        _installed = self
        previous_hook = sys.excepthook
        hook = self._excepthook  # one object, so that it can be compared
        self._previous_hook = previous_hook
        sys.excepthook = hook

        def restore() -> None:
            if sys.excepthook == hook:  # else somebody has laid another one over it
                sys.excepthook = previous_hook

        self._undo.append(restore)
        atexit.register(self._at_exit)
        self._undo.append(lambda: atexit.unregister(self._at_exit))
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._install_handler()
        self._thread.start()

    def end(self) -> None:
        """Undo everything."""
        global _installed
        _installed = None
        self._ended.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        self._wake.close()
        self._waker.close()

    def forget(self) -> None:
        """Undo everything in a child that was forked: it is not the rank.

        Its signals would wake the parent's thread, through the socket that they share.
        """
        self._ended.set()
        for undo in reversed(self._undo):
            with contextlib.suppress(Exception):
                undo()
        self._wake.close()
        self._waker.close()

    def _install_handler(self) -> None:
        before: Any = signal.getsignal(signal.SIGTERM)
        if before is None:
            return  # of native code, and could not be put back; the thread does without
        self._previous = before
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._undo.append(lambda: signal.signal(signal.SIGTERM, before))
        # So that the thread hears of a signal whose handler waits for the main thread.
        other = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
        else:
            self._undo.append(lambda: signal.set_wakeup_fd(-1))

    # The thread.

    def _run(self) -> None:
        roll = self._watch.roll
        while not self._ended.is_set():
            roll.beat()
            self._listen(BEAT_SECONDS / 2)
            if self._ended.is_set():
                return
            if self._watch.told is None and (gone := _causes(roll.gone())):
                self._have_told(gone)
            if self._signalled_at is not None and not self._handled.is_set():
                self._wait_or_end()

    def _listen(self, seconds: float) -> None:
        """Wait for a while, or for a signal."""
        with contextlib.suppress(OSError, ValueError):  # closed by `end`
            if select.select([self._wake], [], [], seconds)[0]:
                heard = self._wake.recv(64)
                if signal.SIGTERM in heard and self._signalled_at is None:
                    self._signalled_at = time.monotonic()

    def _have_told(self, gone: list[Any]) -> None:
        """See to it that the program learns of it."""
        if self._waits(lambda: self._watch.told is not None, EXPLAIN_SECONDS):
            return
        if self._previous is not None:
            _thread.interrupt_main(signal.SIGTERM)
            if self._waits(
                lambda: self._handled.is_set() or self._watch.told is not None, HANDLER_SECONDS
            ):
                return
        if not self._ended.is_set():
            error = failing.lost_error(gone, f"{self._doing()}, where no handler runs")
            self._end_process(error, 1)

    def _wait_or_end(self) -> None:
        """End the process if the main thread does not come to handle a signal."""
        handled = self._waits(self._handled.is_set, HANDLER_SECONDS)
        if handled or self._ended.is_set():
            return
        if gone := _causes(self._watch.roll.gone()):
            self._end_process(failing.lost_error(gone, self._doing()), 1)
        self._end_process(DistributedError(_BY_SIGNAL), 128 + signal.SIGTERM)

    def _waits(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition or the end; says whether there is nothing more to do."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if condition() or self._ended.is_set():
                return True
            self._watch.roll.beat()
            time.sleep(0.02)
        return False

    def _end_process(self, error: DistributedError, status: int) -> None:
        """Print an error and where the main thread is, and go."""
        name = f"{type(error).__module__}.{type(error).__name__}"
        self._watch.roll.fail(f"{type(error).__name__}: {error}")
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        text = f"The main thread was here:\n{stack}{name}: {error}\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "replace"))  # sys.stderr's lock may be held
        os._exit(status)

    def _doing(self) -> str:
        own = self._watch.roll.entry(self._watch.roll.rank)
        return own.doing if own.entered > own.finished else _COMPUTATION

    # The main thread.

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Raise the error that names who is gone; without one do what was done before."""
        if os.getpid() != self._process:
            self._default(number, frame)
            return
        self._handled.set()
        if self._watch.told is None:
            roll = self._watch.roll
            gone = _causes(failing.wait_for_gone(roll, EXPLAIN_SECONDS)) or roll.left()
            if gone:
                self._watch.told = failing.lost_error(gone, self._doing())
                raise self._watch.told
        else:
            sys.stderr.write(f"{_BY_SIGNAL}, after {type(self._watch.told).__name__}\n")
        self._watch.roll.fail(_BY_SIGNAL)
        self._default(number, frame)

    def _default(self, number: int, frame: FrameType | None) -> None:
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous is not signal.SIG_IGN:
            _flush()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an uncaught error, explained; write it on the roll; end this process at once."""
        if os.getpid() != self._process:
            self._previous_hook(kind, error, trace)
            return
        explained = self.explanation(error)
        final = explained or error
        self._watch.roll.fail(f"{type(final).__name__}: {_one_line(final)}")
        with contextlib.suppress(Exception):
            self._previous_hook(kind, error, trace)
        if explained is not None:
            name = f"{type(explained).__module__}.{type(explained).__name__}"
            sys.stderr.write(f"\nThe cause, as far as xmem knows:\n{name}: {explained}\n")
        _flush()
        os._exit(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)

    def explanation(self, error: BaseException) -> DistributedError | None:
        """Return what an error of the framework's own communication is due to, or None."""
        if isinstance(error, DistributedError) or not isinstance(error, self._watch.failures):
            return None
        if not _COMMUNICATION.search(str(error)):
            return None  # this rank's own; others may have the same
        doing = self._doing()
        return failing.explain(error, _FRAMEWORKS_OWN if doing == _COMPUTATION else doing)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._watch.roll.leave()


def explanation(error: BaseException) -> DistributedError | None:
    """Return what an error of the framework's own communication is due to, or None.

    For programs that catch their errors; those that nothing catches are explained by themselves.
    """
    return None if _installed is None else _installed.explanation(error)


_masks: list[set[int]] = []


def _before_fork() -> None:
    """Hold SIGTERM back until the child has forgotten the rank's handlers."""
    if _installed is not None:
        _masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})))


def _after_fork(*, in_child: bool) -> None:
    if in_child and _installed is not None:
        _installed.forget()
    if _masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


# They stay for good, and do nothing without `init`.
os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(in_child=False),
    after_in_child=lambda: _after_fork(in_child=True),
)


def _causes(gone: list[Any]) -> list[Any]:
    """Return those that did not merely obey a signal, which is then sent to all."""
    return [entry for entry in gone if entry.error != _BY_SIGNAL]


def _one_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _flush() -> None:
    """Write out what waits in buffers, which `os._exit` would drop."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
