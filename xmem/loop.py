"""The neutral training loop: precision, gradients, updates, and what needs none of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from xmem import accumulating, in_backward
from xmem.api import active
from xmem.errors import UsageError

if TYPE_CHECKING:
    from xmem.accumulating import Accumulation
    from xmem.autocasting import Autocast
    from xmem.receipts import Receipt
    from xmem.scaling import GradScaler


def autocast(
    dtype: str = "auto",
    *,
    keep_fp32: Sequence[Any] = (),
    model: Any = None,
    enabled: bool = True,
) -> Autocast:
    """Compute in half precision inside a `with` block; parameters and gradients stay float32.

    Softmax, normalisations and losses are computed in float32 in any case. Blocks nest; another
    thread enters a block of its own; a checkpointed region is recomputed as it was first run. Also
    a decorator.

    Args:
        dtype: "auto" (what this framework and device do best), "bfloat16" or "float16".
        keep_fp32: what else stays in float32: names of operations (`xmem.operations.OPERATIONS`),
            modules, their types, names of types, or paths in the model and patterns of them.
        model: the model in which modules are looked for by type, name or path.
        enabled: False makes a region of plain precision.

    Returns:
        A block; `with xmem.autocast() as ac:` has `ac.operations`, what ran in which type, and
        `ac.receipt`, what that should save.

    Raises:
        CapabilityError: the active backend does not offer this type, with the reason.
        UsageError: an unknown type or name, with the valid ones.
    """
    from xmem.autocasting import Autocast

    return Autocast(active(), dtype, keep_fp32, model=model, enabled=enabled)


def backward(loss: Any, optimizer: Any) -> None:
    """Compute the gradients of a scalar loss for the optimizer's parameters, and add them up.

    Inside `xmem.accumulate` the loss is divided by the number of micro-batches.

    Raises:
        UsageError: the gradients that are there have been unscaled already.
    """
    accumulating.check_scale(optimizer)
    accumulation = accumulating.current()
    if accumulation is None:
        active().training.backward(loss, optimizer)
    else:
        accumulation.backward(loss, optimizer)


def optimizer_step(optimizer: Any) -> Any:
    """Update the parameters from the gradients that `backward` left.

    Raises:
        UsageError: inside `xmem.accumulate`, micro-batches are missing.
        CompositionError: the optimizer steps in backward.
    """
    in_backward.check("optimizer_step", optimizer)
    accumulation = accumulating.current()
    if accumulation is not None:
        accumulation.check_step()
    return active().training.optimizer_step(optimizer)


def zero_grad(optimizer: Any) -> None:
    """Forget the gradients and give their memory back.

    Raises:
        UsageError: between the micro-batches of `xmem.accumulate`.
    """
    accumulating.check("zero_grad")
    accumulating.mark_unscaled(optimizer, unscaled=False)
    active().training.zero_grad(optimizer)


def clip_grad_norm_(target: Any, max_norm: float, *, norm_type: float = 2.0) -> Any:
    """Scale gradients down so that their norm over all of them is at most `max_norm`.

    Razvan Pascanu, Tomas Mikolov, Yoshua Bengio, "On the difficulty of training recurrent neural
    networks", ICML 2013. With a scaler, call `scaler.unscale_(optimizer)` first.

    Args:
        target: the optimizer; where gradients belong to parameters (PyTorch), these too.
        max_norm: the largest norm.
        norm_type: the p of the norm; `math.inf` for the largest value.

    Returns:
        The norm before, a scalar of the framework that has not been waited for.

    Raises:
        UsageError: a norm that is not above 0, gradients that are not there, or a part of them.
        CompositionError: the optimizer steps in backward.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise UsageError(
            f"clip_grad_norm_ got max_norm={max_norm!r}, norm_type={norm_type!r}: both are above 0"
        )
    accumulating.check("clip_grad_norm_")
    in_backward.check("clip_grad_norm_", target)
    return active().training.clip_grad_norm_(target, float(max_norm), norm_type=float(norm_type))


def accumulate(
    steps: int, optimizer: Any = None, *, model: Any = None, scaler: GradScaler | None = None
) -> Accumulation:
    """Add up the gradients of several micro-batches, as if they were one batch.

        with xmem.accumulate(4, optimizer):
            for inputs, targets in micro_batches:
                xmem.backward(loss_of(model(inputs), targets), optimizer)

    Inside, `xmem.backward` divides a mean loss by the number of micro-batches and leaves nothing
    behind but gradients. The block steps the optimizer once and forgets the gradients, if it was
    given one; else that is done after it.

    Args:
        steps: the number of micro-batches of this update; fewer or more is an error.
        optimizer: stepped once at the end.
        model: a data-parallel model, whose gradients are then reduced once, in the last one.
        scaler: steps the optimizer, where losses are scaled.

    Raises:
        UsageError: another number of micro-batches, or a step between them.
        CompositionError: inside another such block.
    """
    from xmem.accumulating import Accumulation

    return Accumulation(active(), steps, optimizer, model=model, scaler=scaler)


def no_grad() -> AbstractContextManager[None]:
    """Keep nothing for backward inside the block."""
    return active().training.no_grad()


def inference(
    model: Any, *, inputs: Sequence[Any] | None = None
) -> AbstractContextManager[Receipt]:
    """Put a model into evaluation mode and keep nothing for backward, inside the block.

    Args:
        model: a native module; each of its modules gets its training flag back afterwards.
        inputs: the model's inputs; with them, the receipt says how many bytes forward would have
            left for backward. Measuring that runs the model twice with gradients.

    Returns:
        A context manager that gives a Receipt.
    """
    from xmem.inferring import inference as infer

    return infer(active(), model, inputs)


def cast_model(model: Any, dtype: str = "auto", *, optimizer: Any = None) -> Receipt:
    """Turn a model's parameters and buffers into half precision, for pure half training.

    The optimizer, if given, keeps float32 masters and updates those (Micikevicius et al., ICLR
    2018); gradients reach it in float32. Without masters small updates are lost to rounding.
    Normalisation layers keep their running statistics in float32.

    Args:
        model: a native module; inputs then have to be of the half type too.
        dtype: "auto", "bfloat16" or "float16".
        optimizer: the optimizer of the model's parameters, or several; changed in place.

    Returns:
        A receipt; `receipt.undo()` puts float32 back, with what was learnt since.

    Raises:
        UsageError: an unknown type, or an optimizer of other parameters.
        CapabilityError: the active backend does not offer this type, with the reason.
    """
    from xmem.inferring import cast_model as cast

    return cast(active(), model, dtype, optimizer)


def log_value(loss: Any) -> float:
    """Return the value of a scalar tensor, for a log; holds no graph. Waits for it."""
    return active().training.value(loss)
