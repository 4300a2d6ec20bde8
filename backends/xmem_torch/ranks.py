"""Who is who among the processes, on PyTorch (torch.distributed of 2.13).

Ranks that have met (`meeting`) make the default group (gloo on a CPU, NCCL beside it on CUDA) and
one gloo group of their own for `exchange`, so that a few bytes never wait behind tensors that are
under way. A group that the script has made itself is used and left alone.

gloo waits in threads of its own; a wait here is cut into slices, so that one looks at the roll in
between.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from xmem.distributed import failing
from xmem.distributing import World
from xmem.errors import DistributedError, UsageError
from xmem_torch import meeting

if TYPE_CHECKING:
    from xmem.distributed.roll import Roll

FAILURES: tuple[type[BaseException], ...] = (RuntimeError,)

_ENGINES = {"cpu": ("gloo",), "cuda": ("nccl", "gloo")}
_SHORT_BYTES = 248
_LONGEST_BYTES = 64 * 1024
_SLICE = timedelta(milliseconds=200)

# Renamed in 2.13, where the old name warns.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class _State:
    world: World
    device: str
    timeout: timedelta
    control: Any = None
    adopted: bool = False
    interface_set: bool = False
    roll: Roll | None = None


_state: _State | None = None
_starts = 0


def gaps(device: str) -> Mapping[str, str]:
    """Return what is missing on a device, with the reason."""
    return {
        "batch_statistics": "batch normalisation takes statistics of each rank's own rows;"
        " torch.nn.SyncBatchNorm, which takes them of all, is for GPUs only"
    }


def start(engine: str, timeout_seconds: float, device: str) -> World:
    """Join the others; see `xmem.distributing.Distributed.start`."""
    global _state, _starts
    known = _ENGINES[device]
    if engine not in ("auto", *known):
        raise UsageError(
            f'there is no engine {engine!r} for PyTorch on {device}; there is "auto",'
            f" {', '.join(repr(name) for name in known)}"
        )
    name = known[0] if engine == "auto" else engine
    timeout = timedelta(seconds=timeout_seconds)
    _starts += 1
    if dist.is_initialized():
        world = World(dist.get_rank(), dist.get_world_size(), *meeting.local(), name)
        state = _State(world, device, timeout, adopted=True)
    else:
        state = _join(name, timeout, device)
    try:
        state.control = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        _forget(state)
        raise _unconnected(error) from error
    except BaseException:
        _forget(state)
        raise
    _state = state
    return state.world


def stop() -> None:
    """Leave in order."""
    global _state
    state, _state = _known(), None
    if state.adopted:
        dist.destroy_process_group(state.control)
    else:
        dist.destroy_process_group()
    _restore(state)


def abort() -> None:
    """Leave at once.

    A gloo group that is destroyed waits for what is under way in it until the timeout. So it is
    kept, for good, and only its names are taken back.
    """
    global _state
    state, _state = _state, None
    if state is not None:
        _forget(state)


def exchange(payload: bytes) -> list[bytes]:
    """Give every rank a few bytes of every rank's; up to 248 bytes in one round, else in two."""
    if len(payload) > _LONGEST_BYTES:
        raise UsageError(f"{len(payload)} bytes are more than ranks exchange: {_LONGEST_BYTES}")
    if _known().world.size == 1:
        return [payload]
    head = len(payload).to_bytes(8, "little") + payload[:_SHORT_BYTES]
    rows = _gathered(head, 8 + _SHORT_BYTES)
    sizes = [int.from_bytes(row[:8], "little") for row in rows]
    if max(sizes) <= _SHORT_BYTES:
        return [row[8 : 8 + size] for row, size in zip(rows, sizes, strict=True)]
    rows = _gathered(payload, max(sizes))
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def watch(roll: Roll) -> None:
    """Let what waits look at the roll."""
    _known().roll = roll


def wait(work: Any, *, on_host: bool = False) -> None:
    """Wait for a call of torch.distributed, and fail early if others are gone.

    NCCL's does not block, and ends by itself.

    Args:
        work: what the call returned.
        on_host: it is one of host memory, whatever the device.
    """
    state = _state
    roll = state.roll if state is not None and (on_host or state.device == "cpu") else None
    while roll is not None and not _ended(work):
        if gone := roll.gone():
            raise failing.lost_error(gone, "a communication")
    work.wait()


def _ended(work: Any) -> bool:
    """Wait for a slice of time, and say whether a call has ended, well or not."""
    try:
        work.wait(_SLICE)
    except RuntimeError:  # also for a slice that is over
        return bool(work.is_completed())
    return True


def device() -> str:
    """Return the device whose tensors ranks exchange."""
    return _known().device


def size() -> int:
    """Return how many ranks there are."""
    return _known().world.size


def rank() -> int:
    """Return this process's number."""
    return _known().world.rank


def _known() -> _State:
    if _state is None:
        raise UsageError("this process has not joined any ranks: call xmem.distributed.init()")
    return _state


def _join(name: str, timeout: timedelta, device: str) -> _State:
    """Meet the others, and make the default group."""
    world, store = meeting.meet(name, timeout, _starts)
    state = _State(world, device, timeout, interface_set=meeting.choose_interface(world))
    if device == "cuda":
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            name if device == "cpu" else f"cpu:gloo,cuda:{name}",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
        )
    except RuntimeError as error:
        _restore(state)
        raise _unconnected(error) from error
    return state


def _unconnected(error: RuntimeError) -> DistributedError:
    return DistributedError(
        f"all ranks have met, and cannot connect: {error}. Set {meeting.INTERFACE} to the network"
        " interface that they share (gloo's word; `ip address` lists them), and look at the others'"
        " output"
    )


def _restore(state: _State) -> None:
    if state.interface_set:
        os.environ.pop(meeting.INTERFACE, None)


def _gathered(payload: bytes, size_bytes: int) -> list[bytes]:
    """Give every rank a row of every rank's, through memory that no allocator's count sees."""
    state = _known()
    mine = torch.frombuffer(bytearray(payload.ljust(size_bytes, b"\0")), dtype=torch.uint8)
    rows = torch.frombuffer(bytearray(state.world.size * size_bytes), dtype=torch.uint8)
    wait(all_gather(rows, mine, group=state.control, async_op=True), on_host=True)
    whole = rows.numpy().tobytes()
    return [whole[at : at + size_bytes] for at in range(0, len(whole), size_bytes)]


def _forget(state: _State) -> None:
    """Take back the names of groups, which live on."""
    world = distributed_c10d._world
    for group in [*world.pg_map, state.control]:
        if group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if not state.adopted:
        for table in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
            world.tags_to_pg,
            world.pg_coalesce_state,
        ):
            table.clear()
        distributed_c10d._update_default_pg(None)
        distributed_c10d._unregister_all_process_groups()
        world.group_count = 0
    with suppress(RuntimeError):
        _restore(state)
