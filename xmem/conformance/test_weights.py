"""Weights in few bits: bytes, errors, gradients to inputs, and what is put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xmem
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, small_workload
from xmem.layouts import modules_of
from xmem.weights import dequantize, quantize_weights

if TYPE_CHECKING:
    from xmem.backend import Backend

_BYTES = {8: 1.0235, 4: 0.5235}
"""For each weight: rows of 256 have a scale for each 88 of them, and one of their own."""
_ERRORS = {8: 0.0065, 4: 0.105}
"""Of normal weights, the largest of 88 being 2.7 times their deviation: 0.62 and 9.7 %."""


def _run(backend: Backend) -> SmallRun:
    need(backend, "quantize", "checkpoint", "models", "training")
    return SmallRun(backend, small_workload(width=256, batch=32))


def _output(run: SmallRun) -> np.ndarray[Any, Any]:
    with xmem.inference(run.model):
        loss = run.loss()
    return np.asarray(run.backend.models.item(loss))


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_take_little_more_than_their_bits(backend: Backend, bits: int) -> None:
    """And errors are those of the rounding."""
    run = _run(backend)
    receipt = quantize_weights(run.model, bits)
    assert receipt.applied_to >= 3, receipt
    elements = sum(layer.elements for layer in receipt.layers)
    assert receipt.after_bytes <= _BYTES[bits] * elements, (receipt.after_bytes, elements)
    assert receipt.before_bytes == 4 * elements
    assert receipt.expected_saving_bytes == receipt.before_bytes - receipt.after_bytes
    assert 0.2 * _ERRORS[bits] <= receipt.mean_error <= receipt.worst_error <= _ERRORS[bits]


def test_what_was_saved_is_freed(backend: Backend) -> None:
    """To the byte, where nothing else holds the weights."""
    run = _run(backend)
    need(backend, "measure")
    model, run.optimizer = run.model, None
    receipt = quantize_weights(model)
    assert receipt.measured_saving_bytes == receipt.expected_saving_bytes, receipt.note


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.1)])
@pytest.mark.parametrize("scheme", ["weight_only", "dynamic"])
def test_the_loss_is_off_by_rounding_and_not_equal(
    backend: Backend, bits: int, scheme: str, most: float
) -> None:
    """An error of exactly zero would mean that nothing was packed."""
    run = _run(backend)
    expected = _output(run)
    quantize_weights(run.model, bits, scheme=scheme)
    assert 0 < abs(_output(run) - expected) <= most * abs(expected)


def test_what_is_put_back_is_what_was_computed_with(backend: Backend) -> None:
    """And the model trains again."""
    run = _run(backend)
    receipt = quantize_weights(run.model)
    packed = _output(run)
    assert dequantize(run.model) == receipt.applied_to
    assert abs(_output(run) - packed) <= 1e-5 * abs(packed)
    again = SmallRun(backend, small_workload(width=256, batch=32))
    quantize_weights(again.model).undo()
    again.optimizer = backend.training.make_optimizer("adam", again.model, learning_rate=1e-3)
    losses = [again.step() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_what_is_not_packed_is_trained_beside_what_is(backend: Backend) -> None:
    """Gradients pass packed layers, to whatever trains below them."""
    run = _run(backend)
    paths = [path for path, _ in modules_of(backend.checkpoint, run.model)]
    whole = quantize_weights(run.model)
    run = _run(backend)
    receipt = quantize_weights(run.model, skip=(whole.names[0],))
    assert receipt.names == whole.names[1:]
    assert set(receipt.names) <= set(paths)
    run.optimizer = backend.training.make_optimizer("adam", run.model, learning_rate=1e-3)
    _, gradients = run.loss_and_gradients()
    below = [g for name, g in gradients.items() if name.startswith(whole.names[0])]
    assert below
    assert all(np.abs(g).max() > 0 for g in below)


def test_nothing_to_pack_warns_and_unknown_values_are_refused(backend: Backend) -> None:
    """Before anything changes."""
    run = _run(backend)
    with pytest.warns(xmem.XmemWarning, match="applied to nothing"):
        assert quantize_weights(run.model, min_elements=10**9).applied_to == 0
    with pytest.raises(xmem.UsageError, match="bits is 3"):
        quantize_weights(run.model, 3)
    with pytest.raises(xmem.UsageError, match="no layer of"):
        dequantize(run.model)
