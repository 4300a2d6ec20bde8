"""Run what has to be sent, one piece after another or all at once, and count it.

A job is a generator: it yields what is to be communicated, is sent a list with the result, which it
takes out, so that nobody else keeps it alive, and returns what it was for. Run one after another, a
job's buffers are gone before the next one's are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.distributed.counting import hold, note, release, waited
from xmem.distributed.failing import communicating
from xmem.distributed.signatures import Asked, agree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xmem.distributing import Pending


@dataclass(frozen=True)
class Call:
    """One call of the engine.

    Attributes:
        kind: see `xmem.distributed.counting`.
        size_bytes: of the whole tensor.
        world_size: how many ranks.
        start: begins it.
    """

    kind: str
    size_bytes: int
    world_size: int
    start: Callable[[], Pending]


Job = Generator[Call, list[Any], Any]


@contextmanager
def buffer(size_bytes: int) -> Iterator[None]:
    """Count memory that a job takes, in bytes, until the block ends."""
    hold(size_bytes)
    try:
        yield
    finally:
        release(size_bytes)


class Started:
    """A job whose first call is under way."""

    def __init__(self, job: Job, label: str) -> None:
        self._job = job
        self._label = label
        self._pending: Pending | None = None
        self._result: Any = None
        self._advance(None)

    def finish(self) -> Any:
        """Wait, make all further calls, and return the job's result."""
        while self._pending is not None:
            pending, self._pending = self._pending, None
            begun = time.perf_counter()
            with communicating(self._label):
                box = [pending.wait()]
            waited(time.perf_counter() - begun)
            del pending
            self._advance(box)
        return self._result

    def _advance(self, box: list[Any] | None) -> None:
        """Go on to the next call, and begin it."""
        try:
            call = next(self._job) if box is None else self._job.send(box)
        except StopIteration as stop:
            self._result = stop.value
            return
        begun = time.perf_counter()
        with communicating(self._label):
            self._pending = call.start()
        note(call.kind, call.size_bytes, call.world_size, seconds=time.perf_counter() - begun)


class Handle:
    """Calls that have begun; made by `async_=True`.

    A call with `compress` sends once more when it is waited for: all ranks wait in one order.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        finish: Callable[[list[Any]], Any],
        label: str,
        *,
        sends_again: bool = False,
    ) -> None:
        self._started: list[Started] | None = [Started(job, label) for job in jobs]
        self._finish = finish
        self._sends_again = sends_again
        self._label = label
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for the calls and return the result; a second time it returns the same."""
        if self._started is not None:
            if self._sends_again:
                what = f"wait for {self._label}"
                agree(what, lambda: Asked(what))
            results = []
            while self._started:
                results.append(self._started.pop(0).finish())
            self._result = self._finish(results)
            self._started = None
        return self._result


def run(jobs: Iterable[Job], finish: Callable[[list[Any]], Any], label: str) -> Any:
    """Run jobs one after another."""
    return finish([Started(job, label).finish() for job in jobs])
