"""Checkpointing changes memory and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import xmem
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, relative_error, small_workload

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


def test_loss_and_gradients_are_the_same(backend: Backend) -> None:
    """Loss within 1e-6 and gradients within 1e-5, relative."""
    need(backend, "checkpoint", "models", "training")
    run = SmallRun(backend, small_workload())
    loss, gradients = run.loss_and_gradients()
    xmem.apply_checkpointing(run.model, "every", blocks=backend.models.blocks(run.model))
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
