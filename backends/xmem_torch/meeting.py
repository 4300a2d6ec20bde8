"""How ranks find each other, on PyTorch: in the store that torchrun or rank 0 serves.

Each rank writes that it is there, so that who is missing can be said; PyTorch's own rendezvous
waits for all without saying for whom. The store is kept for a second meeting: rank 0 may serve it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from xmem.distributing import World
from xmem.errors import CollectiveTimeoutError, DistributedError, UsageError

INTERFACE = "GLOO_SOCKET_IFNAME"
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_store: Any = None


def meet(engine: str, timeout: timedelta, number: int) -> tuple[World, Any]:
    """Wait until all ranks are there.

    Args:
        engine: the engine's name.
        timeout: the longest wait.
        number: which meeting of this process it is.

    Returns:
        The world, and a store for its groups.

    Raises:
        CollectiveTimeoutError: names the ranks that are missing.
        UsageError: the environment says too little, or that another launcher was used.
    """
    global _store
    if "WORLD_SIZE" not in os.environ:
        _refuse_other_launchers()
        return World(0, 1, 0, 1, "none"), dist.HashStore()
    world = World(_number("RANK"), _number("WORLD_SIZE"), *local(), engine)
    _store = _store or _connect(world, timeout)
    store = dist.PrefixStore(f"xmem/{number}", _store)
    try:
        _gather_in(store, world, timeout)
    except RuntimeError as error:
        if isinstance(error, DistributedError):
            raise
        raise DistributedError(
            f"rank {world.rank} has lost what serves the meeting of the ranks (rank 0, or the"
            f" launcher): {error}",
        ) from error
    return world, store


def local() -> tuple[int, int]:
    """Return this process's number on this host, and how many ranks this host has."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def choose_interface(world: World) -> bool:
    """Let gloo use loopback where all ranks are on this host, unless the user chose.

    By itself it takes the address of the host's name, which may be none or a slow one.

    Returns:
        Whether the environment was changed.
    """
    if INTERFACE in os.environ or world.local_size != world.size:
        return False
    names = [name for _, name in socket.if_nameindex()]
    found = next((name for name in ("lo", "lo0") if name in names), None)
    if found is None:
        return False
    os.environ[INTERFACE] = found
    return True


def _refuse_other_launchers() -> None:
    for name in _OTHER_LAUNCHERS:
        if int(os.environ.get(name, "1")) > 1:
            raise UsageError(
                f"{os.environ[name]} processes were started by mpirun ({name}), and PyTorch's ranks"
                " are started by torchrun: use `xmem launch -n N --backend torch script.py`"
            )


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        raise UsageError(
            f"WORLD_SIZE is set, and {name} is {os.environ.get(name)!r}: a launcher sets RANK,"
            " WORLD_SIZE, MASTER_ADDR and MASTER_PORT together. Use `xmem launch -n N script.py`,"
            " or unset WORLD_SIZE to train in one process"
        ) from None


def _connect(world: World, timeout: timedelta) -> Any:
    """Return the store."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT")
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=world.rank == 0 and not served,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, TimeoutError) as error:
        raise CollectiveTimeoutError(
            f"rank {world.rank} cannot meet the others at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
            f" within {timeout.total_seconds():g} s: {'the launcher' if served else 'rank 0'},"
            f" which serves the meeting, has not started, or cannot be reached. {error}",
            ranks=(0,) if world.rank and not served else (),
        ) from error


def _gather_in(store: Any, world: World, timeout: timedelta) -> None:
    """Wait until every rank has written that it is there."""
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"here/{world.rank}", b"1")
    missing: Sequence[int] = range(world.size)
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"ranks {', '.join(map(str, missing))} of {world.size} have not come to"
                f" xmem.distributed.init() within {timeout.total_seconds():g} s. Look at what they"
                " printed, or give them more time: init(timeout=...)",
                ranks=missing,
            )
        time.sleep(0.01)
