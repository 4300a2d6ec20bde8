"""Where offloaded bytes lie: an unlinked scratch file, or memory outside of the framework's pool.

A scratch file has no name from its birth (`O_TMPFILE`), so nothing of it outlives the process, also
after SIGKILL, and processes share a directory without knowing of each other. A process that is
forked has none of its parent's depots. Room is taken on the disk before a tensor is given up for
it: a disk that is full is known then.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from xmem.errors import OffloadError, UsageError, unknown
from xmem.native import depot as native
from xmem.sizes import format_size

To = Literal["host", "disk"]
TO: tuple[To, ...] = get_args(To)
GROWTH_BYTES = 64 << 20
"""By how much a scratch file grows at once."""


@dataclass(frozen=True)
class DepotStats:
    """What a depot holds, in bytes.

    Attributes:
        stored_bytes: now.
        peak_stored_bytes: the highest so far.
        written_bytes: since it was opened.
        read_bytes: since it was opened.
        file_bytes: of the scratch file; 0 without one.
        count: pieces that are held now.
    """

    stored_bytes: int
    peak_stored_bytes: int
    written_bytes: int
    read_bytes: int
    file_bytes: int
    count: int


class Depot:
    """Holds pieces of memory under numbers; calls may come from several threads.

    Args:
        to: "host": memory outside of the framework's pool; "disk": a scratch file.
        directory: where the scratch file is; None: $XMEM_OFFLOAD_DIR, or the system's for
            temporary files.

    Attributes:
        to: see above.
        directory: where the scratch file is; None for "host".
        address: of the native depot, for native code (`xmem/native/depot.cc`): where it is known
            by, and not memory.

    Raises:
        UsageError: another `to`, or a directory for "host".
        OffloadError: the directory is missing or cannot be written to.
    """

    def __init__(self, to: To, *, directory: str | Path | None = None) -> None:
        if to not in get_args(To):
            raise UsageError(unknown("to", to, get_args(To)))
        if to == "host" and directory is not None:
            raise UsageError(f"directory={str(directory)!r} is for to='disk'; to is 'host'")
        self.to = to
        self.directory = _chosen(directory) if to == "disk" else None
        library = native.load()  # before there is a file to be closed
        file = -1 if self.directory is None else open_scratch(self.directory)
        self.address: int = library.xmem_depot_open(file, GROWTH_BYTES)
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._last: list[int] | None = None
        self._close = weakref.finalize(self, library.xmem_depot_close, self.address)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a depot of its own, with nothing in it."""
        return functools.partial(Depot, directory=self.directory), (self.to,)

    def new_number(self) -> int:
        """Return a number that nothing has been stored under."""
        return next(self._numbers)

    def put(self, number: int, address: int, nbytes: int) -> None:
        """Store memory; what was under the number is replaced.

        Raises:
            OffloadError: there is no room, or writing fails; nothing is stored from then on. Or the
                depot is closed, or another process's.
        """
        code = native.load().xmem_depot_put(self.address, number, address, nbytes)
        if code:
            raise self.error(code, nbytes)

    def get(self, number: int, address: int, nbytes: int) -> None:
        """Read what is stored into memory; it stays stored.

        Raises:
            OffloadError: reading fails, or less comes than was written. Or the depot is closed, or
                another process's.
        """
        code = native.load().xmem_depot_get(self.address, number, address, nbytes)
        if code:
            raise self.error(code, nbytes, reading=True)

    def drop(self, number: int) -> None:
        """Forget what is stored under a number, if anything is."""
        if self._close.alive:  # at the end of an interpreter too
            native.load().xmem_depot_drop(self.address, number)

    def will_need(self, number: int) -> None:
        """Tell the system that a piece will be read soon."""
        native.load().xmem_depot_will_need(self.address, number)

    def __contains__(self, number: int) -> bool:
        return bool(native.load().xmem_depot_has(self.address, number))

    @property
    def in_memory(self) -> bool:
        """Whether its directory is memory of the machine all the same (tmpfs)."""
        return bool(native.load().xmem_depot_in_memory(self.address))

    @property
    def is_usable(self) -> bool:
        """Whether it stores what it is given: not failed, not closed, and this process's own."""
        return self._process == os.getpid() and self._close.alive and self.failure is None

    @property
    def failure(self) -> OffloadError | None:
        """Why nothing is stored any more, if so."""
        error = self._counters()[6]
        return self.error(error, 0) if error else None

    @property
    def stats(self) -> DepotStats:
        """What it holds; once it is closed, what went through it."""
        stored, peak, written, read, file, count, _ = self._counters()
        return DepotStats(stored, peak, written, read, file, count)

    def close(self) -> None:
        """Give the file or the memory back; calls that run end first, later ones raise."""
        if self._close.alive:
            _, peak, written, read, *_, failed = self._counters()
            self._last = [0, peak, written, read, 0, 0, failed]
        self._close()

    def error(self, code: int, nbytes: int, *, reading: bool = False) -> OffloadError:
        """Return what a code of the library means, as an error.

        Args:
            code: an errno, or one of `xmem.native.depot`.
            nbytes: of the piece; 0: of none in particular.
            reading: the piece was to be read, not stored.
        """
        where = "the host's memory" if self.directory is None else f"a file in {self.directory}"
        what = f"{format_size(nbytes)} could not be" if nbytes else "Nothing more can be"
        if code == native.SHORT:
            message = f"{what} read back from {where}: it ends before them. It was cut from outside"
        elif code in (native.UNKNOWN, native.OTHER_SIZE):
            message = f"{what} read back from {where}: they are not there under this number"
        elif code == native.CLOSED:
            message = (
                f"{what} moved: the depot was closed, or belongs to the process that this one was"
                " forked from. Offload anew in this process"
            )
        elif code == native.FAILED_BEFORE:
            return self.error(self._counters()[6] or errno.EIO, nbytes)
        elif reading:
            message = f"{what} read back from {where}: {os.strerror(code)}"
        else:
            held = format_size(self.stats.stored_bytes)
            message = (
                f"{what} offloaded to {where}: {os.strerror(code)}. It holds {held}. Nothing is"
                " lost; make room, name another directory=, or train on without offload"
            )
        return OffloadError(code if code > 0 else None, message, directory=self.directory)

    def _counters(self) -> list[int]:
        if self._last is not None:
            return self._last
        found: Any = (ctypes.c_int64 * 7)()
        native.load().xmem_depot_counters(self.address, found)
        return list(found)


def open_scratch(directory: Path) -> int:
    """Return an open file without a name.

    Raises:
        OffloadError: the directory is missing or cannot be written to.
    """
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (IsADirectoryError, OSError) as error:
            if isinstance(error, (FileNotFoundError, PermissionError, NotADirectoryError)):
                raise
        file, name = tempfile.mkstemp(prefix="xmem-", dir=directory)
        os.unlink(name)  # noqa: PTH108
    except OSError as error:
        raise OffloadError(
            error.errno,
            f"no scratch file can be made in {str(directory)!r}: {error.strerror}. Give directory=,"
            " or set XMEM_OFFLOAD_DIR, to a directory that exists and may be written to",
            directory=directory,
        ) from error
    return file


def _chosen(directory: str | Path | None) -> Path:
    if directory is None:
        directory = os.environ.get("XMEM_OFFLOAD_DIR") or tempfile.gettempdir()
    return Path(directory)
