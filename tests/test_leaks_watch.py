"""The watch itself, with a framework made of plain objects."""

import weakref
from collections import Counter
from types import SimpleNamespace

import pytest

import xmem
from xmem import leaks
from xmem.errors import LeakError
from xmem.leak_notes import pool_notes
from xmem.pooling import PoolStats


class Thing:
    """A tensor of 100 bytes."""

    shape = (25,)

    def __init__(self, pool):
        pool.alive.add(self)


class Pool:
    """Knows what is alive, and counts how often it was asked."""

    def __init__(self):
        self.alive = weakref.WeakSet()
        self.asked = Counter()
        self.extra_bytes = 0
        self.step_ended = None

    def live_tensors(self):
        self.asked["live_tensors"] += 1
        return list(self.alive)

    def live_counts(self):
        self.asked["live_counts"] += 1
        return {"tensors": len(self.alive), "live_ops": 0, "live_vars": len(self.alive)}

    def stats(self):
        used = 100 * len(self.alive) + self.extra_bytes
        return PoolStats(used, used, used, used, None, 1, None, None, 0, 0, None)

    def tensor_bytes(self, tensor):
        return 100

    def graph_of(self, tensor):
        return None

    def identity_of(self, tensor):
        return weakref.ref(tensor)

    def on_step(self, call):
        self.step_ended = call

        def end():
            self.step_ended = None

        return end


@pytest.fixture
def pool(monkeypatch):
    made = Pool()
    measure = SimpleNamespace(counters=lambda: None, owned=lambda *_: {})
    backend = SimpleNamespace(pool=made, measure=measure)
    monkeypatch.setattr(leaks, "active", lambda: backend)
    return made


def leak(pool, watch, steps, kept):
    for _ in range(steps):
        kept.append(Thing(pool))
        watch.step()


def test_a_leak_warns_once_with_owner_line_and_remedy(pool):
    kept = []
    with pytest.warns(xmem.XmemWarning) as said, leaks.watch_leaks() as watch:
        leak(pool, watch, 80, kept)
    assert len(said) == 1
    [found] = watch.findings
    text = str(said[0].message)
    assert "100 bytes per step" in text
    assert "list `kept`" in text
    assert found.made_at is not None
    assert found.made_at.startswith("test_leaks_watch.py:")
    assert found.remedy in text
    assert found.found_at_step == 19
    assert said[0].filename == __file__


def test_a_leak_raises_at_the_step_and_leaves_nothing_behind(pool):
    kept = []
    watch = leaks.watch_leaks(on_leak="raise")
    with pytest.raises(LeakError, match="`kept`"), watch:
        leak(pool, watch, 30, kept)
    assert len(kept) == 19
    assert pool.step_ended is None
    del kept[:]
    assert len(pool.alive) == 0


def test_a_calm_run_is_never_looked_at_closely(pool):
    with leaks.watch_leaks(on_leak="raise") as watch:
        for _ in range(500):
            Thing(pool)
            watch.step()
    assert pool.asked["live_tensors"] == 1  # at the end of the warm-up


def test_steps_that_are_not_sampled_read_nothing(pool):
    with leaks.watch_leaks(every=10, on_leak="raise") as watch:
        before = pool.asked["live_counts"]
        for _ in range(100):
            watch.step()
    assert pool.asked["live_counts"] - before <= 11


def test_a_leak_is_found_when_only_each_third_step_is_sampled(pool):
    found, kept = [], []
    with leaks.watch_leaks(every=3, on_leak=found.append) as watch:
        leak(pool, watch, 60, kept)
    [only] = found
    assert only.bytes_per_step == 100


def test_optimizers_end_steps_until_somebody_calls_step(pool):
    first, second = object(), object()
    with leaks.watch_leaks() as watch:
        for _ in range(3):
            pool.step_ended(first)
            pool.step_ended(second)
        assert watch.steps == 3
        watch.step()
        pool.step_ended(first)
        assert watch.steps == 1


def test_a_given_optimizer_is_the_one_that_counts(pool):
    first, second = object(), object()
    with leaks.watch_leaks(optimizer=second) as watch:
        pool.step_ended(first)
        pool.step_ended(second)
        assert watch.steps == 1


def test_a_queue_that_moves_on_is_not_named_beside_the_leak(pool):
    kept, queue, found = [], [], []
    with leaks.watch_leaks(on_leak=found.append) as watch:
        for _ in range(30):
            queue.append(Thing(pool))
            if len(queue) > 12:
                queue.pop(0)
            kept.append(Thing(pool))
            kept.append(Thing(pool))
            watch.step()
    assert found
    assert all("`kept`" in leak.owner for leak in found)


def test_a_cache_that_is_full_just_then_is_no_leak(pool):
    cache = {}
    with leaks.watch_leaks(on_leak="raise") as watch:
        for step in range(60):
            if step < 18:
                cache[step] = Thing(pool)
            watch.step()
    assert watch.findings == []


def test_bytes_without_an_owner_are_reported_as_unexplained(pool):
    found = []
    with leaks.watch_leaks(on_leak=found.append) as watch:
        for _ in range(25):
            pool.extra_bytes += 50
            watch.step()
    [only] = found
    assert (only.kind, only.owner, only.bytes_per_step) == ("unexplained", "", 50)


def test_an_error_in_the_block_is_not_covered_by_the_watch(pool):
    with pytest.raises(ZeroDivisionError), leaks.watch_leaks():
        raise ZeroDivisionError
    assert pool.step_ended is None


def test_a_step_outside_of_the_block_is_refused(pool):
    watch = leaks.watch_leaks()
    with pytest.raises(xmem.MeasurementError, match="with"):
        watch.step()


def stats(allocated_bytes, reserved_bytes, largest_free_bytes):
    return PoolStats(
        allocated_bytes, None, reserved_bytes, None, None, 1, 0, 0, largest_free_bytes, 0, None
    )


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (stats(10 << 20, 30 << 20, 20 << 20), "cache growth"),
        (stats(10 << 20, 30 << 20, 1 << 20), "fragmentation"),
        (stats(30 << 20, 30 << 20, 0), None),
        (stats(10 << 20, 12 << 20, 2 << 20), None),
    ],
)
def test_what_the_pool_keeps_is_a_note_and_no_leak(last, kind):
    first = stats(10 << 20, 12 << 20, 2 << 20)
    assert [note.kind for note in pool_notes(first, last)] == ([] if kind is None else [kind])
