"""The training loop: micro-batches, clipping, inference, logging, half weights."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xmem
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, relative_error, small_workload
from xmem.workloads import make_batch

if TYPE_CHECKING:
    from xmem.backend import Backend

SIZE = {"depth": 4, "width": 64, "batch": 512}


def _run(backend: Backend, **size: int) -> SmallRun:
    need(backend, "models", "training")
    return SmallRun(backend, small_workload(**{**SIZE, **size}))


def _micro_batches(run: SmallRun, steps: int, **size: int) -> list[tuple[Any, Any]]:
    inputs, targets = make_batch(small_workload(**{**SIZE, **size}))
    pieces = zip(np.split(inputs, steps), np.split(targets, steps), strict=True)
    tensor = run.backend.models.tensor
    return [(tensor(x), tensor(y)) for x, y in pieces]


def _loss(run: SmallRun, batch: tuple[Any, Any]) -> Any:
    return run.backend.models.loss("mse", run.model(batch[0]), batch[1])


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_micro_batches_have_the_gradients_of_one_large_batch(backend: Backend, steps: int) -> None:
    """Bar 1e-6; what differs is the order of sums."""
    run = _run(backend)
    _, expected = run.loss_and_gradients()
    with xmem.accumulate(steps) as micro:
        for batch in _micro_batches(run, steps):
            assert micro.is_last == (micro.done == steps - 1)
            xmem.backward(_loss(run, batch), run.optimizer)
    found = backend.training.gradients(run.model, run.optimizer)
    assert relative_error(found, expected) <= 1e-6


def test_an_accumulation_steps_once(backend: Backend) -> None:
    """The loss after it is that after one step on the large batch."""
    losses = []
    for steps in (1, 4):
        run = _run(backend)
        for _ in range(3):
            with xmem.accumulate(steps, run.optimizer):
                for batch in _micro_batches(run, steps):
                    xmem.backward(_loss(run, batch), run.optimizer)
        losses.append(xmem.log_value(run.loss()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] < 0.999 * xmem.log_value(_run(backend).loss())


def test_more_micro_batches_take_no_more_memory(backend: Backend) -> None:
    """Eight against two, of the same size; bar 1.05."""
    need(backend, "measure")
    peaks = {}
    for steps in (2, 8):
        run = _run(backend)
        batches = _micro_batches(run, steps, batch=512 * steps)
        for _ in range(3):
            with (
                xmem.measure(model=run.model, optimizer=run.optimizer, inputs=batches) as m,
                xmem.accumulate(steps, run.optimizer),
            ):
                for batch in batches:
                    xmem.backward(_loss(run, batch), run.optimizer)
        peaks[steps] = m.peak_above_static_bytes
    assert peaks[8] <= 1.05 * peaks[2], peaks


def test_another_number_of_micro_batches_is_refused(backend: Backend) -> None:
    """Fewer, more, and a step in between."""
    run = _run(backend)
    for steps, done, said in ((2, 1, "has had 1 micro-batches"), (1, 2, "one more")):
        with pytest.raises(xmem.UsageError, match=said):
            _accumulate(run, steps, done)
    with (
        pytest.raises(xmem.CompositionError, match="inside accumulate"),
        xmem.accumulate(1),
        xmem.accumulate(1),
    ):
        pass
    with pytest.raises(xmem.UsageError, match="steps=0"):
        xmem.accumulate(0)
    run.step()  # nothing is left behind


def _accumulate(
    run: SmallRun, steps: int, done: int, then: Callable[[], object] | None = None
) -> None:
    with xmem.accumulate(steps):
        for _ in range(done):
            xmem.backward(run.loss(), run.optimizer)
        if then is not None:
            then()


@pytest.mark.parametrize("called", ["optimizer_step", "zero_grad", "clip_grad_norm_"])
def test_nothing_takes_a_part_of_the_micro_batches_for_the_whole(
    backend: Backend, called: str
) -> None:
    """The classic mistakes; and the part is forgotten, so that the next block is right."""
    run = _run(backend)
    _, expected = run.loss_and_gradients()
    further = {"clip_grad_norm_": (1.0,)}.get(called, ())
    with pytest.raises(xmem.UsageError, match="after 1 of 2"):
        _accumulate(run, 2, 1, lambda: getattr(xmem, called)(run.optimizer, *further))
    _accumulate(run, 2, 2)
    found = backend.training.gradients(run.model, run.optimizer)
    assert relative_error(found, expected) <= 1e-6


def test_a_block_left_by_an_error_leaves_no_part_of_the_gradients(backend: Backend) -> None:
    """Whoever catches it goes on from nothing."""
    run = _run(backend)
    _, expected = run.loss_and_gradients()

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        _accumulate(run, 2, 1, fail)
    _accumulate(run, 1, 1)
    found = backend.training.gradients(run.model, run.optimizer)
    assert relative_error(found, expected) <= 1e-6


def test_a_block_that_steps_by_itself_is_not_stepped_inside(backend: Backend) -> None:
    """Two updates would be made of one."""
    run = _run(backend)

    def steps_inside() -> None:
        with xmem.accumulate(1, run.optimizer):
            xmem.backward(run.loss(), run.optimizer)
            xmem.optimizer_step(run.optimizer)

    with pytest.raises(xmem.UsageError, match="steps the optimizer"):
        steps_inside()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("share", [0.25, 4.0])
def test_gradients_are_clipped_to_their_norm(
    backend: Backend, norm_type: float, share: float
) -> None:
    """Over all of them together; what is small enough stays."""
    run = _run(backend, depth=2, width=16, batch=32)
    _, plain = run.loss_and_gradients()
    whole = np.concatenate([g.ravel() for g in plain.values()]).astype(np.float64)
    norm = float(np.linalg.norm(whole, norm_type))
    xmem.backward(run.loss(), run.optimizer)
    found = xmem.clip_grad_norm_(run.optimizer, share * norm, norm_type=norm_type)
    assert xmem.log_value(found) == pytest.approx(norm, rel=1e-5)
    clipped = backend.training.gradients(run.model, run.optimizer)
    expected = {n: g * min(1.0, share) for n, g in plain.items()}
    assert relative_error(clipped, expected) <= 1e-5
    xmem.zero_grad(run.optimizer)
    with pytest.raises(xmem.UsageError, match="max_norm=0"):
        xmem.clip_grad_norm_(run.optimizer, 0)


def _allocated_bytes(backend: Backend) -> int:
    gc.collect()
    backend.measure.synchronize()
    return backend.measure.counters().allocated_bytes


@pytest.mark.parametrize("how", ["no_grad", "inference"])
def test_without_gradients_outputs_hold_nothing_but_themselves(backend: Backend, how: str) -> None:
    """Five outputs kept take five outputs' bytes, and less at the peak than with gradients."""
    need(backend, "measure", "checkpoint")
    run = _run(backend)
    inputs, _ = run.batch
    output_bytes = SIZE["batch"] * SIZE["width"] * 4
    with xmem.no_grad() if how == "no_grad" else xmem.inference(run.model):
        run.model(inputs)
        before = _allocated_bytes(backend)
        kept = [run.model(inputs) for _ in range(5)]
        after = _allocated_bytes(backend)
    assert after - before == 5 * output_bytes, (after - before, output_bytes)
    assert len(kept) == 5
    run.step()  # training goes on


