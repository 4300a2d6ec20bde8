"""When a rank dies, fails or stalls: every other rank ends with an error that names it.

Three things see to it. A communication that fails is explained from the roll (`communicating`,
`explain`). An uncaught error is written on the roll before this process goes, through `os._exit`:
an orderly exit would wait for ranks that wait for this one. And a thread looks at the roll, for
ranks that compute, or wait where Python is not asked (both in `xmem.distributed.watching`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from xmem.distributed.roll import HERE, Entry, Roll
from xmem.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributedError,
    RankLostError,
)

# A killed process drops its connections before the system calls it dead: its peers may look early.
_SETTLE_SECONDS = 2.0
_TIMED_OUT = re.compile(r"time(d)?[ -]?out|deadline", re.IGNORECASE)
_MISMATCH = re.compile(r"mismatch|differ", re.IGNORECASE)
BACKEND_SAYS = "xmem.distributed: "
"""What a backend's own native code begins its message with."""
_SECONDARY = ("RankLostError", "CollectiveTimeoutError")


@dataclass
class Watch:
    """What is watched, from `init` to `destroy`.

    Attributes:
        roll: the table.
        failures: the framework's types of error for a communication that failed.
        timeout_seconds: the longest wait for other ranks.
        told: the error that the program has been given, if any.
        depth: communications that lie in one another.
    """

    roll: Roll
    failures: tuple[type[BaseException], ...]
    timeout_seconds: float
    told: DistributedError | None = None
    depth: int = 0


_watch: Watch | None = None


def current() -> Watch | None:
    """Return what is watched, or None before `init` and after `destroy`."""
    return _watch


def begin(watch: Watch) -> None:
    """Explain failures from now on."""
    global _watch
    _watch = watch


def end() -> None:
    """Explain nothing from now on."""
    global _watch
    _watch = None


@contextmanager
def communicating(kind: str) -> Iterator[None]:
    """Note a communication on the roll, and explain its failure.

    Around each call of the backend that needs other ranks, and around each wait for one. Blocks
    inside one another count once, as the outermost.

    Args:
        kind: what is done, for a person: "all_reduce of 3 tensors (1.5 MiB)".

    Raises:
        RankLostError: instead of the framework's error, where ranks are gone.
        CollectiveTimeoutError: the same, where they are late.
        DistributedError: the same, where neither is known.
    """
    watch = _watch
    if watch is None:
        yield
        return
    if watch.depth == 0:
        watch.roll.entered(kind)
    watch.depth += 1
    try:
        yield
    except (RankLostError, CollectiveTimeoutError) as error:
        watch.told = error
        raise
    except watch.failures as error:
        raise explain(error, kind) from error
    finally:
        watch.depth -= 1
        if watch.depth == 0:
            watch.roll.finished()


def explain(error: BaseException, doing: str) -> DistributedError:
    """Return the error that says which ranks a failed communication is due to.

    Waits up to 2 s for the system to call a rank dead whose connections have gone.

    Args:
        error: what the framework raised.
        doing: what this rank did, e.g. "all_reduce".
    """
    if isinstance(error, DistributedError):
        return error
    watch = _watch
    if watch is None:
        return DistributedError(f"{doing} failed: {error}")
    told = _explained(watch, error, doing)
    watch.told = told
    return told


def _explained(watch: Watch, error: BaseException, doing: str) -> DistributedError:
    text = _first_line(error)
    timed_out = bool(_TIMED_OUT.search(str(error)))
    gone = wait_for_gone(watch.roll, 0.0 if timed_out else _SETTLE_SECONDS)
    if gone and not (all(map(_gave_up, gone)) and watch.roll.late()):
        return lost_error(gone, doing)
    left = watch.roll.left()
    if gone or (timed_out and not left):
        return _late_error(watch, doing)
    if left:
        return RankLostError(
            f"{doing} cannot end: {_listed(left)}, while this rank needs them. All ranks must"
            " make the same calls",
            ranks=[entry.rank for entry in left],
        )
    if _MISMATCH.search(text):
        return CollectiveMismatchError(f"{doing} failed: {text}")
    return DistributedError(f"{doing} failed: {text}")


def wait_for_gone(roll: Roll, seconds: float) -> list[Entry]:
    """Return the ranks that are gone, as soon as there is one or the time is over."""
    ends = time.monotonic() + seconds
    while not (gone := roll.gone()) and time.monotonic() < ends:
        time.sleep(0.01)
    return gone


def lost_error(gone: Sequence[Entry], doing: str) -> RankLostError:
    """Return the error that names ranks that are gone: the first causes, where they are known."""
    causes = [entry for entry in gone if not entry.error.startswith(_SECONDARY)] or list(gone)
    return RankLostError(
        f"{_listed(causes)}; this rank cannot go on, in {doing}. Look at the output of"
        f" {_ranks(causes)} for the reason, and start all ranks again",
        ranks=[entry.rank for entry in causes],
    )


def _gave_up(entry: Entry) -> bool:
    """Say whether a rank failed since it waited in vain, for the same ranks perhaps."""
    return entry.error.startswith(CollectiveTimeoutError.__name__)


def _late_error(watch: Watch, doing: str) -> CollectiveTimeoutError:
    late = watch.roll.late() or _silent(watch.roll, doing)
    waited = f"{doing} waited {watch.timeout_seconds:g} s, the timeout of xmem.distributed.init"
    if not late:
        others = [entry for entry in watch.roll.others() if entry.state == HERE]
        return CollectiveTimeoutError(
            f"{waited}; no rank is known to be late: {_listed(others) or 'none is on this host'}."
            " Raise timeout= if the ranks need longer"
        )
    return CollectiveTimeoutError(
        f"{waited}, for {_ranks(late)}: {_listed(late)}. Raise timeout= if they need longer, or"
        " look at what they do instead",
        ranks=[entry.rank for entry in late],
    )


def _silent(roll: Roll, doing: str) -> list[Entry]:
    """Return the ranks that do not run into the timeout too: they have not been waiting.

    The framework's own communication (in DistributedDataParallel, say) is not counted on the roll.
    """
    roll.entered(f"{doing}, in vain")
    time.sleep(_SETTLE_SECONDS)
    return roll.late()


def _ranks(entries: Sequence[Entry]) -> str:
    numbers = ", ".join(str(entry.rank) for entry in entries)
    return f"rank {numbers}" if len(entries) == 1 else f"ranks {numbers}"


def _listed(entries: Sequence[Entry]) -> str:
    return "; ".join(map(str, entries))


def _first_line(error: BaseException) -> str:
    """Return the line that matters: a framework's log may stand around what a backend said."""
    text = str(error).strip()
    _, ours, said = text.rpartition(BACKEND_SAYS)
    lines = (said if ours else text).strip().splitlines() or [""]
    return lines[0] if ours else f"{type(error).__name__}: {lines[0]}"
