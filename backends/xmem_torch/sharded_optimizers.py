"""States of a share of the parameters on each rank (ZeRO-1), on PyTorch (2.13).

The optimizer stays the same object: before its step the gradients of parameters that others own are
set aside, so that it makes no states of them; after it the owners send what they have updated.
PyTorch's ZeroRedundancyOptimizer needs as many bytes (48.9 MiB a rank for 13.1 MiB of parameters,
with buckets that stay), and is another object made of a class: its states are hidden from a meter
and its state_dict is not the optimizer's. Here groups, schedulers, scalers, clipping and xmem's
optimizers in few bits work as they do on one rank.

Whole parameters are owned, so that shares are equal only as far as sizes allow.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from xmem.distributed.counting import note
from xmem.distributed.sending import buffer
from xmem.distributed.world import current
from xmem.errors import CompositionError, UsageError, XmemWarning
from xmem_torch import communication, few_bits, ranks
from xmem_torch.communication import counted
from xmem_torch.data_parallel import is_averaged
from xmem_torch.masters import are_masters, parameters_of
from xmem_torch.norms import parts_of
from xmem_torch.streamed_parameters import brought_in

_TOGETHER_BYTES = 2**20  # small parameters are sent together; larger ones take no buffer
_NOT_AVERAGED = (
    "shard_optimizer: the gradients of the optimizer's parameters are not averaged by"
    " data_parallel, so each rank updates its share from its own. Call"
    " xmem.distributed.data_parallel(model, optimizer), or average them yourself before each step"
)

_sharded: WeakKeyDictionary[Any, Shares] = WeakKeyDictionary()


class Shares:
    """Which rank owns what of an optimizer, and the step by shares."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._aside: list[tuple[Any, Any]] = []
        self._looked = False

    def owners(self, parameters: Sequence[Any]) -> list[int]:
        """Return the owner of each: the largest first, each to whoever has least."""
        loads = [0] * self._ranks
        found = [0] * len(parameters)
        order = sorted(range(len(parameters)), key=lambda i: (-parameters[i].nbytes, i))
        for i in order:
            found[i] = loads.index(min(loads))
            loads[found[i]] += parameters[i].nbytes
        return found

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Leave the optimizer the gradients of this rank's parameters."""
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise CompositionError(
                "optimizer.step(closure) computes gradients inside the step, where a sharded"
                " optimizer has its share of them only. Call backward first, then step()"
            )
        self._put_back()
        parameters = list(parameters_of(optimizer))
        if not self._looked:
            self._looked = True
            if not all(is_averaged(p) for p in parameters if p.grad is not None):
                warnings.warn(_NOT_AVERAGED, XmemWarning, stacklevel=4)
        for p, owner in zip(parameters, self.owners(parameters), strict=True):
            if owner != self._rank and p.grad is not None:
                self._aside.append((p, p.grad))
                p.grad = None

    def after(self, optimizer: Any, *_: Any) -> None:
        """Give all ranks what their owners have updated."""
        self._put_back()
        parameters = list(parameters_of(optimizer))
        owners = self.owners(parameters)
        with torch.no_grad(), counted("the broadcast of updated parameters"):
            for owner in range(self._ranks):
                owned = [
                    p
                    for p, o in zip(parameters, owners, strict=True)
                    if o == owner and p.grad is not None
                ]
                with brought_in(owned):
                    _send(owned, owner)

    def _put_back(self) -> None:
        while self._aside:
            parameter, gradient = self._aside.pop()
            if parameter.grad is None:
                parameter.grad = gradient


def shard(optimizer: Any) -> Any:
    """Return the optimizer to use."""
    _check(optimizer)
    world = current()
    if world.size == 1:
        return optimizer
    shares = _sharded[optimizer] = Shares(world.rank, world.size)
    optimizer.register_step_pre_hook(shares.before)
    optimizer.register_step_post_hook(shares.after)
    return optimizer


def owners_of(optimizer: Any) -> list[int] | None:
    """Return the owner of each parameter of a sharded optimizer, None of another."""
    shares = _sharded.get(optimizer)
    return None if shares is None else shares.owners(list(parameters_of(optimizer)))


def _send(owned: Sequence[Any], owner: int) -> None:
    """Broadcast tensors, small ones of one type together."""
    small: dict[torch.dtype, list[Any]] = {}
    works = []
    for p in owned:
        if p.is_contiguous() and p.nbytes >= _TOGETHER_BYTES // 16:
            note("broadcast", p.nbytes, ranks.size())
            works.append(dist.broadcast(p.data, owner, async_op=True))
        else:
            small.setdefault(p.dtype, []).append(p)
    for tensors in small.values():
        _send_together(tensors, owner)
    for work in works:
        ranks.wait(work)


def _send_together(tensors: Sequence[Any], owner: int) -> None:
    start = 0
    while start < len(tensors):
        end, size = start + 1, tensors[start].nbytes
        while end < len(tensors) and size + tensors[end].nbytes <= _TOGETHER_BYTES:
            size += tensors[end].nbytes
            end += 1
        several = tensors[start:end]
        note("broadcast", size, ranks.size())
        with buffer(size):
            flat = communication.flatten(several)
            ranks.wait(dist.broadcast(flat, owner, async_op=True))
            for tensor, part in zip(several, communication.split(flat, several), strict=True):
                tensor.copy_(part)
        start = end


def _check(optimizer: Any) -> None:
    kind = type(optimizer)
    if optimizer in _sharded:
        raise CompositionError("the optimizer is sharded already")
    plain = f"{kind.__module__}.".startswith("torch.optim.")
    known = plain or isinstance(optimizer, few_bits.Optimizer)
    if not known or kind is torch.optim.LBFGS:
        raise UsageError(
            f"{kind.__module__}.{kind.__name__} may look at all parameters at once, and would see"
            " a share of them; torch.optim's optimizers (but LBFGS) and those of xmem.optim can be"
            " sharded"
        )
    if optimizer.state:
        raise UsageError(
            f"the optimizer has states of {len(optimizer.state)} parameters already: shard it"
            " before its first step, and load states afterwards (xmem.distributed.load)"
        )
    parameters = list(parameters_of(optimizer))
    if parts_of(parameters):
        raise CompositionError(
            "the optimizer's parameters are shared out over the ranks (shard_model,"
            " tensor_parallel, pipeline), and its states with them: use it as it is, without"
            " shard_optimizer"
        )
    if are_masters(parameters):
        raise CompositionError(
            "the optimizer has float32 masters of half parameters (xmem.cast_model), which are"
            " rounded after each step, on every rank: train with xmem.autocast, or cast without"
            " optimizer="
        )
    if any(torch.nn.parameter.is_lazy(p) for p in parameters):
        raise UsageError("a parameter of the optimizer has no size yet: run the model once")
