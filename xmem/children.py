"""Processes that xmem starts: they may die without taking this one along, and none is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def deaths_survived() -> Iterator[None]:
    """Take the system's default answer to the death of a child inside the block.

    Who loads Jittor 1.3.11 gets a handler (its src/utils/log.cc) that ends the whole process as
    soon as any child is killed by a signal: one crashed child would be the end. It serves Jittor's
    own data loaders, so it is put back. C handlers are unknown to Python's signal module; the saved
    one is opaque here.
    """
    libc = ctypes.CDLL(None)
    saved = ctypes.create_string_buffer(1024)  # more than any struct sigaction
    libc.sigaction(int(signal.SIGCHLD), None, saved)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGCHLD), ctypes.c_void_p(0))  # SIG_DFL
    try:
        yield
    finally:
        libc.sigaction(int(signal.SIGCHLD), saved, None)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session of its own, and whatever it started (compilers)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
