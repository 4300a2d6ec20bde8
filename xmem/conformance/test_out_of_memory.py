"""A backend that runs out of memory says where the bytes were, and training goes on."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

import xmem
from xmem.conformance.plugin import need, refuse_gap
from xmem.conformance.small import SmallRun, small_workload
from xmem.diagnosis import Diagnosis, read
from xmem.out_of_memory import oom_guard

if TYPE_CHECKING:
    from pathlib import Path

    from xmem.backend import Backend

_STEPS = 3


@pytest.fixture(autouse=True)
def _no_limit(backend: Backend) -> Iterator[None]:
    """Take limits off again."""
    need(backend, "pool", "measure", "models", "training")
    refuse_gap(backend.measure, "limit")
    yield
    backend.pool.set_limit(None)


def _allocated(backend: Backend) -> int:
    backend.measure.synchronize()
    gc.collect()
    return backend.pool.stats().allocated_bytes


def _guarded(run: SmallRun) -> float:
    with oom_guard(model=run.model, optimizer=run.optimizer):
        return run.step()


def _span(run: SmallRun) -> tuple[int, int]:
    """Return static bytes and the peak of a guarded step; takes the steps that it needs."""
    for _ in range(2):
        _guarded(run)
    before = _allocated(run.backend)
    run.backend.measure.reset_peak()
    _guarded(run)
    peak = run.backend.measure.counters().peak_allocated_bytes
    assert peak is not None
    return before, peak


def _fail(run: SmallRun, limit_bytes: int, step: Callable[[], object]) -> xmem.OutOfMemoryError:
    run.backend.pool.set_limit(limit_bytes)
    try:
        with pytest.raises(xmem.OutOfMemoryError) as caught:
            step()
    finally:
        run.backend.pool.set_limit(None)
    return caught.value


def _told(error: xmem.OutOfMemoryError) -> Diagnosis:
    assert isinstance(error.diagnosis, Diagnosis)
    return error.diagnosis


def _run(backend: Backend) -> SmallRun:
    return SmallRun(backend, small_workload(depth=3, width=64, batch=512))


def test_the_error_is_the_frameworks_too_and_is_told_from_others(backend: Backend) -> None:
    """What catches the framework's error catches ours."""
    run = _run(backend)
    static, peak = _span(run)
    error = _fail(run, (static + peak) // 2, lambda: _guarded(run))
    assert isinstance(error, backend.pool.out_of_memory_type())
    assert len(type(error).__mro__) > len(xmem.OutOfMemoryError.__mro__) + 1
    assert " out of memory." in str(error).splitlines()[0]
    assert not backend.pool.is_out_of_memory(ValueError("out of memory"))


def test_without_a_guard_the_frameworks_own_error_comes(backend: Backend) -> None:
    """And is recognised."""
    run = _run(backend)
    static, peak = _span(run)
    backend.pool.set_limit((static + peak) // 2)
    found = None
    try:
        run.step()
        backend.measure.synchronize()
    except Exception as error:  # noqa: BLE001  whichever type the framework has
        found = backend.pool.is_out_of_memory(error)
    backend.pool.set_limit(None)
    assert found is True
    backend.pool.recover()


def test_the_diagnosis_adds_up_and_names_what_the_model_owns(backend: Backend) -> None:
    """Bytes by category and by owner sum to what was allocated; parameters are exact."""
    run = _run(backend)
    static, peak = _span(run)
    limit = static + (peak - static) // 2
    found = _told(_fail(run, limit, lambda: _guarded(run)))
    assert (found.backend, found.device) == (backend.name, backend.device)
    assert found.limit_bytes == limit
    allocated, requested = found.allocated_bytes, found.requested_bytes
    assert allocated is not None
    assert requested is not None
    assert allocated <= limit < allocated + requested
    assert found.phase == "forward"
    categories = found.by_category or {}
    assert sum(categories.values()) == allocated
    weights = sum(w.nbytes for w in run.weights.values())
    assert categories["parameter"] == weights
    assert categories["activation"] >= 512 * 64 * 4
    named = {o.name: o.size_bytes for o in found.owners if o.category == "parameter"}
    assert named == {name: w.nbytes for name, w in run.weights.items()}
    assert sum(o.size_bytes for o in found.owners) == found.allocated_bytes
    assert any(o.name.startswith("blocks.") for o in found.owners if o.category == "activation")
    sizes = [a.expected_bytes or 0 for a in found.advice[:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert {"compress_activations", "autocast", "limit"} <= {a.technique for a in found.advice}


def test_nothing_stays_of_ten_steps_that_failed_anywhere(backend: Backend) -> None:
    """Bytes are what they were, the error still held; losses are those of a run without errors."""
    plain = _run(backend)
    expected = [_guarded(plain) for _ in range(_STEPS + 13)]
    del plain
    run = _run(backend)
    static, peak = _span(run)
    found = expected[:3]
    draw = random.Random(7)
    phases = set()
    for _ in range(10):
        before = _allocated(backend)
        limit = draw.randrange(static + 1, peak)
        error = _fail(run, limit, lambda: _guarded(run))
        assert _allocated(backend) == before, error
        phases.add(_told(error).phase)
        assert not _told(error).may_be_updated
        found.append(_guarded(run))
    found += [_guarded(run) for _ in range(_STEPS)]
    assert found == expected
    assert "forward" in phases


def test_gradients_of_a_step_that_failed_are_not_added_to_the_next(backend: Backend) -> None:
    """A step that fails in backward leaves half of them, and those are dropped."""
    expected = [_guarded(run) for run in [_run(backend)] for _ in range(5)]
    run = _run(backend)
    static, peak = _span(run)
    error = _fail(run, peak - 1, lambda: _guarded(run))
    assert _told(error).phase == "backward"
    assert [_guarded(run), _guarded(run)] == expected[3:]
    assert static <= _allocated(backend)


def test_a_scaler_takes_the_next_gradients_for_scaled_ones(backend: Backend) -> None:
    """Those that it had unscaled went with the step that failed; the losses are as without it."""
    need(backend, "precision")
    losses = []
    for fails in (False, True):
        run = _run(backend)
        scaler = xmem.GradScaler(1024.0)

        def step(
            run: SmallRun = run, scaler: xmem.GradScaler = scaler, fail: bool = False
        ) -> float:
            with oom_guard(model=run.model, optimizer=run.optimizer):
                loss = run.loss()
                xmem.backward(scaler.scale(loss), run.optimizer)
                scaler.unscale_(run.optimizer)
                if fail:
                    backend.measure.synchronize()
                    backend.pool.set_limit(1)
                    backend.models.tensor(np.ones(1 << 16, np.float32))
                    backend.measure.synchronize()
                scaler.step(run.optimizer)
            scaler.update()
            xmem.zero_grad(run.optimizer)
            return backend.models.item(loss)

        found = [step(), step()]
        if fails:
            with pytest.raises(xmem.OutOfMemoryError):
                step(fail=True)
            backend.pool.set_limit(None)
        losses.append(found + [step() for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_report_is_written_and_read(backend: Backend, tmp_path: Path) -> None:
    """A folder for each error, with all that is known."""
    run = _run(backend)
    static, peak = _span(run)

    def step() -> None:
        with oom_guard(tmp_path, model=run.model, optimizer=run.optimizer):
            run.step()

    errors = [_fail(run, (static + peak) // 2, step) for _ in range(2)]
    assert [read(tmp_path / f"oom-000{n}") for n in (1, 2)] == [e.diagnosis for e in errors]
    assert "# Out of memory" in (tmp_path / "oom-0001" / "report.md").read_text(encoding="utf-8")


def test_what_is_in_force_is_not_advised(backend: Backend) -> None:
    """Neither half precision nor compression, where the step has them."""
    run = _run(backend)

    def step() -> float:
        with oom_guard(model=run.model, optimizer=run.optimizer):
            with xmem.autocast(), xmem.compress_activations(bits=8, min_bytes=0):
                loss = run.loss()
            xmem.backward(loss, run.optimizer)
            xmem.optimizer_step(run.optimizer)
            xmem.zero_grad(run.optimizer)
            return backend.models.item(loss)

    need(backend, "precision", "saved")
    for _ in range(2):
        step()
    before = _allocated(backend)
    found = _told(_fail(run, before + 200_000, step))
    advised = {a.technique for a in found.advice}
    assert not advised & {"autocast", "compress_activations"}
