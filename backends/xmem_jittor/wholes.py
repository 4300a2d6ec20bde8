"""Tensors between the ranks that share them and rank 0, one at a time."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import jittor as jt
import numpy as np

from xmem.distributed.counting import note
from xmem.errors import CompositionError
from xmem_jittor import messages, ranks, shares
from xmem_jittor.message_nodes import joined, view


def tell(value: Any, source: int = 0) -> Any:
    """Give every rank a plain value of the source's."""
    packed = pickle.dumps(value) if ranks.rank() == source else b""
    count = int(ranks.exchange(str(len(packed)).encode())[source])
    sent = jt.array(np.frombuffer(packed, np.uint8)) if packed else None
    found = messages.broadcast(sent, source, (count,), "uint8")
    return pickle.loads(found.numpy().tobytes())


def move(value: Any, shape: Sequence[int], dtype: str, source: int, target: int) -> Any:
    """Return a tensor of the source's on the target; None on the other ranks."""
    rank = ranks.rank()
    found = value if rank == source == target else None
    if source != target and rank == source:
        sending = messages.send(value.detach(), target)
        messages.wait(sending)
        note("send", value.nbytes, ranks.size())
        _finish()
    if source != target and rank == target:
        found = messages.receive(shape, dtype, source)
        _finish()
        found.sync()
    return found


def spread(value: Any, shape: Sequence[int], dtype: str) -> Any:
    """Return rank 0's tensor on every rank, in memory of its own."""
    sent = None
    if ranks.rank() == 0:
        sent = view(joined([value.detach()]), shape)
    found = messages.broadcast(sent, 0, tuple(shape), dtype)
    _finish()
    return found.sync()


def together(value: Any, axis: int | None) -> Any:
    """Return all ranks' parts of a tensor along an axis as one, on every rank."""
    if axis is None:
        raise CompositionError(
            "every rank has other parameters (a pipeline's stages): there is no one state for all."
            " Save each rank's own"
        )
    note("all_gather", value.nbytes * ranks.size(), ranks.size())
    parts = messages.all_gather(value.detach())
    _finish()
    with jt.flag_scope(no_grad=1):
        whole = jt.concat([parts[i] for i in range(ranks.size())], dim=axis)
        return whole.sync()


def part_of(value: Any, share: shares.Share) -> Any:
    """Return this rank's part of a whole tensor, in memory of its own."""
    axis = share.axis or 0
    width = share.shape[axis] // ranks.size()
    start = ranks.rank() * width
    with jt.flag_scope(no_grad=1):
        index = [slice(None)] * len(share.shape)
        index[axis] = slice(start, start + width)
        cut = value[tuple(index)]
        return view(joined([cut]), cut.shape).sync()


def as_tensor(value: Any, dtype: str) -> Any:
    """Return what a state holds as a tensor of a type."""
    tensor = value if isinstance(value, jt.Var) else jt.array(np.ascontiguousarray(value))
    with jt.flag_scope(no_grad=1):
        return tensor.detach() if str(tensor.dtype) == dtype else tensor.cast(dtype)


def _finish() -> None:
    """Communicate what has been asked for."""
    with ranks.explaining():
        messages.token().sync()
