"""Checkpointing changes memory and nothing else."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xmem
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, relative_error, small_workload
from xmem.workloads import workload

if TYPE_CHECKING:
    from xmem.backend import Backend


def _counted(backend: Backend, run: SmallRun) -> list[int]:
    """Count each block's forward calls."""
    blocks = backend.models.blocks(run.model)
    calls = [0] * len(blocks)

    def counting(index: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[index] += 1
                return forward(*args, **kwargs)

            return call

        return wrap

    for index, block in enumerate(blocks):
        backend.checkpoint.replace_forward(block, counting(index))
    return calls


@pytest.mark.parametrize("layout", ["sqrt", 1, 2, 3, [["blocks.1", "blocks.2"], "blocks.4"]])
def test_every_block_of_every_segment_runs_once_more(backend: Backend, layout: Any) -> None:
    """The last segment and the remainder too, and no block twice more."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload(depth=5))
    calls = _counted(backend, run)
    receipt = xmem.apply_checkpointing(run.model, layout)
    run.loss_and_gradients()
    again = [f"blocks.{i}" in receipt.names for i in range(5)]
    assert sum(again) == receipt.applied_to == (3 if isinstance(layout, list) else 5)
    assert calls == [1 + more for more in again]


def test_each_block_runs_once_more_in_backward(backend: Backend) -> None:
    """Once forward, once again, never more."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload())
    calls = _counted(backend, run)
    run.loss_and_gradients()
    assert calls == [1, 1, 1]
    receipt = xmem.apply_checkpointing(run.model, "every", blocks=backend.models.blocks(run.model))
    assert receipt.applied_to == 3
    calls[:] = [0, 0, 0]
    run.loss_and_gradients()
    assert calls == [2, 2, 2]
    receipt.undo()
    calls[:] = [0, 0, 0]
    run.loss_and_gradients()
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("layout", ["every", "sqrt", 2])
def test_loss_and_gradients_are_the_same(backend: Backend, layout: str | int) -> None:
    """Loss within 1e-6 and gradients within 1e-5, relative."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload(depth=5))
    loss, gradients = run.loss_and_gradients()
    xmem.apply_checkpointing(run.model, layout, blocks=backend.models.blocks(run.model))
    loss_again, gradients_again = run.loss_and_gradients()
    assert loss_again == pytest.approx(loss, rel=1e-6)
    assert relative_error(gradients_again, gradients) <= 1e-5


def test_blocks_are_found_by_themselves(backend: Backend) -> None:
    """The repeated blocks of a chain, and not its head."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload())
    receipt = xmem.apply_checkpointing(run.model, "every")
    assert receipt.applied_to == 3
    assert receipt.names == ("blocks.0", "blocks.1", "blocks.2")
    receipt.undo()


def test_what_is_applied_to_nothing_warns(backend: Backend) -> None:
    """A single layer has no blocks."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload(depth=1))
    with pytest.warns(xmem.XmemWarning, match="applied to nothing"):
        receipt = xmem.apply_checkpointing(run.model, "every")
    assert receipt.applied_to == 0


def test_an_unknown_layout_is_named(backend: Backend) -> None:
    """With the valid ones and the nearest."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload())
    with pytest.raises(xmem.UsageError, match="Did you mean 'every'"):
        xmem.apply_checkpointing(run.model, "evry")


def test_what_forward_leaves_for_backward_shrinks(backend: Backend) -> None:
    """Eight blocks keep their inputs only, and one block's inside at a time."""
    need(backend, "checkpoint", "measure", "models", "training")
    run = SmallRun(backend, small_workload(depth=8, width=64, batch=2048))
    found = {}
    for name in ("plain", "checkpointed"):
        if name == "checkpointed":
            xmem.apply_checkpointing(run.model, "every", blocks=backend.models.blocks(run.model))
        run.step()
        run.step()
        with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
            run.step()
        found[name] = m.peak_above_static_bytes
    assert found["checkpointed"] <= 0.75 * found["plain"], found


def test_segments_take_what_they_should(backend: Backend) -> None:
    """24 layers: 24/k inputs and the inside of k blocks, so that 4 blocks are best.

    The shares of the plain peak are those of Jittor's chain: 192 MiB, and 105, 65, 57, 65, 105.
    """
    need(backend, "checkpoint", "measure", "models", "training")
    run = SmallRun(backend, small_workload(depth=24, width=128, batch=2048))
    found = {0: _peak(run)}
    for blocks in (1, 2, 4, 6, 12):
        receipt = xmem.apply_checkpointing(run.model, 24 // blocks)
        assert receipt.applied_to == 24
        found[blocks] = _peak(run)
        receipt.undo()
    most = {1: 0.57, 2: 0.36, 4: 0.31, 6: 0.36, 12: 0.57}
    assert all(found[blocks] <= share * found[0] for blocks, share in most.items()), found


def _peak(run: SmallRun) -> int:
    run.step()
    run.step()
    with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
        run.step()
    assert m.peak_above_static_bytes is not None
    return m.peak_above_static_bytes


Change = Callable[[Callable[..., Any], Any, int], Any]


def _changed(backend: Backend, run: SmallRun, change: Change) -> None:
    """Let each block run a function of its forward, its input and the number of the call."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @functools.wraps(forward)
        def call(x: Any) -> Any:
            nonlocal calls
            calls += 1
            return change(forward, x, calls)

        return call

    for block in backend.models.blocks(run.model):
        backend.checkpoint.replace_forward(block, wrap)


def _noisy(forward: Callable[..., Any], x: Any, call: int) -> Any:
    return forward(x * (0.5 + random.random()) * (0.5 + np.random.rand()))


def _fewer(forward: Callable[..., Any], x: Any, call: int) -> Any:
    return forward(x if call % 2 else x[:7])


def _larger(forward: Callable[..., Any], x: Any, call: int) -> Any:
    y = forward(x)
    return (y if call % 2 else y * 1.1) * y


def test_randomness_of_the_host_is_replayed(backend: Backend) -> None:
    """A factor from Python's random and one from NumPy's, in each block."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload(depth=4))
    _changed(backend, run, _noisy)

    def seeded() -> tuple[float, Any, float]:
        random.seed(3)
        np.random.seed(3)
        loss, gradients = run.loss_and_gradients()
        return loss, gradients, random.random() + np.random.rand()

    loss, gradients, after = seeded()
    for layout in ("every", 2):
        receipt = xmem.apply_checkpointing(run.model, layout)
        loss_again, gradients_again, after_again = seeded()
        assert loss_again == pytest.approx(loss, rel=1e-6)
        assert relative_error(gradients_again, gradients) <= 1e-5
        assert after_again == after
        receipt.undo()


def test_a_recomputation_of_another_shape_is_named(backend: Backend) -> None:
    """Every second call takes less than the batch."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload())
    _changed(backend, run, _fewer)
    xmem.apply_checkpointing(run.model, "every")
    loss = run.loss()
    with pytest.raises(xmem.RecomputeMismatchError, match=r"recomputation of 'blocks\.\d' differs"):
        xmem.backward(loss, run.optimizer)


def test_other_values_are_found_where_they_are_asked_for(backend: Backend) -> None:
    """Every second call is a tenth larger: right in shape, and wrong."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload())
    _changed(backend, run, _larger)
    xmem.apply_checkpointing(run.model, "every", check_values=True)
    loss = run.loss()
    with pytest.raises(xmem.RecomputeMismatchError, match="other values"):
        xmem.backward(loss, run.optimizer)


def test_running_statistics_are_those_of_plain_training(backend: Backend) -> None:
    """A residual network, three steps: evaluation reads the statistics."""
    need(backend, "checkpoint", "models", "training")
    found = []
    for checkpointed in (False, True):
        run = SmallRun(backend, workload("resnet18", "quick"))
        if checkpointed:
            xmem.apply_checkpointing(run.model, "every", blocks=backend.models.blocks(run.model))
        for _ in range(3):
            run.step()
        run.model.eval()
        found.append(backend.models.item(run.loss()))
        run.model.train()
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_a_hundred_steps_leave_the_allocated_bytes_where_they_were(backend: Backend) -> None:
    """Nothing is held beyond its step."""
    need(backend, "checkpoint", "measure", "models", "training")
    run = SmallRun(backend, small_workload(depth=4, width=32, batch=64))
    xmem.apply_checkpointing(run.model, 2)

    def allocated_bytes() -> int:
        gc.collect()
        backend.measure.synchronize()
        return backend.measure.counters().allocated_bytes

    for _ in range(3):
        run.step()
    before = allocated_bytes()
    for _ in range(100):
        run.step()
    assert allocated_bytes() == before
