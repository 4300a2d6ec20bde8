"""Communication as operations of the lazy graph, in one total order on every rank.

Each call returns a tensor that has not been computed. All pass one chain of tokens (one int32
each), so that ranks which run the same program communicate in the same order, whatever else their
executors reorder. While one waits it looks at the clock and at the roll, and fails with an error
that names the ranks that are gone or late. Nothing here has a gradient: callers put these into the
passes of their own `jt.Function`.

They call `native/mpi.cc`. On CUDA Jittor brings their tensors to the host's memory and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jittor as jt

from xmem.distributing import Op
from xmem.errors import UsageError, unknown
from xmem_jittor import message_nodes, native, ordering
from xmem_jittor.message_nodes import gate, joined, view

__all__ = [
    "DTYPES", "Sending", "all_gather", "all_reduce", "all_to_all", "begin", "broadcast", "gate",
    "joined", "receive", "reduce", "reduce_scatter", "send", "token", "view", "wait",
]  # fmt: skip

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
"""What can be communicated, in the order of the native codes."""

_OPS: tuple[str, ...] = get_args(Op)
_KINDS = (
    "exchange", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
    "send", "wait", "receive",
)  # fmt: skip


class _Chain:
    """The end of the chain, and the place of this process."""

    world = 0
    rank = 0
    size = 0
    token: Any = None
    sendings = 0


_chain = _Chain()


@dataclass
class Sending:
    """A tensor under way to another rank; `wait` takes it.

    Attributes:
        tensor: what is sent, until `wait` has been called.
        target: the rank that it goes to.
        number: which sending it is, from 1.
    """

    tensor: Any
    target: int
    number: int


def begin(rank: int, size: int, world: int = 0) -> None:
    """Start a chain; `ranks` calls it.

    Args:
        rank: this process's number.
        size: how many ranks there are. In a world of one nothing is communicated; 0: there is no
            world any more.
        world: which one it is of those that this process has joined. What waits in the graph from
            one that it has left cannot run any more.
    """
    _chain.rank, _chain.size, _chain.world = rank, size, world
    _chain.token, _chain.sendings = None, 0


def all_reduce(x: Any, op: Op = "sum", *, after: Sequence[Any] = (), in_place: bool = False) -> Any:
    """Return x combined over ranks; `after`: what must be computed before it may run.

    The result takes over the memory of x where nothing else reads that.

    Args:
        x: the tensor.
        op: halves are combined in float32 and rounded once; truth values: any.
        after: tensors.
        in_place: the caller's own handle on x does not count as a reader: x is no longer valid.
    """
    _check_op(x, op)
    if _size() == 1:
        return gate(x, *after)
    memory = message_nodes.NEW if jt.flags.use_cuda else message_nodes.TAKEN
    return _communicate(
        "all_reduce", x, x.shape, after=after, op=op, memory=memory, handles=int(in_place)
    )


def reduce(x: Any, owner: int, *, after: Sequence[Any] = ()) -> Any:
    """Return the sum on its owner; elsewhere a tensor of one element, kept alive by the chain."""
    _check_rank(owner)
    if _size() == 1:
        return gate(x, *after)
    if _chain.rank != owner:
        return _communicate("reduce", x, (1,), after=after, peer=owner)
    memory = message_nodes.NEW if jt.flags.use_cuda else message_nodes.TAKEN
    return _communicate("reduce", x, x.shape, after=after, peer=owner, memory=memory)


def broadcast(
    x: Any, source: int, shape: Sequence[int], dtype: str, *, after: Sequence[Any] = ()
) -> Any:
    """Return the source's x on every rank; x may be None on the others, which hold no memory.

    On the source the result shares the memory of x.
    """
    _check_rank(source)
    if _chain.rank != source:
        return _communicate("broadcast", None, shape, dtype, after=after, peer=source)
    if tuple(x.shape) != tuple(shape) or str(x.dtype) != dtype:
        raise UsageError(
            f"broadcast was told {dtype} {tuple(shape)}, and its source has {x.dtype}"
            f" {tuple(x.shape)}"
        )
    if _size() == 1:
        return gate(x, *after)
    memory = message_nodes.NEW if jt.flags.use_cuda else message_nodes.SHARED
    return _communicate("broadcast", x, shape, after=after, peer=source, memory=memory)


def all_gather(x: Any, *, after: Sequence[Any] = ()) -> Any:
    """(...) -> (world_size, ...)."""
    if _size() == 1:
        return view(gate(x, *after), (1, *x.shape))
    return _communicate("all_gather", x, (_chain.size, *x.shape), after=after)


def reduce_scatter(x: Any, op: Op = "sum", *, after: Sequence[Any] = ()) -> Any:
    """(world_size, ...) -> (...)."""
    _check_op(x, op)
    _check_parts(x)
    if _size() == 1:
        return view(gate(x, *after), x.shape[1:])
    return _communicate("reduce_scatter", x, x.shape[1:], after=after, op=op)


def all_to_all(x: Any, *, after: Sequence[Any] = ()) -> Any:
    """(world_size, ...) -> (world_size, ...)."""
    _check_parts(x)
    if _size() == 1:
        return gate(x, *after)
    return _communicate("all_to_all", x, x.shape, after=after)


def send(x: Any, target: int, *, after: Sequence[Any] = ()) -> Sending:
    """Begin to send; returns what `wait` takes. x stays alive until then."""
    _check_other(target)
    _chain.sendings += 1
    sending = Sending(gate(x), target, _chain.sendings)
    _communicate("send", sending.tensor, (1,), after=after, peer=target, sending=sending.number)
    return sending


def wait(sending: Sending) -> None:
    """Wait for a sending, at this place of the order; x's memory may go after it.

    It fails, like the other rank's `receive`, if that asked for something else.
    """
    if sending.tensor is None:
        raise UsageError(f"sending {sending.number} has been waited for already")
    _communicate("wait", sending.tensor, (1,), peer=sending.target, sending=sending.number)
    sending.tensor = None


def receive(shape: Sequence[int], dtype: str, source: int, *, after: Sequence[Any] = ()) -> Any:
    """Return what the source's next `send` to this rank sent."""
    _check_other(source)
    return _communicate("receive", None, shape, dtype, after=after, peer=source)


