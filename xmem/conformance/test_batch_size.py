"""The batch size that is found fits, and the next one does not, as plain steps show."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import xmem
from xmem.batch_size import find_batch_size
from xmem.conformance.plugin import need, refuse_gap
from xmem.conformance.small import SmallRun, small_workload
from xmem.errors import InfeasibleBudgetError

if TYPE_CHECKING:
    from xmem.backend import Backend

_STEPS = 20


def _step(size: int) -> Callable[[], float]:
    return SmallRun(xmem.active(), small_workload(batch=size)).step


def _need_all(backend: Backend) -> None:
    need(backend, "measure", "models", "training")
    for feature in ("limit", "peak"):
        refuse_gap(backend.measure, feature)


def _peak(backend: Backend, size: int) -> int:
    """Return the peak of steps of a size, run without a limit."""
    gc.collect()
    backend.measure.synchronize()
    backend.measure.reset_peak()
    step = _step(size)
    for _ in range(_STEPS):
        step()
        backend.measure.synchronize()
    peak = backend.measure.counters().peak_allocated_bytes
    assert peak is not None
    return peak


def _steady(backend: Backend, size: int) -> int:
    """Return the peak of a step in the middle of training."""
    gc.collect()
    backend.measure.synchronize()
    step = _step(size)
    peak = 0
    for _ in range(3):
        backend.measure.synchronize()
        backend.measure.reset_peak()
        step()
        backend.measure.synchronize()
        peak = backend.measure.counters().peak_allocated_bytes or 0
    return peak


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "in a process"])
def test_the_size_found_is_the_largest_that_fits(backend: Backend, isolate: bool) -> None:
    """By 20 plain steps of this size and of the next, without a limit."""
    _need_all(backend)
    gc.collect()
    backend.measure.synchronize()
    already = 0 if isolate else backend.measure.counters().allocated_bytes
    budget = already + 3 * _peak(backend, 64)
    before = backend.measure.counters().allocated_bytes
    found = find_batch_size(_step, budget=budget, minimum=64, isolate=isolate)
    assert found.limited_by == "budget"
    gc.collect()
    backend.measure.synchronize()
    assert backend.measure.counters().allocated_bytes == before, "something stayed of the tries"
    here = 0 if not isolate else backend.measure.counters().allocated_bytes
    fits, next_one = _peak(backend, int(found)) - here, _steady(backend, int(found) + 1) - here
    assert fits <= budget, f"{fits} bytes in 20 steps, {budget} were given"
    assert next_one > found.limit_bytes, f"{next_one} bytes would fit into {found.limit_bytes}"


def test_a_minimum_that_does_not_fit_is_an_error_with_its_peak(backend: Backend) -> None:
    """The error has the bytes that it takes."""
    _need_all(backend)
    peak = _peak(backend, 512)
    with pytest.raises(InfeasibleBudgetError) as caught:
        find_batch_size(_step, budget=peak // 2, minimum=512, isolate=False)
    assert caught.value.budget_bytes == peak // 2
    assert (caught.value.minimum_bytes or 0) > peak // 2
