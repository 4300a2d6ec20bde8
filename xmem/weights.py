"""Weights in 8 or 4 bits for inference: what is packed, what is left out and why.

The format is `xmem/weights_format.py`'s. "weight_only" unpacks a layer's weight whenever it is
used; "dynamic" also takes each row of a linear layer's inputs to 8 bits and multiplies whole
numbers.
"""

from __future__ import annotations

import fnmatch
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xmem import api
from xmem.errors import UsageError, unknown
from xmem.layouts import modules_of
from xmem.receipts import Receipt, issue
from xmem.sizes import format_size

if TYPE_CHECKING:
    from xmem.backend import Backend

BITS = (8, 4)
SCHEMES = ("weight_only", "dynamic")
MIN_ELEMENTS = 4096
LARGEST = 1e37
"""Beyond it a weight is not packed, since what it unpacks to may be infinite."""


@dataclass(frozen=True)
class PackedLayer:
    """A layer whose weight was packed.

    Attributes:
        path: where it is in the model.
        elements: how many weights it has.
        before_bytes: what they took.
        after_bytes: what they take; 0 where another layer shares the packed weight.
        error: the norm of what was lost, relative to the weight's.
        scheme: "weight_only" or "dynamic".
    """

    path: str
    elements: int
    before_bytes: int
    after_bytes: int
    error: float
    scheme: str


