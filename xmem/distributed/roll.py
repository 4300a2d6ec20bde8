"""The roll: a small shared table of the ranks on a host, to name those that are gone or late.

One record of 512 bytes per rank of the world, little-endian; records of ranks on other hosts stay
zero: what becomes of those is not known here. Native code that waits reads the same table.

| offset | what |
| --- | --- |
| 0 | int64: process id |
| 8 | int64: its start, in clock ticks since boot (/proc/PID/stat, field 22) |
| 16 | int64: 0 absent, 1 here, 2 left in order, 3 failed |
| 24 | int64: last sign of life, CLOCK_MONOTONIC in ns |
| 32 | int64: communications entered |
| 40 | int64: communications finished |
| 48 | 208 bytes of UTF-8, ended by 0: what it is doing |
| 256 | 256 bytes of UTF-8, ended by 0: the error it failed with |

The table is anonymous memory of one rank, which the others open through /proc: no file has a name,
so none can be left behind, however a rank ends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xmem.errors import DistributedError

RECORD_BYTES = 512
ABSENT, HERE, LEFT, FAILED = 0, 1, 2, 3
BEAT_SECONDS = 0.5
_SILENT_SECONDS = 5.0
_WORDS = RECORD_BYTES // 8
_PROCESS, _TICKS, _STATE, _SEEN, _ENTERED, _FINISHED = range(6)
_DOING, _ERROR = slice(48, 256), slice(256, 512)

Life = Literal["running", "stopped", "dead"]


@dataclass(frozen=True)
class Entry:
    """What the roll says of a rank.

    Attributes:
        rank: its number.
        process: its process id; 0 for a rank of another host.
        state: ABSENT, HERE, LEFT or FAILED.
        silent_seconds: since its last sign of life.
        entered: communications that it has begun.
        finished: communications that it has ended.
        doing: the last communication that it began.
        error: what it failed with.
        life: what the system says of its process; None for a rank of another host.
    """

    rank: int
    process: int
    state: int
    silent_seconds: float
    entered: int
    finished: int
    doing: str
    error: str
    life: Life | None

    @property
    def is_gone(self) -> bool:
        """Whether it died or failed; one that left in order is not gone."""
        return self.state == FAILED or (self.state == HERE and self.life == "dead")

    def __str__(self) -> str:
        name = f"rank {self.rank} (process {self.process})"
        if self.state == FAILED:
            return f"{name} failed: {self.error}"
        if self.state == LEFT:
            return f"{name} has left"
        if self.state == ABSENT:
            return f"rank {self.rank} (on another host: not known here)"
        if self.life == "dead":
            return f"{name} died without a word, {self._place()}"
        if self.life == "stopped":
            return f"{name} is stopped (by SIGSTOP or a debugger), {self._place()}"
        silent = self.silent_seconds >= _SILENT_SECONDS
        sign = f", and has given no sign of life for {self.silent_seconds:.0f} s" if silent else ""
        return f"{name} is alive, {self._place()}{sign}"

    def _place(self) -> str:
        if not self.entered:
            return "before its first communication"
        where = "in" if self.entered > self.finished else "after"
        return f"{where} communication {self.entered}: {self.doing}"


class Roll:
    """The table, mapped into this process.

    It stays mapped as long as this object lives: native code that reads it keeps a reference.
    """

    address: int
    """Where the table lies in memory, for native code."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._memory = memory
        self._words = memoryview(memory).cast("q")  # whole words: one store each
        self._own = rank * _WORDS
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    @classmethod
    def alone(cls) -> Roll:
        """Return the roll of a single process."""
        return cls(mmap.mmap(-1, RECORD_BYTES), 0, 1)

    def sign_on(self) -> None:
        """Write this process's record."""
        self._words[self._own + _PROCESS] = os.getpid()
        self._words[self._own + _TICKS] = _start_ticks(os.getpid())
        self.beat()
        self._words[self._own + _STATE] = HERE

    def beat(self) -> None:
        """Give a sign of life."""
        self._words[self._own + _SEEN] = time.monotonic_ns()

    def entered(self, kind: str) -> None:
        """Say that this rank begins a communication."""
        self._write(_DOING, kind)
        self.beat()
        self._words[self._own + _ENTERED] += 1

    def finished(self) -> None:
        """Say that it has ended."""
        self._words[self._own + _FINISHED] += 1

    def leave(self) -> None:
        """Say that this rank goes in order; one that failed stays so."""
        if self._words[self._own + _STATE] == HERE:
            self._words[self._own + _STATE] = LEFT

    def fail(self, error: str) -> None:
        """Say what this rank ends with; the first reason counts."""
        if self._words[self._own + _STATE] == HERE:
            self._write(_ERROR, error)
            self._words[self._own + _STATE] = FAILED

    def entry(self, rank: int) -> Entry:
        """Return what is known of a rank."""
        word = rank * _WORDS
        process, ticks, state, seen, entered, finished = self._words[word : word + 6].tolist()
        return Entry(
            rank=rank,
            process=process,
            state=state,
            silent_seconds=max(0.0, (time.monotonic_ns() - seen) / 1e9) if seen else 0.0,
            entered=entered,
            finished=finished,
            doing=self._read(rank, _DOING),
            error=self._read(rank, _ERROR),
            life=life_of(process, ticks) if process else None,
        )

    def others(self) -> list[Entry]:
        """Return what is known of the other ranks, in order."""
        return [self.entry(rank) for rank in range(self.size) if rank != self.rank]

    def gone(self) -> list[Entry]:
        """Return the other ranks that died or failed."""
        return [entry for entry in self.others() if entry.is_gone]

    def left(self) -> list[Entry]:
        """Return the other ranks that left in order."""
        return [entry for entry in self.others() if entry.state == LEFT]

    def late(self) -> list[Entry]:
        """Return the other ranks that are stopped, silent, or behind this one."""
        own = self.entry(self.rank).entered
        return [
            entry
            for entry in self.others()
            if entry.state == HERE
            and entry.life != "dead"
            and (
                entry.life == "stopped"
                or entry.entered < own
                or entry.silent_seconds >= _SILENT_SECONDS
            )
        ]

    def _write(self, field: slice, text: str) -> None:
        room = field.stop - field.start
        raw = text.encode("utf-8", "replace")[: room - 1]
        raw = raw.decode("utf-8", "ignore").encode("utf-8")  # no half character at the end
        begin = self.rank * RECORD_BYTES + field.start
        self._memory[begin : begin + len(raw) + 1] = raw + b"\0"

    def _read(self, rank: int, field: slice) -> str:
        begin = rank * RECORD_BYTES
        raw = self._memory[begin + field.start : begin + field.stop]
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def share(rank: int, size: int, exchange: Callable[[bytes], list[bytes]]) -> Roll:
    """Make the table that the ranks of this host share; all ranks call it.

    Args:
        rank: this process's number.
        size: how many ranks there are.
        exchange: gives every rank a few bytes of every rank's.

    Raises:
        DistributedError: a rank cannot map it; raised on every rank.
    """
    offered, path = _offer(size * RECORD_BYTES)
    try:
        offers = [json.loads(raw) for raw in exchange(json.dumps([_host(), path]).encode())]
        leader = next(index for index, (host, _) in enumerate(offers) if host == _host())
        error = ""
        memory = None
        try:
            memory = _map(offers[leader][1], size * RECORD_BYTES)
        except OSError as raised:
            error = f"rank {rank} cannot map the table that rank {leader} shares: {raised}"
        errors = [text for text in map(bytes.decode, exchange(error.encode())) if text]
    finally:
        os.close(offered)
        if not path.startswith("/proc/"):
            Path(path).unlink(missing_ok=True)
    if errors or memory is None:
        raise DistributedError(
            f"ranks of one host could not share the table by which they watch each other:"
            f" {'; '.join(errors)}. All ranks of a host must run as the same user, in the same"
            " container"
        )
    roll = Roll(memory, rank, size)
    roll.sign_on()
    exchange(b"signed on")
    return roll


