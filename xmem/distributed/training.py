"""Train one model on several ranks: averaged gradients, sharded states, sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, get_args

from xmem import accumulating, in_backward
from xmem.api import active
from xmem.distributed.failing import communicating
from xmem.distributed.signatures import Asked, agree
from xmem.distributed.world import current, joined
from xmem.distributing import Compression, Kind, Reduction
from xmem.errors import CompositionError, UsageError, unknown
from xmem.layouts import find_blocks, given
from xmem.receipts import Receipt, issue
from xmem.sizes import parse_size

_ALONE = "There is one rank, so nothing is shared: start the script with xmem launch -n 2."


def data_parallel(
    model: Any,
    optimizer: Any,
    *,
    bucket: int | str = "25MiB",
    compress: Compression | None = None,
    error_feedback: bool = True,
    unused_parameters: bool = False,
) -> Any:
    """Train a model on every rank with a share of the batch each; returns the model to call.

    All ranks get rank 0's parameters and buffers. Gradients of the optimizer's parameters are
    averaged over ranks exactly once per update: in `xmem.backward`, in the framework's own
    backward, and, inside `no_sync` or `xmem.accumulate(model=...)`, in the last one. With one rank
    this warns, and the model trains as it is.

    Args:
        model: a module.
        optimizer: the optimizer of its parameters.
        bucket: the most that is sent in one call, in bytes or like "25MiB".
        compress: what gradients travel as: None, "bf16", "fp16" or "int8".
        error_feedback: with "int8", what compression lost is added to the next gradients.
        unused_parameters: some parameters take no part in some steps. PyTorch then walks the graph
            in every forward; Jittor needs to be told nothing.

    Raises:
        UsageError: an argument that is not known, or an optimizer of other parameters.
        CompositionError: the optimizer steps in backward, or the model is sharded.
        CollectiveMismatchError: the ranks have different models, or ask for different things.
    """
    world = current()
    trained: list[Any] = []

    def check() -> Asked:
        _refuse("data_parallel", optimizer)
        check_module(model)
        if compress is not None and compress not in get_args(Compression):
            raise UsageError(unknown("compression", str(compress), get_args(Compression)))
        flags = {"error_feedback": error_feedback, "unused_parameters": unused_parameters}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise UsageError(f"{name}={flag!r}: give True or False")
        if parse_size(bucket) < 1:
            raise UsageError(f"bucket={bucket!r}: give at least 1 byte, e.g. '25MiB'")
        settings = {"bucket": parse_size(bucket), "compress": compress, **flags}
        trained.extend(_parameters(optimizer))
        return Asked("data_parallel", tuple(settings.items()), kinds_in(model))

    agree("data_parallel", check)
    reduction = Reduction(parse_size(bucket), compress, error_feedback, unused_parameters)
    with communicating("data_parallel"):
        parallel = joined().data_parallel(model, optimizer, reduction)
    issue_on(world.size, Receipt("data_parallel", active().name, len(trained)))
    return parallel


def no_sync(model: Any) -> AbstractContextManager[Any]:
    """Add gradients up on this rank only, inside the block; the next backward averages the sum.

    Raises:
        UsageError: the model is not data-parallel.
    """
    return joined().no_sync(model)


def shard_optimizer(optimizer: Any) -> Any:
    """Keep the states of a share of the parameters on each rank; returns the optimizer to use.

    ZeRO stage 1: Samyam Rajbhandari, Jeff Rasley, Olatunji Ruwase and Yuxiong He, "ZeRO: Memory
    Optimizations Toward Training Trillion Parameter Models", SC 2020. Used together with
    `data_parallel`, which is given the returned optimizer.

    Raises:
        UsageError: it has states already, or is of a kind that cannot be sharded.
        CompositionError: it steps in backward.
        CollectiveMismatchError: the ranks have optimizers of different parameters.
    """
    world = current()

    def check() -> Asked:
        _refuse("shard_optimizer", optimizer)
        settings = (("optimizer", type(optimizer).__name__),)
        return Asked("shard_optimizer", settings, _kinds(optimizer))

    asked = agree("shard_optimizer", check)
    with communicating("shard_optimizer"):
        sharded = joined().shard_optimizer(optimizer)
    issue_on(world.size, Receipt("shard_optimizer", active().name, len(asked.kinds)))
    return sharded


def shard_model(model: Any, *, blocks: Sequence[Any] | None = None) -> Any:
    """Keep a share of the parameters, gradients and states on each rank; returns the model.

    ZeRO stage 3, as fully sharded data parallel: each block's parameters are gathered before its
    passes and freed after them, gradients are reduced to their owners. Each rank trains on its
    share of the batch. Make the optimizer afterwards, of the model's parameters.

    Args:
        model: changed in place.
        blocks: the modules that are gathered one at a time, or their paths; None: those that
            `xmem.apply_checkpointing` would find.

    Raises:
        UsageError: no module, or a path that leads nowhere.
        CompositionError: the model is sharded or data-parallel already, or a block lies in another.
        CollectiveMismatchError: the ranks have different models.
    """
    world = current()
    chosen: list[tuple[str, Any]] = []

    def check() -> Asked:
        _refuse("shard_model")
        check_module(model)
        capability = active().checkpoint
        found = (
            find_blocks(capability, model)
            if blocks is None
            else given(capability, model, blocks, "block")
        )
        chosen.extend(named for several in found for named in several)
        settings = (("blocks", [path for path, _ in chosen]),)
        return Asked("shard_model", settings, kinds_in(model))

    agree("shard_model", check)
    with communicating("shard_model"):
        receipt = joined().shard_model(model, [module for _, module in chosen])
    note = receipt.note
    if not chosen:
        note = (
            f"No blocks were found, so all parameters are gathered at once; name some: blocks=[...]"
            f" {note}".rstrip()
        )
    names = tuple(path for path, _ in chosen)
    receipt = replace(receipt, technique="shard_model", names=names, note=note)
    issue_on(world.size, receipt)
    return model


def refuse_accumulation(
    what: str,
    why: str = "micro-batches before and after it would be shared in different ways",
) -> None:
    """Refuse what cannot come between micro-batches.

    Args:
        what: the call.
        why: a sentence.

    Raises:
        CompositionError: this is inside `xmem.accumulate`.
    """
    if accumulating.current() is not None:
        raise CompositionError(
            f"{what} inside xmem.accumulate: {why}. Call it outside of the block"
        )


def _refuse(what: str, optimizer: Any = None) -> None:
    """Refuse what none of these can be combined with."""
    refuse_accumulation(what)
    if optimizer is None:
        return
    _parameters(optimizer)
    if in_backward.steps_in_backward(optimizer):
        raise CompositionError(
            f"{what} needs gradients that are averaged over all ranks, and optimizer_in_backward"
            " steps each parameter by this rank's own. Undo its receipt first"
        )


def check_module(model: Any) -> None:
    """Refuse what is no module.

    Raises:
        UsageError: says what it is.
    """
    if not active().checkpoint.is_module(model):
        raise UsageError(f"{model!r} is no module of the active backend; pass its own modules")


def kinds_in(model: Any) -> tuple[Kind, ...]:
    """Describe all parameters and buffers of a model, in an order that is the same on all ranks."""
    owned = active().measure.owned(model, None, None)
    tensors = (*owned["parameter"], *owned["buffer"])
    return tuple(sorted(map(_kind, tensors), key=str))  # found in no order


def _parameters(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", None)
    if not groups:
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer: give the optimizer of the model's"
            " parameters"
        )
    return [p for group in groups for p in group["params"]]


def _kinds(optimizer: Any) -> tuple[Kind, ...]:
    return tuple(map(_kind, _parameters(optimizer)))


def _kind(parameter: Any) -> Kind:
    """Describe a parameter, also one that is shared out already, which the backend will refuse."""
    try:
        return joined().describe(parameter)
    except UsageError:
        return Kind(str(parameter.dtype), tuple(parameter.shape), 0)


def issue_on(ranks: int, receipt: Receipt) -> None:
    """Tell observers; one rank alone shares nothing, which warns."""
    issue(replace(receipt, applied_to=0, note=_ALONE) if ranks == 1 else receipt)
