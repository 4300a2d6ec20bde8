"""Tensors between ranks, on Jittor: at once, by the operations of `messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jittor as jt

from xmem.codec import packed_bytes
from xmem.distributing import Kind, Op, Pending
from xmem.errors import UsageError
from xmem_jittor import codec, halves, message_nodes, messages, ranks, shares


class Done:
    """A communication that has taken place."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """See `xmem.distributing.Pending`."""
        return self._result


def describe(tensor: Any) -> Kind:
    """Say what a tensor is."""
    if not isinstance(tensor, jt.Var):
        raise UsageError(f"{type(tensor).__name__} is not a jittor.Var")
    dtype = str(tensor.dtype)
    if dtype not in messages.DTYPES:
        raise UsageError(f"a tensor of {dtype} cannot be sent")
    share = shares.of(tensor)
    if share is not None and share.kind == "owned":  # elsewhere a placeholder: not a difference
        return Kind(dtype, share.shape, share.size_bytes)
    return Kind(dtype, tuple(tensor.shape), tensor.nbytes)


def flatten(tensors: Sequence[Any]) -> Any:
    """Copy tensors of one type one after another, (n,)."""
    return _ready(message_nodes.joined(tensors))


def split(flat: Any, like: Sequence[Any]) -> list[Any]:
    """Return parts in the shapes of others: views."""
    count = sum(tensor.numel() for tensor in like)
    if count != flat.numel():
        raise UsageError(f"{flat.numel()} elements cannot be split into {count}")
    parts = message_nodes.views(flat, like)
    jt.sync(parts, False, False)
    return parts


def assign(tensor: Any, value: Any) -> None:
    """Write values in place: the tensor keeps its handle, and gets memory of its own."""
    if tuple(tensor.shape) != tuple(value.shape):
        raise UsageError(
            f"values of shape {tuple(value.shape)} do not fit a tensor of {tuple(tensor.shape)}"
        )
    is_same = str(tensor.dtype) == str(value.dtype)
    if is_same and tensor.raw_ptr == value.raw_ptr:
        return
    # A view would keep all of a bucket alive.
    new = message_nodes.joined([value]) if is_same else convert(value, str(tensor.dtype))
    new = message_nodes.view(new, tensor.shape)
    with jt.flag_scope(no_grad=0):
        _ready(tensor.assign(new.detach()))  # which takes over that a gradient is wanted, or not


def convert(tensor: Any, dtype: str) -> Any:
    """Return a tensor in another type."""
    if str(tensor.dtype) == dtype:
        return tensor
    with jt.flag_scope(no_grad=1):
        if dtype == "bfloat16" and not jt.flags.use_cuda:
            return _ready(message_nodes.to_bfloat16(halves.cast(tensor.detach(), "float32")))
        return _ready(halves.cast(tensor.detach(), dtype))


def encode(flat: Any) -> Any:
    """Pack float32 in 8 bits, (n,) uint8."""
    return _ready(codec.pack(flat, 8, 0, "nearest"))


def decode(packed: Any, count: int) -> Any:
    """Unpack, (count,) float32."""
    if packed.numel() != packed_bytes(count, 8):
        raise UsageError(f"{packed.numel()} bytes are not {count} values in 8 bits")
    return _ready(codec.unpack(packed, (count,), 8))


def all_reduce(tensor: Any, op: Op) -> Pending:
    """Combine over ranks, in the tensor's own memory where nothing else reads it."""
    return Done(_sent(messages.all_reduce(tensor, op, in_place=True)))


def broadcast(tensor: Any, source: int) -> Pending:
    """Give every rank the source's values."""
    x = tensor if ranks.rank() == source else None
    return Done(_sent(messages.broadcast(x, source, tensor.shape, str(tensor.dtype))))


def all_gather(tensor: Any) -> Pending:
    """(...) -> (world_size, ...)."""
    return Done(_sent(messages.all_gather(tensor)))


def reduce_scatter(tensor: Any, op: Op) -> Pending:
    """(world_size, ...) -> (...)."""
    return Done(_sent(messages.reduce_scatter(tensor, op)))


def all_to_all(tensor: Any) -> Pending:
    """(world_size, ...) -> (world_size, ...), by sender."""
    return Done(_sent(messages.all_to_all(tensor)))


def _sent(tensor: Any) -> Any:
    """Compute what ranks have been asked for; `xmem.distributed.sending` counts the time."""
    with ranks.timed():
        return _ready(tensor)


def _ready(tensor: Any) -> Any:
    """Compute a tensor, and no other that waits."""
    with ranks.explaining():
        tensor.sync(False, False)
    return tensor
