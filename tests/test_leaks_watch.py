"""The watch itself, with a framework made of plain objects."""

import sys
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


@pytest.mark.parametrize("length", [12, 13, 14, 18])
def test_a_list_that_each_epoch_begins_anew_is_no_leak(pool, length):
    with leaks.watch_leaks(on_leak="raise") as watch:
        for _ in range(10):
            losses = []
            leak(pool, watch, length, losses)
    assert watch.findings == []


def test_what_the_program_drops_is_not_held_by_an_open_case(pool):
    alive = []
    with leaks.watch_leaks(on_leak=lambda _: None) as watch:
        kept = []
        for step in range(1, 60):
            kept.append(Thing(pool))
            if step == 18:
                assert watch._case is None
            watch.step()
            if step == 18:
                assert watch._case is not None
                kept = []
            alive.append(len(pool.alive))
    assert alive[18:20] == [1, 2]
    assert watch.findings == [] or watch.findings[0].found_at_step > 30


class Config(dict):
    """As argparse-like packages have it: any name is a key."""

    __getattr__ = dict.__getitem__


class Refusing:
    """Answers no question but for its one attribute."""

    __slots__ = ("kept",)

    def __init__(self, kept):
        self.kept = kept

    def __getattr__(self, name):
        raise RuntimeError(name)


class WithProperty:
    """Has a bound that cannot be told."""

    def __init__(self):
        self.kept = []

    @property
    def maxlen(self):
        raise OSError


@pytest.mark.parametrize("kind", [Config, Refusing, WithProperty], ids=lambda kind: kind.__name__)
def test_objects_that_answer_badly_are_named_nevertheless(pool, kind):
    found = []
    kept = kind() if kind is not Refusing else kind([])
    with leaks.watch_leaks(on_leak=found.append) as watch:
        for step in range(25):
            if kind is Config:
                kept[step] = Thing(pool)
            else:
                kept.kept.append(Thing(pool))
            watch.step()
    [only] = found
    assert "kept" in only.owner
    assert only.made_at is not None


@pytest.mark.parametrize("broken", ["stats", "live_tensors", "tensor_bytes", "identity_of"])
def test_a_watch_that_fails_says_so_once_and_training_goes_on(pool, monkeypatch, broken):
    def fail(*_):
        raise KeyError("broken here")

    kept = []
    watch = leaks.watch_leaks()
    monkeypatch.setattr(pool, broken, fail)
    with pytest.warns(xmem.XmemWarning, match="broken here") as said, watch:
        leak(pool, watch, 40, kept)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert watch.steps == 40
    assert [note.kind for note in watch.notes] == ["stopped"]
    assert pool.step_ended is None
    assert sys.gettrace() is None


def test_a_failure_while_lines_are_traced_does_not_reach_the_code(pool):
    class Growing(list):
        def __len__(self):
            if sys.gettrace() is not None:
                raise OSError
            return super().__len__()

    kept = Growing()
    with pytest.warns(xmem.XmemWarning), leaks.watch_leaks() as watch:
        leak(pool, watch, 40, kept)
    assert len(kept) == 40
    assert sys.gettrace() is None


def test_an_error_of_what_on_leak_calls_comes_through(pool):
    def stop(found):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), leaks.watch_leaks(on_leak=stop) as watch:
        leak(pool, watch, 40, [])
    assert len(watch.findings) == 1
    assert pool.step_ended is None


def test_variables_that_a_function_has_noted_stay_noted(pool):
    def train(rate, width):
        settings = locals()
        kept = []
        with leaks.watch_leaks(on_leak=lambda _: None) as watch:
            leak(pool, watch, 30, kept)
        assert len(watch.findings) == 1
        return settings

    settings = train(0.5, 3)
    assert (settings["rate"], settings["width"]) == (0.5, 3)


def test_a_debugger_that_begins_while_lines_are_traced_goes_on(pool):
    def mine(frame, event, argument):
        return None

    kept = []
    before = sys.gettrace()
    try:
        with leaks.watch_leaks(on_leak=lambda _: None) as watch:
            for _ in range(30):
                kept.append(Thing(pool))
                if watch._lines is not None and sys.gettrace() is not None:
                    sys.settrace(mine)
                watch.step()
        assert sys.gettrace() is mine
    finally:
        sys.settrace(before)


def test_an_error_in_the_traced_step_ends_tracing(pool):
    kept = []

    def train(watch):
        while True:
            kept.append(Thing(pool))
            assert sys.gettrace() is None, "traced"
            watch.step()

    with pytest.raises(AssertionError, match="traced"), leaks.watch_leaks() as watch:
        train(watch)
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None


def test_kept_exceptions_are_named_with_the_variable_that_they_hold(pool):
    def fail():
        value = Thing(pool)
        raise ValueError(id(value))

    errors, found = [], []
    with leaks.watch_leaks(on_leak=found.append) as watch:
        for _ in range(25):
            try:
                fail()
            except ValueError as error:
                errors.append(error)
            watch.step()
    [only] = found
    assert "list `errors`" in only.owner
    assert "f_locals['value']" in only.owner
    assert only.made_at is not None


def test_one_watch_inside_another_finds_the_same(pool):
    outer, inner, kept = [], [], []
    with (
        leaks.watch_leaks(on_leak=outer.append) as first,
        leaks.watch_leaks(on_leak=inner.append) as second,
    ):
        for _ in range(25):
            kept.append(Thing(pool))
            first.step()
            second.step()
    assert [leak.owner for leak in outer] == [leak.owner for leak in inner]
    assert len(outer) == 1


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
