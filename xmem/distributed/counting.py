"""What was communicated: calls, bytes that this rank sent, seconds that it waited."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from xmem.errors import UsageError

KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "send",
)


@dataclass(frozen=True)
class Traffic:
    """A count by kind of call, since `init` or the last reset.

    Attributes:
        calls: calls by kind ("all_reduce", "broadcast", ...).
        sent_bytes: bytes that this rank has to send for them, by kind, by the formula of
            `sent_by_ring`; what the engine adds (headers, retries) is not in it.
        seconds: time spent in them or waiting for them, where it is known.
        buffer_bytes: the most that buckets and packed copies took at once, in bytes.
    """

    calls: dict[str, int]
    sent_bytes: dict[str, int]
    seconds: float
    buffer_bytes: int

    @property
    def total_sent_bytes(self) -> int:
        """Return the bytes of all kinds."""
        return sum(self.sent_bytes.values())


class _Count:
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.seconds = 0.0
        self.held_bytes = 0
        self.buffer_bytes = 0

    def reset(self) -> None:
        self.calls.clear()
        self.sent_bytes.clear()
        self.seconds = 0.0
        self.buffer_bytes = self.held_bytes


# A lock, since backward reports from threads of its own.
_lock = threading.Lock()
_count = _Count()
_clocks: set[Callable[[], float]] = set()


def sent_by_ring(kind: str, size_bytes: int, world_size: int) -> int:
    """Return what one rank sends for a call, in bytes, by the usual ring or pairwise algorithm.

    With n ranks and S bytes, rounded up:

    | kind | sent | |
    |---|---|---|
    | all_reduce | 2 (n - 1) S / n | a reduce-scatter and an all-gather around a ring |
    | reduce_scatter, all_gather, all_to_all | (n - 1) S / n | each part but the own one |
    | broadcast, reduce | (n - 1) S / n | the mean over ranks: n - 1 of them send S |
    | send | S | one rank to another |

    One rank alone sends nothing.

    Args:
        kind: "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all",
            "send".
        size_bytes: of the whole tensor (for all_gather: of the result).
        world_size: how many ranks.

    Raises:
        UsageError: there is no such kind.
    """
    if kind not in KINDS:
        raise UsageError(f"{kind!r} is no kind of communication; there are {', '.join(KINDS)}")
    if world_size < 2:
        return 0
    if kind == "send":
        return size_bytes
    passes = 2 if kind == "all_reduce" else 1
    return -(-passes * (world_size - 1) * size_bytes // world_size)


def note(kind: str, size_bytes: int, world_size: int, *, seconds: float = 0.0) -> None:
    """Count one call; backends call it for what they communicate by themselves."""
    sent = sent_by_ring(kind, size_bytes, world_size)
    with _lock:
        _count.calls[kind] += 1
        _count.sent_bytes[kind] += sent
        _count.seconds += seconds


def waited(seconds: float) -> None:
    """Add time that a call that is counted already was waited for."""
    with _lock:
        _count.seconds += seconds


def ask(clock: Callable[[], float]) -> None:
    """Let `traffic` ask a backend, whose native code waits by itself, for the seconds of that.

    Args:
        clock: returns those since it was last asked, of calls that nobody else has timed.
    """
    _clocks.add(clock)


def hold(size_bytes: int) -> None:
    """Count memory of a bucket or packed copy that is being made, in bytes; see `release`."""
    with _lock:
        _count.held_bytes += size_bytes
        _count.buffer_bytes = max(_count.buffer_bytes, _count.held_bytes)


def release(size_bytes: int) -> None:
    """Count such memory as freed."""
    with _lock:
        _count.held_bytes -= size_bytes


def traffic(*, reset: bool = False) -> Traffic:
    """Return what was communicated since `init` or the last reset.

    Args:
        reset: count from zero again.
    """
    spent = sum(clock() for clock in _clocks)
    with _lock:
        _count.seconds += spent
        found = Traffic(
            dict(_count.calls), dict(_count.sent_bytes), _count.seconds, _count.buffer_bytes
        )
        if reset:
            _count.reset()
    return found
