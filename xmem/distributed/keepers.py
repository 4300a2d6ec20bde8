"""The keepers of ranks (`keeping`), as `xmem launch` sees them: what they say and are told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_LONGEST_BYTES = 4096


@dataclass
class Keeper:
    """Whoever has connected: a keeper once it has said which rank's.

    Attributes:
        connection: to it.
        secret: what it has to know.
        rank: its rank, once it has been welcomed.
        process: the rank's own process, once it runs.
        status: the rank's exit status, once it has ended.
    """

    connection: socket.socket
    secret: str
    rank: int | None = None
    process: int | None = None
    status: int | None = None
    _rest: bytes = field(default=b"", repr=False)

    def read(self) -> list[dict[str, Any]] | None:
        """Return what it has said; None: it has gone, or is none of this job's."""
        try:
            data = self.connection.recv(_LONGEST_BYTES)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or not (self.rank is not None or self._may_be_ours(lines)):
            return None
        messages = [json.loads(line) for line in lines]
        for message in messages:
            self.process = message.get("process", self.process)
        return messages

    def welcome(self, rank: int, pipes: Sequence[int]) -> None:
        """Let it start its rank, whose output goes into pipes."""
        self.rank = rank
        with contextlib.suppress(OSError):  # it has gone, which is heard next
            socket.send_fds(self.connection, [b"\0"], pipes)

    def send(self, number: int) -> None:
        """Let it send the rank a signal."""
        self._say(b"%d" % number)

    def let_go(self) -> None:
        """Let it end."""
        self._say(b"go")

    def end_rank(self) -> None:
        """End the rank and what it has started, where the keeper cannot any more."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process, signal.SIGKILL)

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(word + b"\n")

    def _may_be_ours(self, lines: Sequence[bytes]) -> bool:
        """Look at the first line, if it has come; any process of this host can connect."""
        if not lines:
            return len(self._rest) < _LONGEST_BYTES
        try:
            hello = json.loads(lines[0])
            return bool(hello["secret"] == self.secret and isinstance(hello["rank"], int))
        except (ValueError, TypeError, LookupError):
            return False
