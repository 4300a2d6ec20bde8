"""Less than training: nothing kept for backward; and training in half precision throughout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from xmem.casting import current, in_force
from xmem.errors import UsageError
from xmem.receipts import Receipt, issue
from xmem.sizes import format_size

if TYPE_CHECKING:
    from xmem.backend import Backend


def _check_module(backend: Backend, model: Any) -> None:
    if not backend.checkpoint.is_module(model):
        raise UsageError(f"{model!r} is no module of the active backend; pass its own modules")


@contextmanager
def inference(backend: Backend, model: Any, inputs: Sequence[Any] | None) -> Iterator[Receipt]:
    """Enter evaluation mode without gradients; see `xmem.inference`."""
    _check_module(backend, model)
    saving = None
    note = "pass inputs= to have measured what forward would leave for backward"
    if inputs is not None:
        given = tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
        casting = current()  # measured in its precision, and not listed among what it ran
        unlisted = nullcontext() if casting is None else in_force(casting.again())
        with unlisted:
            saving = backend.checkpoint.cost(model, given, {}).saved_bytes
        note = f"forward would leave {format_size(saving)} for backward"
    with backend.training.evaluating(model) as modules:
        receipt = Receipt(
            "inference", backend.name, modules, expected_saving_bytes=saving, note=note
        )
        with backend.training.no_grad():
            yield receipt


def cast_model(backend: Backend, model: Any, dtype: str, optimizer: Any) -> Receipt:
    """Cast a model and give its optimizer masters; see `xmem.cast_model`."""
    _check_module(backend, model)
    dtype = backend.precision.check_dtype(dtype)
    cast = backend.precision.cast_model(model, dtype, optimizer)
    masters = (
        f"; the optimizer holds {format_size(cast.master_bytes)} of float32 masters"
        + ("" if cast.master_bytes >= 2 * cast.saved_bytes else ", none of what it does not hold")
        if optimizer is not None
        else "; without masters: pass optimizer= to have small updates not lost to rounding"
    )
    return issue(
        Receipt(
            "cast_model",
            backend.name,
            len(cast.names),
            cast.names,
            expected_saving_bytes=cast.saved_bytes - cast.master_bytes,
            note=f"{format_size(cast.saved_bytes)} less of parameters and buffers{masters}",
            _undo=cast.undo,
        )
    )
