"""Pass on what ranks print, line by line, with the rank in front."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable
from typing import IO, Any

_LONGEST_LINE_BYTES = 64 * 1024


class OutputError(Exception):
    """What ranks print cannot be written, e.g. since the disk is full."""


class Lines:
    """One stream of one rank.

    Args:
        prefix: what stands in front of each line.
        target: where whole lines go, at once.
    """

    def __init__(self, prefix: bytes, target: IO[bytes]) -> None:
        self._prefix = prefix
        self._target = target
        self._rest = b""
        self._returned = False

    def add(self, data: bytes) -> None:
        """Pass on what makes whole lines; a progress bar's carriage return ends one too.

        Raises:
            BrokenPipeError: nobody reads any more.
            OutputError: it cannot be written.
        """
        if self._returned:
            data = data.removeprefix(b"\n")  # of a "\r\n" that came in two pieces
        self._returned = data.endswith(b"\r")
        *lines, self._rest = (
            (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        )
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        try:
            self._target.write(data)
            self._target.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"what the ranks print cannot be written: {error}") from error

    def close(self) -> None:
        """Pass on the last line, which has no end."""
        if self._rest:
            self.add(b"\n")


class Streams:
    """Pipes that a selector watches; the data of an event is the function to call.

    Args:
        selector: where they are registered.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._lines: dict[int, Lines] = {}

    def add(self, pipe: int, take: Callable[[bytes], Any]) -> None:
        """Hand what comes from a pipe to a function; whoever opened it closes it."""
        self._watch(pipe, take, lambda: self._selector.unregister(pipe))

    def add_lines(self, pipe: int, lines: Lines) -> None:
        """Pass on the lines of a pipe, and close it at its end."""
        self._lines[pipe] = lines
        self._watch(pipe, lines.add, lambda: self._close(pipe))

    def close(self) -> None:
        """Close what is still open."""
        for pipe in list(self._lines):
            self._close(pipe)

    def _watch(self, pipe: int, take: Callable[[bytes], Any], finish: Callable[[], object]) -> None:
        os.set_blocking(pipe, False)

        def read() -> None:
            data = _read(pipe)
            if data:
                take(data)
            elif data == b"":
                finish()

        self._selector.register(pipe, selectors.EVENT_READ, read)

    def _close(self, pipe: int) -> None:
        lines = self._lines.pop(pipe)
        self._selector.unregister(pipe)
        os.close(pipe)
        with contextlib.suppress(BrokenPipeError, OutputError):
            lines.close()


def _read(pipe: int) -> bytes | None:
    """Return what is there; b"" at the end; None for nothing yet."""
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""
