"""Who is who among the processes, on Jittor.

Jittor starts MPI while it is imported inside of mpirun, and ends it when the process exits; what is
here lives in between, in communicators of its own. On CUDA tensors go through the host's memory,
brought there by Jittor; NCCL is not used (Jittor 1.3.11 has its set-up commented out). That path
has not been run on a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import jittor as jt

from xmem.distributed.counting import ask, waited
from xmem.distributing import World
from xmem.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributedError,
    RankLostError,
    UsageError,
    unknown,
)
from xmem_jittor import messages, mpi, native

if TYPE_CHECKING:
    from xmem.distributed.roll import Roll

FAILURES: tuple[type[BaseException], ...] = (RuntimeError,)

ENGINES = ("auto", "mpi")
_LARGEST_PAYLOAD = 1 << 16
_MESSAGE_BYTES = 1 << 14
Reason = Literal["timeout", "lost", "mismatch", "engine", "aborted", "interrupted"]
_REASONS: tuple[Reason, ...] = get_args(Reason)
_ERRORS: Mapping[str, type[DistributedError]] = {
    "timeout": CollectiveTimeoutError,
    "lost": RankLostError,
    "mismatch": CollectiveMismatchError,
}


@dataclass(frozen=True)
class Failure:
    """What ended communication on this rank.

    Attributes:
        reason: "timeout" (ranks did not come), "lost" (they are gone), "mismatch" (the ranks called
            different things), "engine" (MPI said so), "aborted" (`abort` was called),
            "interrupted" (a signal's handler raised something).
        ranks: the ranks that it is about.
        message: what happened.
    """

    reason: Reason
    ranks: tuple[int, ...]
    message: str

    def error(self) -> BaseException:
        """Return the error to raise."""
        if self.reason == "interrupted":
            with suppress(ValueError):  # it has been raised before
                raised: BaseException = native.mpi().xmem_mpi_interruption()
                return raised
        return _ERRORS.get(self.reason, DistributedError)(self.message, ranks=self.ranks)


@dataclass
class _State:
    world: World
    rounded: int = 0
    roll: Roll | None = None  # which native code reads


_state: _State | None = None
_worlds = 0


def gaps(device: str) -> Mapping[str, str]:
    """Return what is missing on a device, with the reason."""
    if device != "cuda":
        return {}
    return {
        "nccl": "Jittor 1.3.11 has the set-up of its NCCL module commented out; tensors go through"
        " the host's memory and MPI, which has not been run on a GPU"
    }


def start(engine: str, timeout_seconds: float, device: str) -> World:
    """Join the others; see `xmem.distributing.Distributed.start`."""
    global _state, _worlds
    if engine not in ENGINES:
        raise UsageError(unknown("engine", engine, ENGINES))
    _worlds += 1
    if jt.in_mpi:
        world = _join(timeout_seconds)
    elif engine == "auto":
        world = World(rank=0, size=1, local_rank=0, local_size=1, engine="none")
    else:
        raise UsageError(
            f"engine {engine!r} needs processes that mpirun has started: run `xmem launch -n 2"
            " script.py`"
        )
    messages.begin(world.rank, world.size, _worlds)
    _state = _State(world)
    ask(spent_seconds)
    return world


def _join(timeout_seconds: float) -> World:
    if mpi.count() != jt.world_size:
        raise DistributedError(
            f"mpirun has started {mpi.count()} processes, and MPI knows {jt.world_size} here:"
            f" {os.environ.get('mpicc_path')!r} belongs to another MPI than the launcher. Name the"
            " right one in mpicc_path, or start the script with `xmem launch`"
        )
    found = (ctypes.c_longlong * 2)()
    if native.mpi().xmem_mpi_start(timeout_seconds, _worlds, found):
        raise _failure_or_bug().error()
    rank, size = found
    return World(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", rank)),
        local_size=int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", size)),
        engine="mpi",
    )


def stop() -> None:
    """Leave in order."""
    global _state
    exchange(b"leaving")
    if _known().world.engine == "mpi":
        native.mpi().xmem_mpi_stop()
    messages.begin(0, 0)
    _state = None


def abort() -> None:
    """Leave at once."""
    global _state
    if _state is not None and _state.world.engine == "mpi":
        native.mpi().xmem_mpi_abort()
    messages.begin(0, 0)
    _state = None


def exchange(payload: bytes) -> list[bytes]:
    """Give every rank a few bytes of every rank's, after what waits in the graph."""
    if len(payload) > _LARGEST_PAYLOAD:
        raise UsageError(f"{len(payload)} bytes are too many to exchange: at most 64 KiB")
    count = size()
    if count == 1:
        return [payload]
    with explaining():
        messages.token().sync(False, False)
    room = ctypes.create_string_buffer(_LARGEST_PAYLOAD * count)
    sizes = (ctypes.c_longlong * count)()
    if native.mpi().xmem_mpi_exchange(payload, len(payload), room, sizes, _LARGEST_PAYLOAD):
        raise _failure_or_bug().error()
    view = memoryview(room)
    starts = range(0, len(view), _LARGEST_PAYLOAD)
    return [bytes(view[at : at + taken]) for at, taken in zip(starts, sizes, strict=True)]


def watch(roll: Roll) -> None:
    """Let what waits look at the roll, until `stop` or `abort`."""
    state = _known()
    state.roll = roll
    if state.world.size > 1:
        native.mpi().xmem_mpi_watch(roll.address)


def size() -> int:
    """Return how many ranks there are."""
    return _known().world.size


def rank() -> int:
    """Return this process's number."""
    return _known().world.rank


def seed() -> int:
    """Return a seed for rounding, another for every rank and every call."""
    state = _known()
    state.rounded += 1
    return (state.rounded * 0x9E3779B1 + state.world.rank * 0x85EBCA77) & 0xFFFFFFFF


def spent_seconds() -> float:
    """Return the seconds that native code has spent in calls since this was last asked."""
    return float(native.mpi().xmem_mpi_spent()) if jt.in_mpi else 0.0


@contextmanager
def timed() -> Iterator[None]:
    """Leave the calls inside of the block out of `spent_seconds`: who makes them counts them."""
    waited(spent_seconds())
    try:
        yield
    finally:
        spent_seconds()


@contextmanager
def explaining() -> Iterator[None]:
    """Raise what a communication failed with instead of Jittor's RuntimeError around it.

    Raises:
        DistributedError: in that case; any other error stays. After a signal it is what the
            signal's handler raised, e.g. KeyboardInterrupt.
    """
    try:
        yield
    except RuntimeError as error:
        failure = None if isinstance(error, DistributedError) else last_failure()
        if failure is None:
            raise
        raise failure.error() from error


def last_failure() -> Failure | None:
    """Return what ended communication on this rank, or None while nothing has."""
    if not jt.in_mpi:
        return None
    count, ranks = ctypes.c_longlong(0), (ctypes.c_longlong * jt.world_size)()
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    reason = native.mpi().xmem_mpi_failure(
        ctypes.byref(count), ranks, len(ranks), message, _MESSAGE_BYTES
    )
    if not reason:
        return None
    text = message.value.decode(errors="replace")
    return Failure(_REASONS[reason - 1], tuple(ranks[: count.value]), text)


def _failure_or_bug() -> Failure:
    return last_failure() or Failure("engine", (), "communication failed without saying why")


def _known() -> _State:
    if _state is None:
        raise UsageError("this process has not joined any ranks: call xmem.distributed.init()")
    return _state
