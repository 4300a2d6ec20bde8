"""One model on every rank, gradients averaged once, on PyTorch (DistributedDataParallel of 2.13).

Gradients are views of the buckets that are sent (`gradient_as_bucket_view`), so that there is one
copy of them; it stays between steps. What would leave gradients unaveraged in silence is found when
the optimizer steps: a forward pass that ran inside `no_sync` and whose backward was the last, or a
model that was called past the wrapper.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.graph import _engine_run_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from xmem.distributed.counting import note
from xmem.distributed.world import current
from xmem.distributing import Reduction
from xmem.errors import CompositionError, UsageError
from xmem_torch.communication import counted
from xmem_torch.gradient_hooks import Averaging, average
from xmem_torch.local_parts import is_sharded
from xmem_torch.masters import master_of, parameters_of
from xmem_torch.norms import parts_of

_MEBI = 2**20
_LEAST_BUCKET_BYTES = 2**20  # as PyTorch's own first bucket
_STATIC_GRAPH = (
    "DistributedDataParallel(static_graph=True) loses a reduction after no_sync (pytorch#143580)."
    " Leave static_graph out to accumulate"
)

_NOT_AVERAGED = (
    "the optimizer was to step with gradients that have not been averaged over ranks since its last"
    " step. Call the model that data_parallel returned, not the one inside; call backward once for"
    " each forward pass; make the last forward pass outside of no_sync or, in xmem.accumulate,"
    " after the backward before it; and where some parameters take no part in some steps, say"
    " unused_parameters=True; and freeze layers before data_parallel"
)
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_UNUSED = (
    "some parameters of the model got no gradient in the last backward, so that it was not averaged"
    " as a whole: call data_parallel(..., unused_parameters=True) where some take no part in some"
    " steps, or freeze those that never do (requires_grad_(False)) before data_parallel"
)
_LATE = (
    "{count} parameters of the optimizer, the first of shape {shape}, have gradients that are not"
    " averaged over ranks: they wanted none, or were not there, when data_parallel was called. Set"
    " requires_grad before it; what a model trains cannot change afterwards"
)

# Models that are data-parallel with nobody: there is one rank.
_alone: WeakSet[Any] = WeakSet()
_averaged: Any = WeakTensorKeyDictionary()


class DataParallel(DistributedDataParallel):
    """DistributedDataParallel that knows whether its gradients have been averaged."""

    averaging: Averaging

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; says in xmem's words what PyTorch finds wrong."""
        if torch.is_grad_enabled() and not self.require_backward_grad_sync:
            self.averaging.reduced = False
        elif torch.is_grad_enabled():
            self.averaging.expected = True
        try:
            if not self.find_unused_parameters:
                self._release_buckets()
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if _UNFINISHED in str(error):  # PyTorch has no type for it
                raise CompositionError(_UNUSED) from error
            raise

    def _sync_buffers(self) -> None:
        """Let PyTorch give all ranks rank 0's buffers, in copies one after another."""
        sent = sum(b.nbytes for b in self.modules_buffers)
        note("broadcast", sent, self.averaging.ranks)
        with counted("the broadcast of buffers", sent):
            super()._sync_buffers()

    def _have_new_buckets(self) -> bool:
        """Let PyTorch order its buckets as gradients came in the first step; once."""
        with counted("the agreement on buckets"):
            return bool(self.reducer._rebuild_buckets())

    def _release_buckets(self) -> None:
        """Give back the memory of buckets without gradients, also of those made only now."""
        averaging, parameters = self.averaging, list(self.module.parameters())
        averaging.buckets.release(parameters)
        if not torch.is_grad_enabled() or not self._have_new_buckets():
            return
        self._has_rebuilt_buckets = True
        averaging.buckets.forget()
        trained = tuple(p for p in parameters if p.requires_grad)
        if any(p.grad is not None for p in trained):
            return
        # PyTorch shows its buckets in a backward pass only, so it gets one, which sends nothing.
        averaging.learning = True
        try:
            self.reducer.prepare_for_backward([])
            zero = torch.zeros(())
            zeros = tuple(zero.to(p.device, p.dtype).expand_as(p) for p in trained)
            _engine_run_backward(trained, zeros, False, False, (), True, accumulate_grad=True)
        finally:
            averaging.learning = False
        for p in trained:
            p.grad = None
        averaging.buckets.release(parameters)


