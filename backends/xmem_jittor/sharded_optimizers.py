"""States of a share of the parameters on each rank (ZeRO-1), on Jittor (1.3.11).

The optimizer stays the same object, so schedulers and whoever else holds it go on with it. Each
parameter belongs to one rank, such that they get about the same number of bytes. An optimizer's
groups hold all parameters and gradients and the states of this rank's own; while it steps they hold
its own parameters and gradients too, and afterwards each rank sends what it has updated.

Works for optimizers whose states lie in their groups, in lists with an entry for each parameter:
`jt.optim`'s and xmem's. `state_dict` is of this rank's share;
`xmem.distributed.full_state` gathers all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import jittor as jt

from xmem.distributed.counting import note
from xmem.errors import CompositionError, UsageError
from xmem_jittor import few_bits, gradients, masters, messages, methods, ranks, shares, training
from xmem_jittor.averaging import DEFAULT, Averaging, known
from xmem_jittor.data_parallel import equalize
from xmem_jittor.flat import count_buffer
from xmem_jittor.message_nodes import joined, view

_SENT_BYTES = 1 << 20  # what is larger goes without a copy
_STATES = ("m", "v", "values", "steps")  # what jt.optim's and xmem's are called
_KINDS: tuple[type, ...] = (
    jt.optim.Optimizer,
    jt.optim.SGD,
    jt.optim.RMSprop,
    jt.optim.Adam,
    jt.optim.AdamW,
    training.Adam,
)

_sharded: WeakKeyDictionary[Any, ShardedStates] = WeakKeyDictionary()


def shard(optimizer: Any) -> Any:
    """Return the optimizer to use: the same."""
    _check(optimizer)
    if ranks.size() > 1:
        equalize([p for group in optimizer.param_groups for p in group["params"]])
        _sharded[optimizer] = ShardedStates(optimizer)
        if known(optimizer) is None:
            # Not left to Jittor: its own reductions may come in another order on each rank.
            methods.average(optimizer, Averaging(DEFAULT))
    return optimizer


def of(optimizer: Any) -> ShardedStates | None:
    """Return what is known of an optimizer whose states are sharded."""
    return _sharded.get(optimizer)


def balanced(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return an owner for each size, the largest first, each to the rank with the least so far."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[i]] += sizes[i]
    return owners


def state_names(optimizer: Any, group: dict[str, Any]) -> list[str]:
    """Return the names of a group's lists with an entry for each parameter."""
    own = (*getattr(optimizer, "moments", ()), *getattr(optimizer, "factors", ()))
    return [
        name
        for name, held in group.items()
        if isinstance(held, list) and (name in own or name in _STATES)
    ]


