"""A backend's pool says what it holds, keeps to its limit, and gives back what it can."""

from __future__ import annotations

import gc
import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xmem
from xmem.conformance.plugin import need, refuse_gap
from xmem.conformance.small import SmallRun, small_workload
from xmem.errors import CapabilityError, UsageError, XmemWarning
from xmem.pooling import ON_OOM, Pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xmem.backend import Backend

_HEADER = 512  # what a pool may take of a free piece for itself, alignment included
_BYTES = 3 * (1 << 20) + 4


def _settle(backend: Backend) -> None:
    backend.measure.synchronize()
    gc.collect()


def _tensor(backend: Backend, size_bytes: int = _BYTES) -> object:
    tensor = backend.models.tensor(np.ones(size_bytes // 4, np.float32))
    backend.measure.synchronize()
    return tensor


def test_it_has_what_the_contract_asks_for(backend: Backend) -> None:
    """Every method of the protocol is there."""
    need(backend, "pool")
    assert isinstance(backend.pool, Pool)


def test_its_counters_are_the_meters(backend: Backend) -> None:
    """One truth: what the pool says and what the meter says is the same."""
    need(backend, "pool", "measure", "models")
    _settle(backend)
    tensor = _tensor(backend)
    stats, counters = xmem.pool.stats(), backend.measure.counters()
    assert stats.allocated_bytes == counters.allocated_bytes
    assert stats.peak_allocated_bytes == counters.peak_allocated_bytes
    assert stats.reserved_bytes == counters.reserved_bytes
    assert stats.allocation_count == counters.allocation_count
    assert stats.out_of_memory_count == counters.out_of_memory_count
    del tensor


def test_a_tensor_moves_the_counters_by_what_it_takes(backend: Backend) -> None:
    """Allocated by its bytes, one allocation, and one free when it goes."""
    need(backend, "pool", "measure", "models")
    _settle(backend)
    before = xmem.pool.stats()
    tensor = _tensor(backend)
    held = xmem.pool.stats()
    del tensor
    _settle(backend)
    after = xmem.pool.stats()
    assert held.allocated_bytes - before.allocated_bytes == _BYTES
    assert after.allocated_bytes == before.allocated_bytes
    if held.reserved_bytes is not None:
        assert held.reserved_bytes >= held.allocated_bytes
        assert held.fragmentation == pytest.approx(1 - held.allocated_bytes / held.reserved_bytes)
    if held.allocation_count is not None and before.allocation_count is not None:
        assert held.allocation_count > before.allocation_count
    if after.free_count is not None and held.free_count is not None:
        assert after.free_count > held.free_count


_STRATEGIES = ("passthrough", "size_class", "bfc")


@pytest.fixture(params=_STRATEGIES)
def strategy(request: pytest.FixtureRequest, backend: Backend) -> Iterator[str]:
    """Each strategy in turn; a pool that knows none is what it is, once."""
    chosen: str = request.param
    offered = backend.offers("pool") and "strategy" in backend.pool.settings
    if not offered and chosen != _STRATEGIES[0]:
        pytest.skip("the pool has no strategies to choose from")
    if offered:
        xmem.pool.configure(strategy=chosen)
    yield chosen
    if offered:
        xmem.pool.configure(strategy=_STRATEGIES[0])


def test_its_segments_add_up(backend: Backend, strategy: str) -> None:
    """Blocks fill their segments, live ones are what is allocated, all are what is reserved."""
    need(backend, "pool", "measure", "models")
    refuse_gap(backend.pool, "segments")
    tensors = [_tensor(backend, n * 40_000) for n in (1, 7, 40, 300)]
    del tensors[1]
    _settle(backend)
    stats, segments = xmem.pool.stats(), backend.pool.segments()
    assert sum(s.size_bytes for s in segments) == stats.reserved_bytes
    assert stats.segment_count in (None, len(segments))
    blocks = [block for segment in segments for block in segment.blocks]
    assert sum(b.requested_bytes for b in blocks) == stats.allocated_bytes
    for segment in segments:
        assert sum(b.size_bytes for b in segment.blocks) <= segment.size_bytes
        assert all(b.requested_bytes <= b.size_bytes for b in segment.blocks)
    free = [b.size_bytes for b in blocks if b.category is None]
    if stats.largest_free_bytes is not None:
        assert 0 <= max(free, default=0) - stats.largest_free_bytes <= _HEADER


def test_a_limit_holds_and_can_be_taken_away(backend: Backend) -> None:
    """What passes it is refused; the pool tells how it stood then, and goes on."""
    need(backend, "pool", "measure", "models")
    refuse_gap(backend.measure, "limit")
    _settle(backend)
    stats = xmem.pool.stats()
    xmem.pool.configure(limit=stats.allocated_bytes + 1_000_000)
    assert xmem.pool.limit == stats.allocated_bytes + 1_000_000
    try:
        with pytest.raises(backend.pool.out_of_memory_type().__bases__[-1]) as caught:
            _tensor(backend)
        assert backend.pool.is_out_of_memory(caught.value)
        refusal = backend.pool.refusal()
        assert refusal is not None
        assert refusal.requested_bytes == _BYTES
        assert refusal.limit_bytes == stats.allocated_bytes + 1_000_000
        assert refusal.allocated_bytes >= stats.allocated_bytes
        del caught
        backend.pool.recover()
        small = _tensor(backend, 4000)
        del small
    finally:
        xmem.pool.configure(limit=None)
    assert xmem.pool.stats().limit_bytes is None
    tensor = _tensor(backend)
    del tensor
    after = xmem.pool.stats().out_of_memory_count
    if after is not None and stats.out_of_memory_count is not None:
        assert after == stats.out_of_memory_count + 1


def test_its_error_is_xmems_and_the_frameworks(backend: Backend) -> None:
    """One class for `except xmem.OutOfMemoryError` and for the framework's own."""
    need(backend, "pool")
    kind = backend.pool.out_of_memory_type()
    assert issubclass(kind, xmem.OutOfMemoryError)
    assert len(kind.__bases__) > 1


def test_trimming_gives_back_exactly_what_it_says(backend: Backend) -> None:
    """What it returns is by how much the reserved bytes fell; nothing of a tensor goes."""
    need(backend, "pool", "measure", "models")
    refuse_gap(backend.pool, "trim")
    run = SmallRun(backend, small_workload())
    first = run.step()
    _settle(backend)
    before = xmem.pool.stats()
    freed = xmem.pool.trim()
    after = xmem.pool.stats()
    assert before.reserved_bytes is not None
    assert after.reserved_bytes is not None
    assert freed == before.reserved_bytes - after.reserved_bytes
    assert after.allocated_bytes == before.allocated_bytes
    assert xmem.pool.trim() == 0
    assert np.isfinite(first)
    assert np.isfinite(run.step())


def test_preallocated_memory_is_used(backend: Backend) -> None:
    """Reserved grows at once, and a tensor that fits takes nothing anew."""
    need(backend, "pool", "measure", "models")
    refuse_gap(backend.pool, "preallocate")
    _settle(backend)
    caches = "strategy" in backend.pool.settings  # the framework itself may keep nothing
    if caches:
        xmem.pool.configure(strategy="bfc")
    xmem.pool.trim()
    before = xmem.pool.stats()
    took = xmem.pool.preallocate(16 << 20)
    held = xmem.pool.stats()
    assert before.reserved_bytes is not None
    assert held.reserved_bytes is not None
    assert took == held.reserved_bytes - before.reserved_bytes
    assert took >= 16 << 20
    assert xmem.pool.preallocate("16MiB") == 0
    tensor = _tensor(backend, 7 << 20)  # and a copy on the way, on some
    assert xmem.pool.stats().reserved_bytes == held.reserved_bytes
    del tensor
    _settle(backend)
    xmem.pool.trim()
    if caches:
        xmem.pool.configure(strategy="passthrough")


def test_the_peak_and_the_history_start_again(backend: Backend) -> None:
    """The history has the peak, to the byte."""
    need(backend, "pool", "measure", "models")
    refuse_gap(backend.pool, "history")
    _settle(backend)
    xmem.pool.reset_peak()
    before = xmem.pool.stats()
    assert before.peak_allocated_bytes == before.allocated_bytes
    tensor = _tensor(backend)
    del tensor
    _settle(backend)
    peak = xmem.pool.stats().peak_allocated_bytes
    assert peak is not None
    assert peak >= before.allocated_bytes + _BYTES
    assert max(p.allocated_bytes for p in backend.pool.history()) == peak


def test_a_snapshot_holds_the_counters(backend: Backend, tmp_path: Path) -> None:
    """It is readable JSON, and says what the pool says."""
    need(backend, "pool", "models")
    refuse_gap(backend.pool, "segments")
    tensor = _tensor(backend)
    path = xmem.pool.snapshot(tmp_path / "pool.json")
    found = json.loads(path.read_text())
    assert found["stats"]["allocated_bytes"] == xmem.pool.stats().allocated_bytes
    del tensor
    with pytest.raises(UsageError, match="optimizer=int"):
        xmem.pool.snapshot(tmp_path / "pool.json", optimizer=3)
    with pytest.raises(UsageError, match="json"):
        xmem.pool.snapshot(tmp_path / "pool.txt")


def test_warming_up_runs_real_steps(backend: Backend) -> None:
    """The steps train: as many as were asked for."""
    need(backend, "pool", "measure", "models", "training")
    run, plain = (SmallRun(backend, small_workload()) for _ in range(2))
    losses = [plain.step() for _ in range(4)]
    warm = xmem.pool.warm_up(run.step, steps=3)
    assert run.step() == pytest.approx(losses[3], rel=1e-6)
    assert warm.steps == 3
    assert warm.after.allocated_bytes >= warm.before.allocated_bytes
    assert min(warm.first_seconds, warm.last_seconds) > 0


def test_wrong_settings_change_nothing(backend: Backend) -> None:
    """Each is refused by name, before anything is set."""
    need(backend, "pool")
    before = xmem.pool.settings
    wrong: list[dict[str, Any]] = [
        {},
        {"limit": "8 pounds"},
        {"limit": -1},
        {"on_oom": "pray"},
        {"limit": "1GiB", "no_such_setting": 1},
        *({"limit": "1GiB", name: object()} for name in backend.pool.settings),
    ]
    for values in wrong:
        with pytest.raises(UsageError):
            xmem.pool.configure(**values)
    for name in backend.pool.elsewhere:
        with pytest.raises(CapabilityError, match=name):
            xmem.pool.configure(**dict[str, Any]({name: 1}))
    assert xmem.pool.settings == before
    assert xmem.pool.limit is None


def test_every_policy_is_to_be_had_or_refused_with_a_reason(backend: Backend) -> None:
    """No policy is taken and then forgotten."""
    need(backend, "pool")
    warnings.simplefilter("ignore", XmemWarning)  # without a limit "offload" has little to do
    for policy in ON_OOM:
        try:
            in_force = xmem.pool.configure(on_oom=policy)
        except CapabilityError:
            with pytest.raises(CapabilityError, match=policy):
                xmem.pool.configure(on_oom=policy)
            continue
        assert in_force["on_oom"] == policy
    assert xmem.pool.configure(on_oom="raise")["on_oom"] == "raise"


def test_a_step_that_does_not_fit_runs_where_tensors_may_leave(backend: Backend) -> None:
    """Nothing is moved while it fits; else never more than the limit is there. Losses agree."""
    need(backend, "pool", "measure", "models", "training")
    refuse_gap(backend.pool, "on_oom=offload")
    workload = small_workload(depth=12, width=128, batch=2048)

    def trained(share: float | None, highest: int = 0) -> tuple[list[float], int, int]:
        run = SmallRun(backend, workload)
        run.step()  # optimizer states are there
        _settle(backend)
        before = xmem.pool.stats()
        if share is not None:
            limit = before.allocated_bytes + round(highest * share)
            xmem.pool.configure(limit=limit, on_oom="offload")
        xmem.pool.reset_peak()
        losses = [run.step() for _ in range(2)]
        after = xmem.pool.stats()
        moved = (after.offloaded_bytes or 0) - (before.offloaded_bytes or 0)
        return losses, (after.peak_allocated_bytes or 0) - before.allocated_bytes, moved

    try:
        plain, plain_peak, _ = trained(None)
        losses, peak, moved = trained(1.5, plain_peak)
        assert losses == pytest.approx(plain, rel=1e-5)
        assert moved == 0
        losses, reached, moved = trained(1 / 1.6, peak)
        assert losses == pytest.approx(plain, rel=1e-5)
        assert moved > 0, (moved, reached, peak)
        assert reached <= peak / 1.6, (reached, peak)
    finally:
        xmem.pool.configure(limit=None, on_oom="raise")