def life_of(process: int, ticks: int) -> Life:
    """Return what the system says of a process that started at a tick since boot."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        pass  # it is there, and another user's: /proc says whether it is ours
    found = _stat(process)
    if found is None:
        return "dead" if Path("/proc/self/stat").exists() else "running"
    state, started = found
    if state in "ZXx" or (ticks and started != ticks):
        return "dead"
    return "stopped" if state in "Tt" else "running"


def _start_ticks(process: int) -> int:
    found = _stat(process)
    return found[1] if found is not None else 0


def _stat(process: int) -> tuple[str, int] | None:
    """Return a process's state and its start in ticks, or None without /proc or the process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces and brackets
    return fields[0], int(fields[19])


def _host() -> str:
    """Return what is equal for processes that see each other's numbers and memory."""
    try:
        spaces = [str(Path("/proc/self/ns/pid").readlink())]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        spaces, boot = [], ""
    return " ".join([socket.gethostname(), boot, *spaces])


def _offer(size_bytes: int) -> tuple[int, str]:
    """Return an open file of zeros, and the path by which others can open it."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").exists():
        number = os.memfd_create("xmem-roll")
        path = f"/proc/{os.getpid()}/fd/{number}"
    else:
        number, path = tempfile.mkstemp(prefix="xmem-roll-")
    os.ftruncate(number, size_bytes)
    return number, path


def _map(path: str, size_bytes: int) -> mmap.mmap:
    number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(number, size_bytes)
    finally:
        os.close(number)
