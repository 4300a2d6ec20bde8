"""Tensors between ranks, on PyTorch (torch.distributed of 2.13).

gloo on a CPU, NCCL on CUDA. What gloo does not know is sent as what it knows: int16 travels as
bytes, and is added up as int32. gloo's threads let go of a tensor a moment after they say that it
is done, so that its memory outlives its last reference here; `Sent.wait` waits for that, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from xmem.codec import packed_bytes
from xmem.distributed.counting import waited
from xmem.distributed.failing import communicating
from xmem.distributed.sending import buffer
from xmem.distributing import Kind, Op, Pending
from xmem.errors import UsageError
from xmem_torch import codec, ranks

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_UNKNOWN_TO_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
_LONGEST_HOLD_SECONDS = 5.0
_SPINS = 100

# Renamed in 2.13, where the old name warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def counted(doing: str, buffer_bytes: int = 0) -> Iterator[None]:
    """Count the time of PyTorch's own calls and the memory that they take; explain a failure.

    Args:
        doing: what is done, for a person.
        buffer_bytes: of buckets and copies that are there until the block ends.
    """
    begun = time.perf_counter()
    try:
        with buffer(buffer_bytes), communicating(doing):
            yield
    finally:
        waited(time.perf_counter() - begun)


class Sent:
    """A call under way, and what is still to be done with what it brings.

    Args:
        work: of torch.distributed; None where there was nobody to call.
        finish: returns the result.
        held: tensors that the engine refers to, and how many references there were before.
    """

    def __init__(
        self, work: Any, finish: Callable[[], Any], held: Sequence[tuple[Any, int]] = ()
    ) -> None:
        self._work = work
        self._held = held
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """See `xmem.distributing.Pending`."""
        if self._work is not None:
            ranks.wait(self._work)
            self._work = None
            _wait_for_release(self._held)
            self._held = ()
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def describe(tensor: Any) -> Kind:
    """Say what a tensor is; DTensors and sparse tensors are none that can be sent."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{type(tensor).__name__} is not a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor of layout {tensor.layout} cannot be sent; use .to_dense()")
    if hasattr(type(tensor), "to_local"):  # a DTensor, whose module takes seconds to import
        raise UsageError("a DTensor lies on several ranks already; use .to_local()")
    device = ranks.device()
    if tensor.device.type != device:  # a host's tensors would need an engine of their own
        raise UsageError(
            f"the tensor is on {tensor.device}, and ranks exchange what is on {device}: move it"
            f' there, or choose the device in xmem.use("torch", device=...)'
        )
    return Kind(_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes)


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def flatten(tensors: Sequence[Any]) -> Any:
    """Copy tensors of one type one after another, (n,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split(flat: Any, like: Sequence[Any]) -> list[Any]:
    """Return parts in the shapes of others: views."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def assign(tensor: Any, value: Any) -> None:
    """Write values in place; nothing is done where they are its own memory."""
    target, source = tensor.detach(), value.detach()
    same = target.data_ptr() == source.data_ptr() and target.dtype == source.dtype
    if same and target.shape == source.shape and target.stride() == source.stride():
        return
    target.copy_(source.view(target.shape))


def convert(tensor: Any, dtype: str) -> Any:
    """Return a tensor in another type."""
    return tensor.detach().to(getattr(torch, dtype))


def encode(flat: Any) -> Any:
    """Pack float32 in 8 bits, (n,) uint8."""
    return codec.pack(flat.detach().contiguous(), 8, 0, style="nearest")


def decode(packed: Any, count: int) -> Any:
    """Unpack, (count,) float32."""
    if packed.numel() != packed_bytes(count, 8):
        raise UsageError(f"{packed.numel()} bytes are not {count} values in 8 bits")
    return codec.unpack(packed.contiguous(), count, 8, torch.float32)


def all_reduce(tensor: Any, op: Op) -> Pending:
    """Combine over ranks, in the tensor's own memory where it is contiguous.

    A mean is a sum that is divided afterwards: gloo has no other.
    """
    own = _sendable(tensor)
    wide = _addable(own)
    return _start(
        lambda flat: dist.all_reduce(flat, op=_reduction(op), async_op=True),
        [wide],
        lambda: _done(wide, own, op),
    )


def broadcast(tensor: Any, source: int) -> Pending:
    """Give every rank the source's values, in the tensor's own memory where it is contiguous."""
    own = _sendable(tensor)
    return _start(lambda flat: dist.broadcast(flat, src=source, async_op=True), [own], lambda: own)


def all_gather(tensor: Any) -> Pending:
    """(...) -> (world_size, ...)."""
    own = _sendable(tensor)
    result = own.new_empty((ranks.size(), *own.shape))
    if ranks.size() == 1:
        result[0].copy_(own)
    return _start(
        lambda all_, one: ranks.all_gather(all_, one, async_op=True),
        [result, own],
        lambda: result,
    )


def reduce_scatter(tensor: Any, op: Op) -> Pending:
    """(world_size, ...) -> (...)."""
    own = _sendable(tensor)
    wide = _addable(own)
    part = wide.new_empty(own.shape[1:])
    if ranks.size() == 1:
        part.copy_(wide[0])
    return _start(
        lambda one, all_: _reduce_scatter(one, all_, op=_reduction(op), async_op=True),
        [part, wide],
        lambda: _done(part, part if wide is own else part.to(own.dtype), op),
    )


def all_to_all(tensor: Any) -> Pending:
    """(world_size, ...) -> (world_size, ...), by sender."""
    own = _sendable(tensor)
    result = own.clone() if ranks.size() == 1 else torch.empty_like(own)
    return _start(
        lambda theirs, mine: dist.all_to_all_single(theirs, mine, async_op=True),
        [result, own],
        lambda: result,
    )


def _sendable(tensor: Any) -> Any:
    return tensor.detach().contiguous()


def _addable(tensor: Any) -> Any:
    """Return a tensor as a type that gloo adds up."""
    return tensor.to(torch.int32) if tensor.dtype in _UNKNOWN_TO_GLOO else tensor


def _raw(flat: Any) -> Any:
    """Return bytes of a tensor whose type gloo does not know."""
    return flat.view(torch.uint8) if flat.dtype in _UNKNOWN_TO_GLOO else flat


def _reduction(op: Op) -> Any:
    return _OPS["sum" if op == "mean" else op]


def _done(wide: Any, own: Any, op: Op) -> Any:
    """Take up what was added in another type, and divide."""
    if wide is not own:
        own.copy_(wide)
    return own.div_(ranks.size()) if op == "mean" else own


def _start(call: Callable[..., Any], tensors: Sequence[Any], finish: Callable[[], Any]) -> Pending:
    """Begin a call with tensors, flat; one rank alone has nobody to call."""
    if ranks.size() == 1 or not tensors[0].numel():
        return Sent(None, finish)
    views = [_raw(tensor.view(-1)) for tensor in tensors]  # which nobody else refers to
    held = [(view, view._use_count()) for view in views if view.is_cpu]
    return Sent(call(*views), finish, held)


def _wait_for_release(held: Sequence[tuple[Any, int]]) -> None:
    """Wait until gloo's threads let go; not for ever, since nothing depends on it but bytes.

    That takes microseconds, but for a machine with more ranks than cores: there a rank that goes on
    asking takes the time that those threads need.
    """
    ends = time.perf_counter() + _LONGEST_HOLD_SECONDS
    asked = 0
    for view, references in held:
        while view._use_count() > references and time.perf_counter() < ends:
            time.sleep(0 if asked < _SPINS else 1e-4)
            asked += 1