def token() -> Any:
    """Return the end of the chain: synced, all that was asked for has been communicated."""
    return ordering.anchor() if _chain.token is None else _chain.token


def _communicate(
    kind: str,
    x: Any,
    shape: Sequence[int],
    dtype: str = "",
    *,
    after: Sequence[Any] = (),
    op: str = "sum",
    peer: int = 0,
    sending: int = 0,
    memory: int = message_nodes.NEW,
    handles: int = 0,
) -> Any:
    """Append an operation to the chain; returns its result.

    Args:
        kind: which one.
        x: what it reads, or None.
        shape: of the result.
        dtype: of the result; that of x by default.
        after: what it waits for, besides.
        op: how values are combined.
        peer: the other rank, or the owner or source.
        sending: the number of a sending.
        memory: where the result lies.
        handles: how many handles on x do not count as readers.
    """
    _size()
    sent = dtype if x is None else str(x.dtype)
    if sent not in DTYPES:
        raise UsageError(unknown("type of a tensor", sent, DTYPES))
    count = math.prod(shape) if x is None else x.numel()
    codes = _KINDS.index(kind), DTYPES.index(sent), _OPS.index(op)
    numbers = message_nodes.Numbers(*codes, peer, count, sending, _chain.world)
    result, _chain.token = message_nodes.operation(
        [*([] if x is None else [x]), token(), *after],
        shape,
        sent,
        function=native.address_of(native.mpi().xmem_mpi_run),
        numbers=numbers,
        reads=message_nodes.NONE if x is None else message_nodes.FIRST,
        memory=memory,
        handles=handles,
        with_token=True,
    )
    return result


def _size() -> int:
    """Return how many ranks there are.

    Raises:
        UsageError: there is no world: results would be this rank's alone, without a word.
    """
    if _chain.size == 0:
        raise UsageError("this process has not joined any ranks: call xmem.distributed.init()")
    return _chain.size


def _check_op(x: Any, op: str) -> None:
    if op not in _OPS:
        raise UsageError(unknown("op", op, _OPS))
    if op == "mean" and not str(x.dtype).startswith(("float", "bfloat")):
        raise UsageError(f"op='mean' takes floats, not {x.dtype}; use 'sum' and divide it yourself")


def _check_rank(rank: int) -> None:
    if not 0 <= rank < _size():
        raise UsageError(f"there is no rank {rank!r}; there are 0 to {_chain.size - 1}")


def _check_other(rank: int) -> None:
    _check_rank(rank)
    if rank == _chain.rank:
        raise UsageError(f"rank {rank} is this process itself: it has the tensor already")


def _check_parts(x: Any) -> None:
    if x.shape[0] != _size():
        raise UsageError(
            f"a tensor of shape {tuple(x.shape)} has no part for each of {_chain.size} ranks: its"
            " first size has to be their number"
        )