def wrap(model: Any, optimizer: Any, reduction: Reduction) -> Any:
    """Return the model to call; with one rank the model itself."""
    _check(model, optimizer)
    ranks = current().size
    if ranks == 1:
        take_alone(model)
        return model
    parallel = DataParallel(
        model,
        bucket_cap_mb=_bucket_bytes(model, reduction) / _MEBI,
        gradient_as_bucket_view=True,
        find_unused_parameters=reduction.unused_parameters,
    )
    parallel.averaging = averaging = Averaging(reduction, ranks)
    parallel.register_comm_hook(averaging, average)
    handles = averaging.buckets.follow(parallel.parameters(), averaging.arrived)
    for p in parallel.parameters():
        if p.requires_grad:
            _averaged[p] = True

    def check_averaged(stepping: Any, *_: Any) -> None:
        if not averaging.reduced:
            raise CompositionError(_NOT_AVERAGED)
        late = [p for p in parameters_of(stepping) if p.grad is not None and not is_averaged(p)]
        if late:
            raise CompositionError(_LATE.format(count=len(late), shape=tuple(late[0].shape)))

    def stepped(*_: Any) -> None:
        averaging.reduced = False

    handles.append(optimizer.register_step_pre_hook(check_averaged))
    handles.append(optimizer.register_step_post_hook(stepped))
    weakref.finalize(parallel, _end, handles, list(model.parameters()))
    return parallel


def _bucket_bytes(model: Any, reduction: Reduction) -> int:
    """Return a size that leaves a small model some buckets, which come and go one by one."""
    total = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return min(reduction.bucket_bytes, max(_LEAST_BUCKET_BYTES, total // 16))


def _end(handles: list[Any], parameters: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    for p in parameters:
        _averaged.pop(p, None)


def take_alone(model: Any) -> None:
    """Let a model that is shared with nobody, since there is one rank, pass for a shared one."""
    _alone.add(model)


def no_sync(model: Any) -> AbstractContextManager[Any]:
    """Reduce nothing inside the block."""
    if model in _alone:
        return nullcontext()
    if is_sharded(model):
        return _unreduced(model)
    own = getattr(model, "no_sync", None)
    if not callable(own):
        raise UsageError(
            f"{type(model).__name__} is not data-parallel: it has no no_sync(). Pass the wrapped"
            " model, or no model= where there is one process"
        )
    if getattr(model, "static_graph", False):
        raise CompositionError(_STATIC_GRAPH)
    return own()


def accumulating(model: Any) -> AbstractContextManager[Any]:
    """Let gradients of several micro-batches add up, as `xmem.accumulate` does.

    A sharded model reduces each of them to its owner: the sums are the same, and unreduced ones
    would take whole gradients.
    """
    return nullcontext() if is_sharded(model) else no_sync(model)


def is_data_parallel(model: Any) -> bool:
    """Say whether a model is what `wrap` returned, or another of PyTorch's."""
    return isinstance(model, DistributedDataParallel) or model in _alone


def is_averaged(parameter: Any) -> bool:
    """Say whether a data-parallel model averages the gradient of a parameter."""
    return parameter in _averaged


@contextmanager
def _unreduced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _check(model: Any, optimizer: Any) -> None:
    if is_data_parallel(model):
        raise CompositionError(f"{type(model).__name__} is data-parallel already")
    parameters = list(model.parameters())
    if any(is_sharded(module) for module in model.modules()):
        raise CompositionError(
            "the model is sharded (shard_model), which averages gradients by itself: train it as"
            " it is, without data_parallel"
        )
    if parts_of(parameters):
        raise CompositionError(
            "the model is split over the ranks (tensor_parallel, pipeline), which are given one"
            " batch: there is nothing to average. Train it as it is, without data_parallel"
        )
    if any(master_of(p) is not p for p in parameters):
        raise CompositionError(
            "the model has float32 masters (xmem.cast_model), which take the gradients away before"
            " they are averaged. Train with xmem.autocast, or cast without optimizer="
        )
    if not any(p.requires_grad for p in parameters):
        raise UsageError(f"{type(model).__name__} has no parameter that wants a gradient")
    own = set(map(id, parameters))
    foreign = [p for p in parameters_of(optimizer) if id(p) not in own]
    if foreign:
        raise UsageError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, the first of"
            f" shape {tuple(foreign[0].shape)}: pass the optimizer of this model's parameters"
        )
