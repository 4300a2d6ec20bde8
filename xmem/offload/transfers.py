"""Bytes on their way to a depot and back, in a thread beside the computation.

One thread does all of a depot's transfers in their order, so what is read has been written. What
is on its way out is bounded in bytes: who sends more waits. What is read ahead is bounded, too, and
taken in the reverse of the order it was sent in, as backward asks for it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from xmem.errors import OffloadError
from xmem.native.depot import CLOSED
from xmem.offload.depot import Depot

AHEAD_SHARE = 16
"""Of what is stored, one part in so many is read ahead at most: small models gain nothing else."""


class Sent:
    """Memory that is on its way to a depot, or there.

    Attributes:
        number: what it is stored under.
        nbytes: its size.
        source: what owns the memory, until it is stored; for ever where that fails.
        stored: it is in the depot.
        abandoned: nobody will read it.
    """

    __slots__ = ("abandoned", "nbytes", "number", "source", "stored")

    def __init__(self, number: int, nbytes: int, source: Any) -> None:
        self.number = number
        self.nbytes = nbytes
        self.source: Any = source
        self.stored = False
        self.abandoned = False

    def abandon(self, depot: Depot) -> None:
        """Let go of it; may be called wherever garbage is collected, so it takes no lock.

        What is being written is dropped when it has been: its place in the file must not be given
        to something else before.
        """
        self.abandoned = True
        self.source = None
        if self.stored:
            depot.drop(self.number)

    def arrived(self, depot: Depot) -> None:
        """Note that it is stored, and let the memory go."""
        self.stored = True
        self.source = None
        if self.abandoned:
            depot.drop(self.number)


class Transfers:
    """The thread of a depot.

    Args:
        depot: where bytes go.

    Attributes:
        depot: see above.
    """

    def __init__(self, depot: Depot) -> None:
        self.depot = depot
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="xmem-offload")
        self._in_flight_bytes = 0
        self._changed = threading.Condition()
        self._failure: OffloadError | None = None

    def send(
        self,
        source: Any,
        address: int,
        nbytes: int,
        *,
        limit: int,
        ready: Callable[[], object] | None = None,
    ) -> Sent:
        """Store memory later.

        Args:
            source: owns the memory; is let go of when it is stored.
            address: of the memory.
            nbytes: of it.
            limit: how much may be on its way together with this, in bytes.
            ready: waits in the thread until the memory may be read.

        Raises:
            OffloadError: something that was sent before could not be stored; raised once. Or this
                is a forked process, where the thread is not.
        """
        self.raise_failure()
        self._refuse_fork()
        sent = Sent(self.depot.new_number(), nbytes, source)
        with self._changed:
            while self._in_flight_bytes and self._in_flight_bytes + nbytes > limit:
                self._changed.wait()
            self._in_flight_bytes += nbytes
        self._begin(self._store, sent, address, ready)
        return sent

    def read(self, fetch: Callable[[], Any]) -> Future[Any]:
        """Call a function that reads, behind all that has been sent.

        Raises:
            OffloadError: this is a forked process, where the thread is not.
        """
        self._refuse_fork()
        return self._begin(fetch)

    @property
    def has_failed(self) -> bool:
        """Whether the depot stores nothing any more."""
        return self._failure is not None or self.depot.failure is not None

    def raise_failure(self) -> None:
        """Raise, once, what the thread could not store.

        Raises:
            OffloadError: it could not.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _begin(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in the thread; here and now where the interpreter ends.

        Other threads may train on when the main one has ended, and functions at exit may, too.
        """
        try:
            return self._thread.submit(call, *arguments)
        except RuntimeError:
            done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments))
        except OffloadError as error:
            done.set_exception(error)
        return done

    def _refuse_fork(self) -> None:
        if self._process != os.getpid():
            raise self.depot.error(CLOSED, 0)

    def wait(self) -> None:
        """Return when nothing is on its way out."""
        with self._changed:
            while self._in_flight_bytes and self._process == os.getpid():
                self._changed.wait()

    def _store(self, sent: Sent, address: int, ready: Callable[[], object] | None) -> None:
        source = sent.source  # held while it is read, also if it is abandoned meanwhile
        try:
            if source is not None and not sent.abandoned and self.depot.failure is None:
                if ready is not None:
                    ready()
                self.depot.put(sent.number, address, sent.nbytes)
                sent.arrived(self.depot)
        except OffloadError as error:
            self._failure = error
        finally:
            del source
            with self._changed:
                self._in_flight_bytes -= sent.nbytes
                self._changed.notify_all()


_known: weakref.WeakValueDictionary[int, Transfers] = weakref.WeakValueDictionary()


def transfers_of(depot: Depot) -> Transfers:
    """Return the thread of a depot; it ends with the last that uses it."""
    found = _known.get(depot.address)
    if found is None or found.depot is not depot:
        found = _known[depot.address] = Transfers(depot)
    return found


class Readable(Protocol):
    """What can be read ahead."""

    nbytes: int

    def begin_reading(self) -> bool:
        """Begin to read, where that is to be done and not begun; says whether it was."""


class Line:
    """What was sent, in its order; read ahead in the reverse of it.

    Never more than the largest piece takes, so that it does not grow with the number of pieces.

    Args:
        ahead_bytes: how much may have been read that nobody has asked for, at most.
    """

    def __init__(self, ahead_bytes: int) -> None:
        self._limit = ahead_bytes
        self._items: list[weakref.ref[Any]] = []
        self._sizes: list[int] = []
        self._sent_bytes = 0
        self._largest_bytes = 0
        self._ahead_bytes = 0

    def add(self, item: Readable) -> int:
        """Note the next one; returns its place."""
        while self._items and self._items[-1]() is None:
            self._items.pop()
            self._sent_bytes -= self._sizes.pop()
        self._items.append(weakref.ref(item))
        self._sizes.append(item.nbytes)
        self._sent_bytes += item.nbytes
        self._largest_bytes = max(self._largest_bytes, item.nbytes)
        return len(self._items) - 1

    def taken(self, nbytes: int) -> None:
        """Note that something that was read ahead has been asked for, or is gone."""
        self._ahead_bytes -= nbytes

    def read_before(self, place: int) -> None:
        """Begin to read what was sent before the one at a place, as far as there is room."""
        limit = min(self._limit, self._largest_bytes, self._sent_bytes // AHEAD_SHARE)
        for at in range(min(place, len(self._items)) - 1, -1, -1):
            if self._ahead_bytes + self._sizes[at] > limit:
                return
            item = self._items[at]()
            if item is not None and item.begin_reading():
                self._ahead_bytes += self._sizes[at]
