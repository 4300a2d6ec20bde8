"""A backend that measures counts every byte: no constants, no estimates."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import pytest

import xmem
from xmem.conformance.plugin import need, refuse_gap
from xmem.conformance.small import SmallRun, small_workload

if TYPE_CHECKING:
    from xmem.backend import Backend

_SIZES = (1 << 16, 1 << 20, 3 * (1 << 20) + 4)


def _allocated(backend: Backend) -> int:
    gc.collect()
    backend.measure.synchronize()
    return backend.measure.counters().allocated_bytes


@pytest.mark.parametrize("size_bytes", _SIZES)
def test_a_tensor_adds_its_bytes_and_takes_them_away(backend: Backend, size_bytes: int) -> None:
    """Twice, so that a counter that only grows is seen."""
    need(backend, "measure", "models")
    array = np.ones(size_bytes // 4, np.float32)
    before = _allocated(backend)
    for _ in range(2):
        tensor = backend.models.tensor(array)
        assert _allocated(backend) - before == array.nbytes
        del tensor
        assert _allocated(backend) == before


def test_the_peak_stays_until_it_is_reset(backend: Backend) -> None:
    """A freed tensor is still in the peak."""
    need(backend, "measure", "models")
    refuse_gap(backend.measure, "peak")
    array = np.ones(1 << 20, np.float32)
    before = _allocated(backend)
    backend.measure.reset_peak()
    tensor = backend.models.tensor(array)
    backend.measure.synchronize()
    del tensor
    assert _allocated(backend) == before
    peak = backend.measure.counters().peak_allocated_bytes
    assert peak is not None
    assert peak - before >= array.nbytes
    backend.measure.reset_peak()
    assert backend.measure.counters().peak_allocated_bytes == before


def test_allocations_are_counted(backend: Backend) -> None:
    """The number of allocations grows by at least one for a tensor."""
    need(backend, "measure", "models")
    before = backend.measure.counters().allocation_count
    if before is None:
        pytest.skip("the backend's source does not count allocations")
    tensor = backend.models.tensor(np.ones(1000, np.float32))
    backend.measure.synchronize()
    after = backend.measure.counters().allocation_count
    assert after is not None
    assert after > before
    del tensor


def test_a_step_is_split_by_owner_and_adds_up(backend: Backend) -> None:
    """Parameters are exact; all categories sum to the peak."""
    need(backend, "measure", "models", "training")
    refuse_gap(backend.measure, "by_category")
    run = SmallRun(backend, small_workload())
    run.step()
    with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
        loss = run.loss()
        xmem.backward(loss, run.optimizer)
        xmem.optimizer_step(run.optimizer)
        xmem.zero_grad(run.optimizer)
    found = m.by_category
    assert found is not None
    weights = sum(w.nbytes for w in run.weights.values())
    batch = 2 * 512 * 64 * 4
    assert sum(found.values()) == m.peak_allocated_bytes
    assert found["parameter"] == weights
    assert found["optimizer"] >= 2 * weights
    assert found["input"] == batch
    assert found["activation"] >= 3 * 512 * 64 * 4, "each block keeps its input for backward"
    assert m.static_bytes >= 3 * weights + batch
    assert m.peak_above_static_bytes == m.peak_allocated_bytes - m.static_bytes
    assert m.untracked_bytes == 0


def test_three_runs_have_one_peak(backend: Backend) -> None:
    """The same step takes the same bytes every time, and leaves nothing behind."""
    need(backend, "measure", "models", "training")
    run = SmallRun(backend, small_workload())
    run.step()
    run.step()
    found = []
    for _ in range(3):
        with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
            run.step()
        found.append((m.static_bytes, m.peak_allocated_bytes, m.end_bytes))
    assert len(set(found)) == 1, found
    assert found[0][0] == found[0][2], "static bytes grew over a step"


def test_a_limit_is_kept_and_can_be_taken_away(backend: Backend) -> None:
    """Beyond the limit an error, catchable; below it and afterwards work goes on."""
    need(backend, "measure", "models")
    refuse_gap(backend.measure, "limit")
    array = np.ones(1 << 20, np.float32)
    before = _allocated(backend)
    refused = backend.measure.counters().out_of_memory_count
    backend.measure.set_limit(before + array.nbytes // 2)
    with pytest.raises(Exception, match="out of memory"):
        _keep(backend, array)
    assert backend.measure.counters().out_of_memory_count == (refused or 0) + 1
    small = backend.models.tensor(array[: 1 << 16])
    backend.measure.synchronize()
    del small
    backend.measure.set_limit(None)
    tensor = backend.models.tensor(array)
    assert _allocated(backend) - before == array.nbytes
    del tensor
    assert _allocated(backend) == before


def _keep(backend: Backend, array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    tensor = backend.models.tensor(array)
    backend.measure.synchronize()
    del tensor


def test_an_exception_in_the_block_passes_and_measuring_goes_on(backend: Backend) -> None:
    """The meter swallows nothing and undoes what it did."""
    need(backend, "measure", "models", "training")
    run = SmallRun(backend, small_workload())
    expected = run.step()
    with (
        pytest.raises(KeyError, match="mine"),
        xmem.measure(model=run.model, optimizer=run.optimizer),
    ):
        raise KeyError("mine")
    assert run.step() < expected


def test_settings_are_text(backend: Backend) -> None:
    """A report can hold them."""
    need(backend, "measure")
    found = backend.measure.settings()
    assert found
    assert all(type(k) is str and type(v) is str for k, v in found.items())
