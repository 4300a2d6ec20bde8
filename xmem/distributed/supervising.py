"""Run a launcher and its ranks to the end: pass on output and signals, end all when one fails."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import IO, Any

from xmem.distributed.keepers import Keeper
from xmem.distributed.keeping import die_with_parent
from xmem.distributed.output_lines import Lines, OutputError, Streams
from xmem.errors import DistributedError

START_SECONDS = 120.0
"""How long the launcher may take to start all ranks."""

_KILL_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
_FOLLOW_SECONDS = 1.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: the exit status: 0, or the first failing rank's; 128 + signal where one ended it.
        rank: the first failing rank, or None.
        signal: the signal that this process was sent, or None.
    """

    status: int
    rank: int | None = None
    signal: int | None = None


class Supervisor:
    """One job under way.

    Args:
        address: where keepers report, "@name" for an abstract socket.
        secret: what they show that they are this job's.
        ranks: how many there are.
        grace_seconds: how long ranks may take to end by themselves when one has failed, or after a
            signal.
    """

    def __init__(self, address: str, secret: str, ranks: int, grace_seconds: float) -> None:
        self._secret = secret
        self._count = ranks
        self._grace_seconds = grace_seconds
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + address[1:] if address.startswith("@") else address)
        self._listener.listen(ranks + 4)
        self._keepers: list[Keeper] = []
        self._streams = Streams(self._selector)
        self._said: deque[bytes] = deque(maxlen=200)
        self._outcome: Outcome | None = None
        self._deadlines: list[tuple[float, int]] = []
        self._handlers: dict[int, Any] = {}
        self._signals = 0
        self._failed_at = 0.0
        self._has_sent = False
        self._by_signal = False

    def __enter__(self) -> Supervisor:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for number in _PASSED_ON:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # as nohup and a shell's background jobs want it
            with contextlib.suppress(ValueError):  # not in the main thread: no signals come here
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for keeper in self._keepers:
            keeper.connection.close()
        self._streams.close()
        self._listener.close()
        self._selector.close()

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: IO[bytes],
        errors: IO[bytes],
    ) -> Outcome:
        """Run the launcher until all ranks have ended.

        Raises:
            DistributedError: it ended, or took too long, before all ranks had started.
        """
        self._targets = (output, errors)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # a terminal's Ctrl-C comes here only, and is passed on
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        assert process.stdout is not None
        try:
            self._streams.add(process.stdout.fileno(), self._said.append)
            self._serve(process)
        finally:
            self._close(process)
            process.stdout.close()
        return self._outcome or Outcome(0)

    # Events.

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        starts_by = time.monotonic() + START_SECONDS
        while not self._is_over():
            try:
                self._step(0.1)
            except BrokenPipeError:  # whoever reads our output has gone
                self._outcome = Outcome(128 + signal.SIGPIPE, signal=signal.SIGPIPE)
                return
            except OutputError as error:
                raise DistributedError(f"{error}. All ranks are ended") from error
            if self._outcome is None and len(self._started()) < self._count:
                late = time.monotonic() > starts_by
                if late or process.poll() is not None:
                    self._raise_not_started(process, late)

    def _step(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()
        now = time.monotonic()
        for deadline, number in list(self._deadlines):
            if now >= deadline:
                self._deadlines.remove((deadline, number))
                self._send(number)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        keeper = Keeper(connection, self._secret)
        self._keepers.append(keeper)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(keeper))

    def _hear(self, keeper: Keeper) -> None:
        messages = keeper.read()
        if messages is None:
            self._leave(keeper)
            if keeper.rank is not None and keeper.status is None:  # it was killed itself
                keeper.end_rank()
                self._ended(keeper, -signal.SIGKILL)
            return
        for message in messages:
            if "rank" in message and self._outcome is not None:
                self._leave(keeper)  # too late: the job is ending
                return
            if "rank" in message:
                self._welcome(keeper, message["rank"])
            elif "status" in message:
                self._ended(keeper, message["status"])

    def _leave(self, keeper: Keeper) -> None:
        """Hear no more of a keeper; one that was never welcomed is forgotten."""
        self._selector.unregister(keeper.connection)
        if keeper.rank is None:
            keeper.connection.close()
            self._keepers.remove(keeper)

    def _welcome(self, keeper: Keeper, rank: int) -> None:
        prefix = f"[{rank}] ".encode()
        ends = []
        for target in self._targets:
            reading, writing = os.pipe()
            self._streams.add_lines(reading, Lines(prefix, target))
            ends.append(writing)
        keeper.welcome(rank, ends)
        for end in ends:
            os.close(end)

    def _ended(self, keeper: Keeper, status: int) -> None:
        keeper.status = status if status >= 0 else 128 - status
        if not keeper.status:
            return
        outcome = Outcome(keeper.status, rank=keeper.rank)
        if status < 0 and self._may_follow():
            self._outcome = outcome
        self._by_signal = self._by_signal or status < 0
        self._fail(outcome, self._grace_seconds)

    def _may_follow(self) -> bool:
        """Say whether what has failed may have failed for a rank that a signal ended.

        A rank that sees another die may be heard of first. The other way round it cannot be: what
        a signal of others ended did not end for seeing anything.
        """
        recent = time.monotonic() - self._failed_at < _FOLLOW_SECONDS
        return recent and not (self._by_signal or self._signals or self._has_sent)

    def _fail(self, outcome: Outcome, grace_seconds: float) -> None:
        """Give the ranks time to end by themselves, then end them; the first reason counts."""
        if self._failed_at == 0.0:
            self._failed_at = time.monotonic()
            self._outcome = self._outcome or outcome
            ends = self._failed_at + grace_seconds
            self._deadlines += [(ends, signal.SIGTERM), (ends + _KILL_SECONDS, signal.SIGKILL)]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._send(number if self._signals == 1 else signal.SIGKILL)  # a second Ctrl-C
        if self._outcome is None:
            self._outcome = Outcome(128 + number, signal=number)
        self._deadlines.append((time.monotonic() + self._grace_seconds, signal.SIGKILL))

    def _send(self, number: int) -> None:
        self._has_sent = True
        for keeper in self._alive():
            keeper.send(number)

    # State.

    def _started(self) -> list[Keeper]:
        return [keeper for keeper in self._keepers if keeper.rank is not None]

    def _alive(self) -> list[Keeper]:
        return [keeper for keeper in self._started() if keeper.status is None]

    def _is_over(self) -> bool:
        """Say whether all have ended; after a failure, those that came."""
        started = self._started()
        complete = len(started) == self._count or self._outcome is not None
        return complete and not self._alive()

    def _raise_not_started(self, process: subprocess.Popen[bytes], late: bool) -> None:
        self._step(0.1)
        said = b"".join(self._said).decode("utf-8", "replace").strip()
        how = f"within {START_SECONDS:g} s" if late else f"it ended with {process.poll()}"
        raise DistributedError(
            f"the launcher has not started {self._count} ranks: {how}. It said:\n{said or '-'}"
        )

    # The end.

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        """Let the keepers go, pass on the last lines, and see the launcher out."""
        self._send(signal.SIGKILL)
        for keeper in self._started():
            keeper.let_go()
        if len(self._started()) < self._count:
            process.terminate()  # it would go on starting them
        ends = time.monotonic() + _CLOSE_SECONDS
        while process.poll() is None and time.monotonic() < ends:
            with contextlib.suppress(BrokenPipeError, OutputError):
                self._step(0.05)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(BrokenPipeError, OutputError):
            while self._selector.get_map() and self._selector.select(0):
                self._step(0)
