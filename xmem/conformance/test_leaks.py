"""A kept loss is found and named, and a clean loop raises no alarm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import xmem
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, small_workload
from xmem.errors import LeakError, UsageError
from xmem.leaks import Leak, LeakWatch, watch_leaks

if TYPE_CHECKING:
    from xmem.backend import Backend

STEPS = 20


def _run(backend: Backend) -> SmallRun:
    need(backend, "measure", "pool", "training", "models")
    return SmallRun(backend, small_workload(depth=2, width=16, batch=32))


def test_a_kept_loss_is_found_and_named(backend: Backend) -> None:
    """It is evaluated with its graph and kept in a list."""
    run = _run(backend)
    found: list[Leak] = []
    losses = []
    with watch_leaks(model=run.model, on_leak=found.append) as watch:
        for _ in range(STEPS):
            loss = run.loss()
            backend.models.item(loss)
            losses.append(loss)
            watch.step()
    [leak] = found
    assert watch.findings == found
    assert leak.kind == "retained graph"
    assert "`losses`" in leak.owner
    assert leak.found_at_step <= STEPS
    assert leak.bytes_per_step > 0
    assert leak.tensor_count
    assert len(losses) == STEPS


def test_a_clean_loop_raises_no_alarm(backend: Backend) -> None:
    """Steps are noticed by themselves, at the optimizer's."""
    run = _run(backend)
    losses = []
    with watch_leaks(model=run.model, optimizer=run.optimizer, on_leak="raise") as watch:
        for _ in range(2 * STEPS):
            losses.append(run.step())
    assert watch.findings == []
    assert watch.steps == 2 * STEPS
    assert len(losses) == 2 * STEPS


def _keep(run: SmallRun, watch: LeakWatch) -> None:
    kept = []
    with watch:
        for _ in range(STEPS):
            loss = run.loss()
            run.backend.models.item(loss)
            kept.append(loss)
            watch.step()


def test_a_leak_raises_where_that_is_asked_for(backend: Backend) -> None:
    """The error carries the leak."""
    run = _run(backend)
    watch = watch_leaks(on_leak="raise")
    with pytest.raises(LeakError, match="`kept`") as raised:
        _keep(run, watch)
    assert raised.value.leak is watch.findings[0]


def test_a_watch_without_steps_says_so(backend: Backend) -> None:
    """A watch that nothing feeds would find nothing, silently."""
    _run(backend)
    with pytest.warns(xmem.XmemWarning, match="saw no training step"), watch_leaks():
        pass


def test_values_that_make_no_sense_are_refused(backend: Backend) -> None:
    """Before anything is watched."""
    _run(backend)
    for wrong in ({"every": 0}, {"warm_up": -1}, {"on_leak": "shout"}, {"every": True}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            watch_leaks(**wrong)