class ShardedStates:
    """What makes an optimizer keep the states of this rank's share.

    Args:
        optimizer: changed in place.

    Attributes:
        owners: of parameters, by group of the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        # Weak: the optimizer holds this object, by the methods it gets.
        self._optimizer: Callable[[], Any] = ref(optimizer)
        self._stepping = False
        self._rank, self._size = ranks.rank(), ranks.size()
        given = [p for group in optimizer.param_groups for p in group["params"]]
        owners = iter(balanced([p.nbytes for p in given], self._size))
        self.owners = [[next(owners) for _ in g["params"]] for g in optimizer.param_groups]
        for group, owned in zip(optimizer.param_groups, self.owners, strict=True):
            for name in state_names(optimizer, group):
                group[name] = self._own(group[name], owned)
        self._before = {name: vars(optimizer).get(name) for name in ("step", "add_param_group")}
        optimizer.step = self.step
        optimizer.add_param_group = self.add_param_group

    def _own(self, values: Sequence[Any], owners: Sequence[int]) -> list[Any]:
        return [v for v, owner in zip(values, owners, strict=True) if owner == self._rank]

    @contextmanager
    def restricted(self) -> Iterator[None]:
        """Let groups hold this rank's parameters and gradients only, inside the block."""
        optimizer = self._optimizer()
        whole = []
        for group, owned in zip(optimizer.param_groups, self.owners, strict=True):
            held = {name: group[name] for name in ("params", "grads") if name in group}
            group.update({name: self._own(values, owned) for name, values in held.items()})
            whole.append((group, held))
        try:
            yield
        finally:
            for group, held in whole:
                group["params"] = held["params"]
                if "grads" in held and "grads" in group:  # ours drop them when they have stepped
                    group["grads"] = held["grads"]

    def step(self, loss: Any = None, retain_graph: bool = False) -> Any:
        """Compute gradients of all, update this rank's parameters, and exchange them."""
        optimizer = self._optimizer()
        if loss is not None:
            optimizer.backward(loss, retain_graph)
        gradients.check_averaged(optimizer, "step")
        with self.restricted():
            if any(group["params"] for group in optimizer.param_groups):
                result = self._original("step")()
            else:
                result = optimizer.zero_grad()
        self._exchange()
        return result

    def _original(self, name: str) -> Any:
        optimizer = self._optimizer()
        return self._before[name] or getattr(type(optimizer), name).__get__(optimizer)

    def _exchange(self) -> None:
        """Let each rank send the parameters that it has updated, in buffers."""
        optimizer = self._optimizer()
        waiting: dict[tuple[int, str], list[Any]] = {}
        for group, owned in zip(optimizer.param_groups, self.owners, strict=True):
            for parameter, owner in zip(group["params"], owned, strict=True):
                if parameter.is_stop_grad():
                    continue
                several = waiting.setdefault((owner, str(parameter.dtype)), [])
                if several and sum(p.nbytes for p in several) + parameter.nbytes > _SENT_BYTES:
                    self._send(several, owner)
                    several.clear()
                several.append(parameter)
        for (owner, _), several in waiting.items():
            self._send(several, owner)

    def _send(self, parameters: list[Any], owner: int) -> None:
        dtype, count = str(parameters[0].dtype), sum(p.numel() for p in parameters)
        shape = tuple(parameters[0].shape) if len(parameters) == 1 else (count,)
        sent = None
        if owner == self._rank:
            held = [p.detach() for p in parameters]
            sent = held[0] if len(held) == 1 else joined(held)
        size_bytes = sum(p.nbytes for p in parameters)
        note("broadcast", size_bytes, self._size)
        if len(parameters) > 1:
            count_buffer(size_bytes)
        flat = messages.broadcast(sent, owner, shape, dtype)
        if owner == self._rank:
            return
        place = 0
        for parameter in parameters:
            gradients.put(parameter, view(flat, parameter.shape, place))
            place += parameter.numel()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group, with the states of this rank's share of it."""
        optimizer = self._optimizer()
        self._original("add_param_group")(group)
        added = optimizer.param_groups[-1]
        owners = balanced([p.nbytes for p in added["params"]], self._size)
        for name in state_names(optimizer, added):
            added[name] = self._own(added[name], owners)
        self.owners.append(owners)


def _check(optimizer: Any) -> None:
    kind = type(optimizer)
    if kind not in _KINDS and not isinstance(optimizer, few_bits.Optimizer):
        known = ", ".join(f"{k.__module__}.{k.__qualname__}" for k in _KINDS)
        raise UsageError(
            f"shard_optimizer does not know where {kind.__module__}.{kind.__qualname__} keeps its"
            f" states; it knows {known} and xmem.optim's"
        )
    if optimizer in _sharded:
        raise CompositionError("the optimizer's states are sharded already")
    if masters.masters_of(optimizer):
        raise CompositionError(
            "the optimizer holds float32 masters (xmem.cast_model), which are not sharded. Leave"
            " cast_model's optimizer= out, or shard_optimizer"
        )
    if shares.kinds(p for group in optimizer.param_groups for p in group["params"]):
        raise CompositionError(
            "the optimizer's parameters are sharded, and its states with them: leave"
            " shard_optimizer out"
        )
    updated = any(step for group in optimizer.param_groups for step in group.get("steps", ()))
    if optimizer.n_step or getattr(optimizer, "updates", 0) or updated:
        raise UsageError(
            f"the {kind.__name__} has stepped {optimizer.n_step} times and has states already:"
            " shard it before training, and load with xmem.distributed.load_full_state"
        )
