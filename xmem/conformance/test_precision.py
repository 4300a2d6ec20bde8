"""Half precision where it is asked for, float32 where it is not, and what is said about both."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xmem
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, relative_error, small_workload
from xmem.operations import FLOAT32, OPERATIONS

if TYPE_CHECKING:
    from xmem.backend import Backend

HALVES = {"bfloat16", "float16"}


def _run(backend: Backend, **size: int) -> SmallRun:
    need(backend, "precision", "checkpoint", "models", "training")
    return SmallRun(backend, small_workload(**size))


def _gradients(run: SmallRun, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    with xmem.autocast(**options):
        loss = run.loss()
    xmem.backward(loss, run.optimizer)
    gradients = run.backend.training.gradients(run.model, run.optimizer)
    xmem.zero_grad(run.optimizer)
    return gradients


def test_half_precision_is_reported_and_close_and_gone_after_the_block(backend: Backend) -> None:
    """An error of exactly zero would mean that nothing was computed in half."""
    run = _run(backend)
    loss, plain = run.loss_and_gradients()
    with xmem.autocast() as block:
        half = run.loss()
    assert block.dtype in HALVES
    assert set(block.operations["linear"]) == {block.dtype}, block.operations
    assert set(block.operations["loss"]) == {"float32"}
    assert set(block.operations) <= set(OPERATIONS)
    assert 0 < abs(backend.models.item(half) - loss) <= 1e-2 * loss
    assert 0 < relative_error(_gradients(run), plain) <= 1e-2
    again, gradients = run.loss_and_gradients()
    assert again == loss
    assert relative_error(gradients, plain) <= 1e-6


def test_kept_operations_are_computed_in_float32(backend: Backend) -> None:
    """All of them kept: bit by bit what there is without autocast."""
    run = _run(backend)
    loss, _ = run.loss_and_gradients()
    with (
        pytest.warns(xmem.XmemWarning, match="applied to nothing"),
        xmem.autocast(keep_fp32=OPERATIONS) as block,
    ):
        kept = run.loss()
    assert backend.models.item(kept) == loss
    assert {t for types in block.operations.values() for t in types} == {"float32"}


@pytest.mark.parametrize("by", ["itself", "its type", "its type's name", "its path", "a pattern"])
def test_kept_modules_are_computed_in_float32(backend: Backend, by: str) -> None:
    """One block of three by itself or by its path, all of them by their type."""
    run = _run(backend)
    blocks = backend.models.blocks(run.model)
    named: Any = {
        "itself": blocks[1],
        "its type": type(blocks[1]),
        "its type's name": type(blocks[1]).__name__,
        "its path": "blocks.1",
        "a pattern": "blocks.[12]",
    }[by]
    with xmem.autocast() as block:
        run.loss()
    everywhere = block.operations["linear"][block.dtype]
    with xmem.autocast(keep_fp32=(named,), model=run.model) as block:
        loss = run.loss()
    found = block.operations["linear"]
    kept = {"itself": 1, "its path": 1, "a pattern": 2}.get(by, len(blocks))
    assert found["float32"] >= kept if "type" in by else found["float32"] == kept
    assert sum(found.values()) == everywhere
    xmem.backward(loss, run.optimizer)  # also backward of what was kept
    xmem.zero_grad(run.optimizer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_fp32": ("sofmax",)}, "Did you mean 'softmax'"),
        ({"keep_fp32": "softmax"}, "give a sequence"),
        ({"keep_fp32": ("blocks.1",)}, "pass model="),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
    ],
)
def test_unknown_names_are_refused_before_the_block(
    backend: Backend, options: dict[str, Any], said: str
) -> None:
    """With the valid ones, or the nearest."""
    need(backend, "precision", "checkpoint")
    with pytest.raises(xmem.UsageError, match=said):
        xmem.autocast(**options)


def test_blocks_nest_and_a_disabled_one_is_plain(backend: Backend) -> None:
    """The report of the outer block tells of the inner ones too."""
    run = _run(backend)
    loss = backend.models.item(run.loss())
    with xmem.autocast() as outer:
        with xmem.autocast(enabled=False) as plain:
            inside = backend.models.item(run.loss())
        with xmem.autocast(keep_fp32=FLOAT32) as inner:
            half = backend.models.item(run.loss())
    assert inside == loss != half
    assert plain.dtype == "float32"
    assert outer.operations["linear"][inner.dtype] == inner.operations["linear"][inner.dtype]


def test_an_inner_block_keeps_what_the_outer_one_keeps(backend: Backend) -> None:
    """And more; outside of it, what it kept is in half again."""
    run = _run(backend)
    with xmem.autocast(keep_fp32=("linear",)):
        with pytest.warns(xmem.XmemWarning, match="nothing"), xmem.autocast() as inner:
            run.loss()
        assert set(inner.operations["linear"]) == {"float32"}
        with xmem.autocast(enabled=False):
            run.loss()
    with xmem.autocast() as block:
        run.loss()
    assert set(block.operations["linear"]) == {block.dtype}


def test_what_runs_after_its_call_is_not_decorated(backend: Backend) -> None:
    """A generator's body runs when it is asked for values."""
    need(backend, "precision")
    with pytest.raises(xmem.UsageError, match="generator"):

        @xmem.autocast()
        def generator() -> Any:
            yield


