"""Parameters in shares, gathered block by block (ZeRO-3), on Jittor (1.3.11).

Whole parameters belong to one rank each, such that ranks own about the same number of bytes; on the
others their handles hold one NaN, so that whoever reads them outside of their block notices. A
block's parameters are sent around when its inputs are there and freed after its forward. The block
is taped as a checkpointed region (`segments.py`), which gathers again and computes again in
backward, and the gradient of each parameter is added up on its owner. All of it is lazy: a value
that is waited for inside a gradient callback would keep every gradient so far.

What is no block's: modules outside of blocks that hold parameters are blocks themselves; parameters
that a module holds beside blocks are whole on every rank, and their gradients are averaged.
Buffers, and parameters that are frozen, are whole on every rank too.

`xmem.apply_checkpointing` on top of it makes regions of several blocks: fewer inputs are kept, and
the parameters of a region's blocks are there together while it is computed again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.checkpointing import CheckpointedForward, is_recomputed
from xmem.distributed.counting import note
from xmem.errors import CompositionError, UsageError
from xmem.receipts import Receipt
from xmem_jittor import gradients, messages, methods, ranks, shares
from xmem_jittor.checkpoint import Checkpoint
from xmem_jittor.data_parallel import equalize, is_parallel, keep_order
from xmem_jittor.gathering import ShardedForward, Whole, placeholder, whole
from xmem_jittor.sharded_optimizers import balanced


@dataclass(frozen=True)
class Unit:
    """What is gathered at once.

    Attributes:
        path: of the module.
        module: whose forward needs them.
        parameters: their handles, by path.
    """

    path: str
    module: Any
    parameters: dict[str, Any]


def shard(model: Any, blocks: Sequence[Any]) -> Receipt:
    """Shard a model in place."""
    units, rest = _units(model, blocks)
    _check(model, units)
    if ranks.size() == 1:
        return Receipt("shard_model", "jittor", 0, note="There is one rank.")
    named = {id(p): p for unit in units for p in unit.parameters.values()}
    parameters = list(named.values())
    owners = balanced([p.nbytes for p in parameters], ranks.size())
    whole_bytes = sum(p.nbytes for p in parameters)
    equalize([p for p in model.parameters() if id(p) not in named])
    for parameter, owner in zip(parameters, owners, strict=True):
        _hand_over(parameter, owner, ranks.rank())
    own_bytes = sum(
        p.nbytes for p, owner in zip(parameters, owners, strict=True) if owner == ranks.rank()
    )
    for parameter in rest.values():
        shares.mark(parameter, _share(parameter, "averaged"))
    for module in model.modules():
        keep_order(module)
    undos = [_gathering(unit) for unit in units]
    methods.hold(model)
    return Receipt(
        technique="shard_model",
        backend="jittor",
        applied_to=len(units),
        names=tuple(unit.path for unit in units),
        expected_saving_bytes=whole_bytes - own_bytes,
        note=_told(rest),
        _undo=_Undo([*parameters], list(rest.values()), undos),
    )


def _units(model: Any, blocks: Sequence[Any]) -> tuple[list[Unit], dict[str, Any]]:
    """Return what is gathered together, and the parameters that stay whole."""
    chosen = {id(block) for block in blocks}
    units: list[Unit] = []
    rest: dict[str, Any] = {}

    def holds_blocks(module: Any) -> bool:
        return any(id(m) in chosen for m in module.modules() if m is not module)

    def visit(path: str, module: Any) -> None:
        if id(module) in chosen and holds_blocks(module):
            raise CompositionError(f"a block lies in the block {path!r}; name one of the two")
        if id(module) in chosen or (not holds_blocks(module) and _direct(module)):
            if not any(unit.module is module for unit in units):
                trained = _trained(module.named_parameters())
                units.append(Unit(path, module, {f"{path}.{n}": p for n, p in trained.items()}))
            return
        rest.update((f"{path}.{n}".lstrip("."), p) for n, p in _direct(module).items())
        for name, child in Checkpoint().children(module):
            visit(f"{path}.{name}".lstrip("."), child)

    visit("", model)
    held = {id(p) for unit in units for p in unit.parameters.values()}
    return [u for u in units if u.parameters], {n: p for n, p in rest.items() if id(p) not in held}


def _direct(module: Any) -> dict[str, Any]:
    return _trained(module.named_parameters(recurse=False))


def _trained(named: Any) -> dict[str, Any]:
    return {n: p for n, p in named if p.dtype.is_float() and not p.is_stop_grad()}


def _check(model: Any, units: Sequence[Unit]) -> None:
    """Refuse what cannot be sharded, before anything changes."""
    if shares.kinds(model.parameters()):
        raise CompositionError(f"{type(model).__name__} is sharded already")
    if is_parallel(model):
        raise CompositionError(
            f"{type(model).__name__} is data-parallel: its gradients would be averaged twice. Leave"
            " data_parallel out"
        )
    if not units:
        raise UsageError(f"{type(model).__name__} has no parameters that are trained")
    for unit in units:
        forward = vars(unit.module).get("execute")
        if is_recomputed(forward) and not isinstance(forward, CheckpointedForward):
            raise CompositionError(
                f"{unit.path!r} is planned: take the plan off (undo() of its receipt), shard, and"
                " let xmem.apply_checkpointing make regions"
            )
        half = [n for n, p in unit.parameters.items() if str(p.dtype) != "float32"]
        if half:
            raise CompositionError(
                f"{half[0]!r} is {unit.parameters[half[0]].dtype}; parameters are sharded in"
                " float32. Compute in half under xmem.autocast instead"
            )
    given = {id(p) for unit in units for p in unit.parameters.values()}
    for optimizer in _optimizers():
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in given for p in held):
            raise UsageError(
                f"a {type(optimizer).__name__} of the model's parameters exists already, with"
                " states for all of them. Make the optimizer after shard_model"
            )


def _optimizers() -> Iterator[Any]:
    return (found for found in gc.get_objects() if isinstance(found, jt.optim.Optimizer))


def _share(parameter: Any, kind: Any, owner: int | None = None) -> shares.Share:
    return shares.Share(kind, tuple(parameter.shape), str(parameter.dtype), owner)


def _hand_over(parameter: Any, owner: int, rank: int) -> None:
    """Give rank 0's values to the owner, and let the others hold a placeholder."""
    share = _share(parameter, "owned", owner)
    if rank == 0 and owner != 0:
        sending = messages.send(parameter.detach(), owner)
        messages.wait(sending)
        note("send", parameter.nbytes, ranks.size())
    if rank == owner and owner != 0:
        gradients.put(parameter, messages.receive(share.shape, share.dtype, 0))
    if rank != owner:
        gradients.put(parameter, placeholder(share.dtype))
    jt.sync([parameter, messages.token()])
    shares.mark(parameter, share)


