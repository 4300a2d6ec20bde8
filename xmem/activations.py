"""Compressed activations: the neutral functions. `xmem.compressing` has the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xmem.api import active
from xmem.errors import UsageError

if TYPE_CHECKING:
    from xmem.compressing import Compression
    from xmem.sensitivity import LayerBits


def compress_activations(
    bits: int | str | Mapping[str, int] = 8,
    *,
    min_bytes: int | str = "64KiB",
    skip: Sequence[Any] = (),
    model: Any = None,
    seed: int | None = None,
    batch: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    error: float = 0.01,
) -> Compression:
    """Keep what forward passes in a block leave for backward in few bits.

    Use as `with xmem.compress_activations(bits=8): loss = ...`; backward may run inside or after.
    Losses do not change. Gradients are off by the rounding, which is stochastic: by about 1 % at 8
    bits (the L2 norm over all parameters: 0.4 to 1.0 % in small MLPs, CNNs, recurrent networks and
    transformers), by 16 to 20 times as much at 4, and by as much as they are at 2, which is for
    chosen layers only. Masks, dropout's noise and the places of a pooling's maxima lose nothing.
    Parameters, the half copies that autocast makes of them, buffers and the data given to a model
    stay as they are. An in-place change that makes backward raise does so here too.

    Args:
        bits: 8, 4 or 2; or bits by the path of a layer, 32 to keep what it saves: layers that are
            not named keep it, those inside a named one too; or "auto": chosen by `choose_bits` when
            the model is first seen.
        min_bytes: smaller tensors stay as they are.
        skip: what is to be kept: tensors, or layers with all inside, by paths, as modules or by
            their class (of one that is no layer itself, what is inside needs `model`).
        model: paths begin there, and are checked; otherwise at the outermost module that runs.
        seed: of the rounding; None: each block of a process rounds anew, alike in each run.
        batch: for "auto", what `loss_fn` takes.
        loss_fn: for "auto", makes the loss.
        error: for "auto", what gradients may be off.

    Returns:
        A block; `.receipt` says what was packed, and what not and why. Applied to nothing warns,
        and so does a layer in `bits` or `skip` of which nothing is saved.

    Raises:
        UsageError: other numbers of bits, or a path that leads nowhere in `model`.
        CompositionError: on entering, or where a module is called, if it cannot work there.
    """
    from xmem.compressing import compress

    if isinstance(bits, str) and bits == "auto":
        from xmem.sensitivity import remembered

        if model is None or loss_fn is None:
            raise UsageError(
                'bits="auto" runs steps of the model: give model=, batch= and loss_fn= too'
            )
        how = {"error": error, "min_bytes": min_bytes, "skip": skip}
        bits = remembered(active(), model, batch, loss_fn, **how)
    elif batch is not None or loss_fn is not None:
        raise UsageError(
            f'batch= and loss_fn= choose bits, and bits={bits!r} is given: bits="auto"'
        )
    return compress(active(), bits, min_bytes=min_bytes, skip=skip, model=model, seed=seed)


def choose_bits(
    model: Any,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    error: float = 0.01,
    min_bytes: int | str = "64KiB",
    skip: Sequence[Any] = (),
) -> LayerBits:
    """Choose for each layer the bits that its activations are kept in, under an error budget.

    Runs a step for each layer, with it alone packed, to measure how much its rounding disturbs the
    gradients, and some more to check the choice. The model is left as it was.

    Args:
        model: a native module.
        batch: inputs and targets, whatever `loss_fn` takes.
        loss_fn: `loss_fn(model, batch)` returns the loss, a scalar.
        error: the L2 norm of what gradients may be off, all together, relative to their own.
        min_bytes: smaller tensors stay as they are.
        skip: layers and tensors to be kept.

    Returns:
        Bits by layer, for `compress_activations(bits=...)`, with the error that was measured.

    Raises:
        UsageError: the error makes no sense, or no layer saves as much as `min_bytes`.
        MeasurementError: a block of `xmem.measure` is open.
    """
    from xmem.sensitivity import choose_bits as choose

    return choose(active(), model, batch, loss_fn, error=error, min_bytes=min_bytes, skip=skip)
