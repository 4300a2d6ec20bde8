"""One model on every rank, gradients averaged once, on Jittor (1.3.11).

The model stays what it is. Its optimizer's gradients are averaged where Jittor's own loop and
xmem's compute them, in `Optimizer.backward` (`methods.py`), and nowhere else: of a bare `jt.grad`
nothing is known here. Jittor's own averaging, gradient by gradient, does not take part. Batch
normalisation goes on averaging its statistics over ranks, through operations that keep their place
among the others: those of Jittor may run in another order on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import jittor as jt

from xmem.distributed.counting import note
from xmem.distributing import Reduction
from xmem.errors import CompositionError, UsageError
from xmem_jittor import gradients, messages, methods, ranks, shares
from xmem_jittor.averaging import Averaging
from xmem_jittor.checkpoint import Checkpoint
from xmem_jittor.flat import count_buffer, flattened
from xmem_jittor.message_nodes import joined, view
from xmem_jittor.trial import trying

_SENT_BYTES = 25 << 20

_models: WeakKeyDictionary[Any, Averaging] = WeakKeyDictionary()
_optimizers: WeakSet[Any] = WeakSet()


def wrap(model: Any, optimizer: Any, reduction: Reduction) -> Any:
    """Return the model to call: the same."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if model in _models or optimizer in _optimizers:
        raise CompositionError(
            f"{type(model).__name__} or its optimizer is data-parallel or sharded already: its"
            " gradients would be averaged twice"
        )
    if shares.kinds([*model.parameters(), *held]):
        raise CompositionError(
            f"{type(model).__name__} is sharded: what it needs of the other ranks it gets in its"
            " own passes. Leave data_parallel out"
        )
    equalize([*model.parameters(), *held])
    for module in model.modules():
        keep_order(module)
    averaging = _models[model] = Averaging(reduction)
    _optimizers.add(optimizer)
    methods.average(optimizer, averaging)
    return model


def is_parallel(model: Any) -> bool:
    """Say whether a model is data-parallel."""
    return model in _models


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Average nothing inside the block."""
    averaging = _models.get(model) if isinstance(model, jt.Module) else None
    if averaging is None:
        sharded = isinstance(model, jt.Module) and shares.kinds(model.parameters())
        raise UsageError(
            f"{type(model).__name__} is not data-parallel, so that there is nothing to put off:"
            + (
                " gradients of a sharded model go to their owners in each backward. Leave out"
                " model= or no_sync"
                if sharded
                else " call xmem.distributed.data_parallel(model, optimizer) first"
            )
        )
    averaging.apart += 1
    try:
        yield
    finally:
        averaging.apart -= 1


def equalize(tensors: Sequence[Any]) -> None:
    """Give all ranks rank 0's values, in as few messages as fit in a buffer."""
    size = ranks.size()
    if size == 1:
        return
    distinct = {id(tensor): tensor for tensor in tensors}
    waiting: dict[str, list[Any]] = {}
    for tensor in distinct.values():
        several = waiting.setdefault(str(tensor.dtype), [])
        if several and sum(t.nbytes for t in several) + tensor.nbytes > _SENT_BYTES:
            _send(several, size)
            several.clear()
        several.append(tensor)
    for several in waiting.values():
        _send(several, size)
    jt.sync(list(distinct.values()))


def _send(tensors: list[Any], size: int) -> None:
    flat = flattened(tensors)
    note("broadcast", flat.nbytes, size)
    count_buffer(flat.nbytes)
    flat = messages.broadcast(flat, 0, flat.shape, str(flat.dtype))
    place = 0
    for tensor in tensors:
        # A copy: a view would keep the whole buffer.
        copy = joined([view(flat, (tensor.numel(),), place)])
        gradients.put(tensor, view(copy, tensor.shape))
        place += tensor.numel()
    jt.sync(tensors)


def keep_order(module: Any) -> None:
    """Let a batch normalisation's reductions pass the chain of messages."""
    if isinstance(module, jt.nn.BatchNorm) and ranks.size() > 1:
        forward = vars(module).get("execute")
        if not isinstance(forward, OrderedForward):
            Checkpoint().replace_forward(module, OrderedForward)


@dataclass(frozen=True)
class OrderedForward:
    """What a batch normalisation runs instead of its forward: the same, its reductions in order.

    An object and not a closure, so that it is copied and pickled with its model.
    """

    forward: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        with _in_order():
            return self.forward(*args, **kwargs)


def _in_order() -> AbstractContextManager[None]:
    return _replaced(lambda x, op="add": _Reduced()(x) if op == "mean" else _refuse(op))


@contextmanager
def _replaced(reduce: Any) -> Iterator[None]:
    original = jt.Var.mpi_all_reduce
    jt.Var.mpi_all_reduce = reduce
    try:
        yield
    finally:
        jt.Var.mpi_all_reduce = original


def _refuse(op: str) -> Any:
    raise CompositionError(f"a batch normalisation reduces by {op!r}; xmem knows of 'mean' only")


class _Reduced(jt.Function):
    """The average over ranks; each gradient is averaged too, as Jittor's own operation does."""

    def execute(self, x: Any) -> Any:
        """Average."""
        return _average(x.detach())

    def grad(self, gradient: Any) -> Any:
        """Average the gradients."""
        return gradient if trying() else _average(gradient)


def _average(x: Any) -> Any:
    size = ranks.size()
    note("all_reduce", x.nbytes, size)
    return messages.all_reduce(x.stop_fuse(), "mean")