def _gathering(unit: Unit) -> Callable[[], None]:
    """Let a block gather its parameters; returns the undo."""

    def wrap(forward: Callable[..., Any]) -> Any:
        if isinstance(forward, CheckpointedForward):
            forward = forward.forward  # it is recomputed anyway, and once is enough
        return ShardedForward(Whole(forward, tuple(unit.parameters.values())), unit.path)

    return Checkpoint().replace_forward(unit.module, wrap)


@dataclass
class _Undo:
    """Makes a model whole again on every rank; collective."""

    parameters: list[Any]
    rest: list[Any]
    undos: list[Callable[[], None]]

    def __call__(self) -> None:
        """Gather all."""
        while self.undos:
            self.undos.pop()()
        for parameter in self.parameters:
            share = shares.of(parameter)
            if share is not None:
                gradients.put(parameter, whole(parameter, share))
                parameter.sync()
                shares.unmark(parameter)
        for parameter in self.rest:
            shares.unmark(parameter)
        self.parameters, self.rest = [], []


def _told(rest: dict[str, Any]) -> str:
    if not rest:
        return ""
    names = ", ".join(list(rest)[:3]) + (", ..." if len(rest) > 3 else "")
    return f"{len(rest)} parameters beside blocks stay whole on every rank: {names}"
