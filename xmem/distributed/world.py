"""Which rank this process is, and how it joins and leaves the others."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from xmem.api import active
from xmem.distributed import failing, roll, watching
from xmem.distributed.answers import read
from xmem.distributed.counting import traffic
from xmem.distributing import World
from xmem.errors import DistributedError, UsageError

if TYPE_CHECKING:
    from xmem.distributing import Distributed

TIMEOUT_VARIABLE = "XMEM_TIMEOUT"
"""The timeout of an `init` that is given none, in seconds."""

LAUNCHED_VARIABLE = "XMEM_LAUNCHED"
"""What `xmem launch` tells each rank: "2 torch" for two ranks of this backend."""

DEFAULT_TIMEOUT_SECONDS = 600.0
LONGEST_TIMEOUT_SECONDS = 1e8
"""Three years: engines count in ms and ns, and more of them than they can hold come out as none."""

_world: World | None = None
_backend: Distributed | None = None
_watcher: watching.Watcher | None = None


def init(backend: str = "auto", *, timeout: float | None = None) -> World:
    """Join the ranks that `xmem launch` (or torchrun, or mpirun) has started.

    Without a launcher this process is the only rank, and every call below works. A rank that ends
    with an error from now on does so at once, and all others name it.

    Args:
        backend: what carries the bytes: "auto", or "gloo", "nccl" (PyTorch), "mpi" (Jittor).
        timeout: the longest wait for other ranks, in seconds, here and in every later call; None:
            what `xmem launch --timeout` was given, else 600.

    Raises:
        UsageError: no such backend, a timeout that is not above 0, or a second call.
        CollectiveTimeoutError: ranks did not come.
    """
    global _world, _backend
    if _world is not None:
        raise UsageError(
            f"this process has joined already, as rank {_world.rank} of {_world.size}. Call"
            " xmem.distributed.destroy() before a second init()"
        )
    seconds = given_timeout(timeout)
    if not isinstance(backend, str):
        raise UsageError(f"backend is the name of an engine, e.g. 'auto', not {backend!r}")
    distributed = active().distributed
    world = distributed.start(backend, seconds)
    try:
        _check_launched(world)
        _begin(distributed, world, seconds)
    except BaseException:
        _end()
        distributed.abort()
        raise
    _world, _backend = world, distributed
    traffic(reset=True)
    return world


def _check_launched(world: World) -> None:
    """See that the ranks that were started have found each other.

    Raises:
        UsageError: they were started for another backend, whose launcher this one does not know.
    """
    ranks, _, name = os.environ.get(LAUNCHED_VARIABLE, "").partition(" ")
    if ranks.isdecimal() and int(ranks) != world.size:
        raise UsageError(
            f"`xmem launch` started {ranks} ranks for backend {name!r}, and this script uses"
            f" {active().name!r}, which sees {world.size}. Start it with"
            f" `xmem launch --backend {active().name}`"
        )


def _begin(distributed: Distributed, world: World, seconds: float) -> None:
    """Let the ranks see each other's ends."""
    global _watcher
    if world.size == 1:
        table = roll.Roll.alone()
        table.sign_on()
        failing.begin(failing.Watch(table, distributed.failures, seconds))
        return
    table = roll.share(world.rank, world.size, distributed.exchange)
    distributed.watch(table)
    watch = failing.Watch(table, distributed.failures, seconds)
    failing.begin(watch)
    _watcher = watching.Watcher(watch)
    _watcher.begin()


def _end() -> None:
    """Undo what `_begin` did."""
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is not None:
        watcher.end()
    failing.end()


def given_timeout(timeout: float | None) -> float:
    """Return the timeout that holds, in seconds: the given one, else the environment's, else 600.

    Raises:
        UsageError: it is not a number above 0, or more than engines can count.
    """
    given: object = timeout
    source = "timeout"
    if timeout is None:
        given = os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_SECONDS)
        source = TIMEOUT_VARIABLE
    try:
        seconds = math.nan if isinstance(given, bool) else float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT_SECONDS:
        raise UsageError(
            f"{source} is {given!r}: give a number of seconds above 0, e.g. 600, and at most"
            f" {LONGEST_TIMEOUT_SECONDS:g}"
        )
    return seconds


def current() -> World:
    """Return the world.

    Raises:
        DistributedError: `init` has not been called.
    """
    if _world is None:
        raise DistributedError(
            "this process has not joined any ranks. Call xmem.distributed.init() first, in a"
            " script that `xmem launch` starts"
        )
    return _world


def joined() -> Distributed:
    """Return the capability that `init` was called with, whatever is active now.

    Raises:
        DistributedError: `init` has not been called.
    """
    current()
    assert _backend is not None
    return _backend


def is_initialized() -> bool:
    """Say whether `init` has been called, and `destroy` has not."""
    return _world is not None


def rank() -> int:
    """Return this process's number, from 0."""
    return current().rank


def world_size() -> int:
    """Return how many ranks there are."""
    return current().size


def local_rank() -> int:
    """Return this process's number among those on this host."""
    return current().local_rank


def barrier() -> None:
    """Wait until all ranks are here.

    Raises:
        RankLostError: ranks are gone; it names them.
        CollectiveTimeoutError: ranks did not come within the timeout; it names them.
    """
    _meet("barrier")


def destroy() -> None:
    """Leave: waits for all ranks, then nothing of the communication is left.

    Raises:
        DistributedError: `init` has not been called; or ranks are gone or late, which it names:
            then this process has left without them.
    """
    global _world, _backend
    distributed = joined()
    try:
        _meet("destroy")
    except BaseException:
        distributed.abort()
        raise
    else:
        distributed.stop()
    finally:
        watch = failing.current()
        if watch is not None:
            watch.roll.leave()
        _end()
        _world = _backend = None


def _meet(name: str) -> None:
    """Wait for all ranks, and see that they are at the same call."""
    from xmem.errors import CollectiveMismatchError

    distributed = joined()
    with failing.communicating(name):
        names = [read(raw)["what"] for raw in distributed.exchange(name.encode())]
    if set(names) != {name}:
        raise CollectiveMismatchError(
            f"ranks called different things: {', '.join(map(repr, names))}, by rank. All ranks"
            " must make the same calls in one order",
            ranks=[index for index, other in enumerate(names) if other != name],
        )