def test_a_decorated_function_runs_in_half_in_whatever_thread(backend: Backend) -> None:
    """Another thread's block is its own: this thread computes in float32 meanwhile."""
    run = _run(backend)
    loss = backend.models.item(run.loss())
    found: list[float] = []

    @xmem.autocast()
    def decorated() -> float:
        return float(backend.models.item(run.loss()))

    thread = threading.Thread(target=lambda: found.append(decorated()))
    with xmem.autocast(enabled=False):
        thread.start()
        thread.join()
        assert backend.models.item(run.loss()) == loss
    assert found
    assert found == [decorated()]
    assert 0 < abs(found[0] - loss) <= 1e-2 * loss
    assert backend.models.item(run.loss()) == loss


@pytest.mark.parametrize("layout", ["every", 1])
@pytest.mark.parametrize("keep_fp32", [(), ("gelu",), ("blocks.1",)])
def test_a_region_is_recomputed_in_the_precision_it_was_first_run_in(
    backend: Backend, layout: Any, keep_fp32: tuple[str, ...]
) -> None:
    """Backward comes after the block; the gradients are those without recomputation."""
    run = _run(backend)
    options: dict[str, Any] = {"keep_fp32": keep_fp32, "model": run.model}
    expected = _gradients(run, **options)
    receipt = xmem.apply_checkpointing(run.model, layout)
    assert relative_error(_gradients(run, **options), expected) <= 1e-6
    receipt.undo()


def test_a_block_in_which_nothing_runs_says_so(backend: Backend) -> None:
    """The usual mistake: the forward pass is elsewhere."""
    need(backend, "precision")
    with pytest.warns(xmem.XmemWarning, match="applied to nothing"), xmem.autocast():
        pass


@pytest.mark.parametrize(("depth", "width", "batch", "saves"), [(4, 64, 2048, True)])
def test_its_receipt_says_what_it_saves(
    backend: Backend, depth: int, width: int, batch: int, saves: bool
) -> None:
    """Where activations are larger than weights; the meter agrees on the sign."""
    need(backend, "measure")
    run = _run(backend, depth=depth, width=width, batch=batch)
    peaks = []
    for enabled in (False, True):
        for _ in range(2):
            with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
                with xmem.autocast(enabled=enabled) as block:
                    loss = run.loss()
                xmem.backward(loss, run.optimizer)
                xmem.optimizer_step(run.optimizer)
                xmem.zero_grad(run.optimizer)
                del loss
        peaks.append(m.peak_above_static_bytes)
    receipt = block.receipt
    assert receipt.applied_to > 0
    assert "linear" in receipt.names
    assert receipt.expected_saving_bytes is not None
    assert (peaks[1] < peaks[0]) == (receipt.expected_saving_bytes > 0) == saves, (peaks, receipt)