@dataclass(frozen=True)
class WeightsReceipt(Receipt):
    """What `quantize_weights` was applied to.

    `undo()` gives the layers weights that are as the packed ones unpack: what they were before is
    gone, and with it the bytes that were saved.

    Attributes:
        layers: those that were packed.
        left_out: paths of layers that were not, with the reason.
        before_bytes: what the packed weights took.
        after_bytes: what they take.
    """

    layers: tuple[PackedLayer, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    before_bytes: int = 0
    after_bytes: int = 0

    @property
    def mean_error(self) -> float:
        """The mean over the layers of their relative errors."""
        return sum(layer.error for layer in self.layers) / max(1, len(self.layers))

    @property
    def worst_error(self) -> float:
        """The largest relative error of a layer."""
        return max((layer.error for layer in self.layers), default=0.0)


def quantize_weights(
    model: Any,
    bits: int = 8,
    *,
    scheme: str = "weight_only",
    min_elements: int = MIN_ELEMENTS,
    skip: Sequence[str] = (),
) -> WeightsReceipt:
    """Keep the weights of linear, convolution and embedding layers in few bits, for inference.

    The model is changed in place: its modules stay, and their weights are packed. Gradients still
    flow to the inputs, so that adapters beside the layers can be trained.

    Args:
        model: a native module.
        bits: 8 or 4.
        scheme: "weight_only", or "dynamic": the inputs of linear layers in 8 bits too.
        min_elements: smaller weights stay as they are.
        skip: paths of modules, or patterns of them, that stay as they are with all inside them.

    Returns:
        A receipt with bytes, errors, and what was left out and why; its undo is `dequantize`.

    Raises:
        UsageError: an unknown value, or a path that leads nowhere.
        NativeBuildError: the kernels do not compile.
    """
    backend = api.active()
    if not backend.checkpoint.is_module(model):
        raise UsageError(f"{model!r} is no module of the active backend; pass its own modules")
    if bits not in BITS or not isinstance(bits, int):
        raise UsageError(f"bits is {bits!r}; weights are packed in 8 or 4")
    if scheme not in SCHEMES:
        raise UsageError(unknown("scheme", scheme, SCHEMES))
    if not isinstance(min_elements, int) or isinstance(min_elements, bool) or min_elements < 0:
        raise UsageError(f"min_elements is {min_elements!r}; give a number of weights, 0 or more")
    paths = tuple(_skipped(backend, model, skip))
    before = _allocated(backend)
    receipt = backend.quantize.quantize_weights(
        model, bits, scheme, min_elements=min_elements, skip=paths
    )
    after = _allocated(backend)
    if receipt.applied_to and before is not None and after is not None:
        receipt = replace(receipt, measured_saving_bytes=before - after)
        if before - after < (receipt.expected_saving_bytes or 0):
            held = (
                "; less was freed: something else holds weights (an optimizer, a list of"
                " parameters)"
            )
            receipt = replace(receipt, note=receipt.note + held)
    found: WeightsReceipt = issue(receipt)  # type: ignore[assignment]
    return found


def dequantize(model: Any) -> int:
    """Put weights that `quantize_weights` packed back, as they unpack; returns how many layers.

    Raises:
        UsageError: nothing in the model is packed.
    """
    backend = api.active()
    if not backend.checkpoint.is_module(model):
        raise UsageError(f"{model!r} is no module of the active backend; pass its own modules")
    count = backend.quantize.dequantize(model)
    if not count:
        raise UsageError(
            f"no layer of {type(model).__name__} has packed weights; xmem.quantize_weights packs"
            " them"
        )
    return count


def make_receipt(
    backend: str,
    bits: int,
    scheme: str,
    layers: Sequence[PackedLayer],
    left_out: Sequence[tuple[str, str]],
    undo: Callable[[], None],
) -> WeightsReceipt:
    """Return the receipt of what a backend has packed."""
    before = sum(layer.before_bytes for layer in layers)
    after = sum(layer.after_bytes for layer in layers)
    receipt = WeightsReceipt(
        technique="quantize_weights",
        backend=backend,
        applied_to=len(layers),
        names=tuple(layer.path for layer in layers),
        expected_saving_bytes=before - after,
        layers=tuple(layers),
        left_out=tuple(left_out),
        before_bytes=before,
        after_bytes=after,
        _undo=undo,
    )
    return replace(receipt, note=_note(receipt, bits, scheme))


def _note(receipt: WeightsReceipt, bits: int, scheme: str) -> str:
    reasons: dict[str, list[str]] = {}
    for path, reason in receipt.left_out:
        reasons.setdefault(reason, []).append(path or "the model itself")
    left = "; ".join(
        f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}: {why}"
        for why, paths in reasons.items()
    )
    if not receipt.layers:
        if not left:
            return "No linear, convolution or embedding layer."
        remedies = {
            "fewer than": "lower min_elements",
            "in skip": "leave modules out of skip",
            "packed already": "call xmem.dequantize(model) before you pack anew",
        }
        found = [
            say for start, say in remedies.items() if any(r.startswith(start) for r in reasons)
        ]
        what = ", or ".join(found)
        return f"Left out: {left}." + (f" {what[0].upper()}{what[1:]}." if found else "")
    note = (
        f"weights of {format_size(receipt.before_bytes)} take {format_size(receipt.after_bytes)} in"
        f" {bits} bits; relative error {100 * receipt.mean_error:.2f} % in the mean,"
        f" {100 * receipt.worst_error:.2f} % at worst"
    )
    alone = [layer.path for layer in receipt.layers if layer.scheme != scheme]
    if alone:
        note += f"; weight_only, since not linear: {', '.join(alone)}"
    return note + (f"; left out: {left}" if left else "")


def _skipped(backend: Backend, model: Any, skip: Sequence[str]) -> Iterator[str]:
    """Yield the paths that `skip` names, with those of all modules inside."""
    if isinstance(skip, str):
        raise UsageError(f"skip={skip!r}: give a sequence, e.g. ({skip!r},)")
    paths = [path for path, _ in modules_of(backend.checkpoint, model)]
    for pattern in skip:
        found = [path for path in paths if fnmatch.fnmatchcase(path, str(pattern))]
        if not found:
            raise UsageError(unknown("module in skip", pattern, paths))
        for path in found:
            yield from (p for p in paths if p == path or p.startswith(f"{path}."))


def _allocated(backend: Backend) -> int | None:
    """Return the bytes that are allocated, where they can be counted."""
    gc.collect(0)
    try:
        backend.measure.synchronize()
        return backend.measure.counters().allocated_bytes
    except (NotImplementedError, AttributeError):
        return None