def test_the_receipt_of_inference_says_what_training_would_keep(backend: Backend) -> None:
    """As the model's own cost; without inputs it is not known."""
    need(backend, "checkpoint")
    run = _run(backend)
    inputs, _ = run.batch
    with xmem.inference(run.model) as receipt:
        assert receipt.expected_saving_bytes is None
        assert receipt.applied_to > 0
    with xmem.inference(run.model, inputs=(inputs,)) as receipt:
        run.model(inputs)
    least = (SIZE["depth"] - 1) * SIZE["batch"] * SIZE["width"] * 4
    assert receipt.expected_saving_bytes is not None
    assert receipt.expected_saving_bytes >= least


def test_logged_values_hold_nothing(backend: Backend) -> None:
    """Five of them, with the losses let go."""
    need(backend, "measure")
    run = _run(backend)
    run.step()
    before = _allocated_bytes(backend)
    logged = []
    for _ in range(5):
        loss = run.loss()
        xmem.backward(loss, run.optimizer)
        logged.append(xmem.log_value(loss))
        del loss
        xmem.optimizer_step(run.optimizer)
        xmem.zero_grad(run.optimizer)
    assert all(type(value) is float for value in logged)
    assert logged[-1] < logged[0]
    assert _allocated_bytes(backend) == before


def test_a_cast_model_with_masters_learns_what_float32_learns(backend: Backend) -> None:
    """At so small a rate that half weights alone would not move; undone, it is float32 again."""
    need(backend, "measure", "precision", "checkpoint")
    moved = {}
    for cast in (False, True):
        run = _run(backend, depth=2, width=16, batch=32)
        run.optimizer = backend.training.make_optimizer("sgd", run.model, learning_rate=1e-4)
        before = xmem.log_value(run.loss())
        if cast:
            receipt = xmem.cast_model(run.model, optimizer=run.optimizer)
            assert receipt.applied_to == len(run.weights)
            assert receipt.expected_saving_bytes is not None
            assert receipt.expected_saving_bytes < 0  # masters are twice as large as what is saved
        for _ in range(10):
            with xmem.autocast(enabled=cast):
                loss = run.loss()
            xmem.backward(loss, run.optimizer)
            xmem.optimizer_step(run.optimizer)
            xmem.zero_grad(run.optimizer)
        if cast:
            receipt.undo()
        moved[cast] = before - xmem.log_value(run.loss())
    assert moved[False] > 0
    assert moved[True] == pytest.approx(moved[False], rel=0.05)


def test_a_cast_model_takes_half_the_bytes(backend: Backend) -> None:
    """Without masters; the receipt and the meter agree."""
    need(backend, "measure", "precision", "checkpoint")
    run = _run(backend)
    before = _allocated_bytes(backend)
    receipt = xmem.cast_model(run.model)
    saved = before - _allocated_bytes(backend)
    assert saved == receipt.expected_saving_bytes
    assert saved == sum(w.nbytes for w in run.weights.values()) // 2
    with pytest.raises(xmem.UsageError, match="already"):
        xmem.cast_model(run.model)
    receipt.undo()
    assert _allocated_bytes(backend) == before
