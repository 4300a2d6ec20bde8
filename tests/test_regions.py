"""What both backends share of checkpointing: segments, deferred blocks, streams, what is behind."""

import collections
import contextlib
import functools
import itertools
import random
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xmem
from xmem.behind import behind
from xmem.containers import Slot, fill, leaves, take_apart
from xmem.deferred import Deferred, extended, settled, value_of
from xmem.layouts import split
from xmem.mismatch import SAMPLED_VALUES, differs, sample_step
from xmem.pending import Setting
from xmem.randomness import Streams, stream_kinds

Pair = collections.namedtuple("Pair", "left right")


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4).flatmap(
        lambda lengths: st.tuples(st.just(lengths), st.integers(len(lengths), sum(lengths)))
    )
)
def test_segments_cover_every_block_once_in_order_and_are_of_like_length(drawn):
    lengths, count = drawn
    blocks = [[(f"{i}.{j}", object()) for j in range(n)] for i, n in enumerate(lengths)]
    segments = split(blocks, count)
    assert list(itertools.chain(*segments)) == list(itertools.chain(*blocks))
    assert len(segments) == count
    assert all(segments)
    for i in range(len(lengths)):
        own = [len(s) for s in segments if s[0][0].startswith(f"{i}.")]
        assert max(own) - min(own) <= 1
        assert all(s[0][0].split(".")[0] == s[-1][0].split(".")[0] for s in segments)


@pytest.mark.parametrize(("count", "segments"), [(1, 1), (2, 1), (3, 2), (24, 5), (100, 10)])
def test_sqrt_makes_about_the_square_root_of_segments(count, segments):
    assert len(split([[("", None)] * count], "sqrt")) == segments


class Ran:
    """Runs regions at once and notes how many blocks each has."""

    def __init__(self):
        self.lengths = []

    def __call__(self, function, args, kwargs, name):
        self.lengths.append(len(getattr(function, "forwards", "1")))
        return function(*args, **kwargs)


def no_versions(tree):
    return ()


def wait(run, key, forward, name, *args, **kwargs):
    """Call a block that waits for the rest of its segment."""
    setting = Setting(run, no_versions, key, contextlib.nullcontext)
    return extended(setting, forward, name, (), (args, kwargs))


def chain(run, *names, start=1.0):
    """Call blocks that double their input, deferred, one after the other."""
    found, x = [], start
    for name in names:
        x = wait(run, "float32", lambda x: 2 * x, name, x)
        found.append(x)
    return found


def test_deferred_blocks_run_together_when_the_last_is_asked_for():
    run = Ran()
    *_, last = chain(run, "a", "b", "c")
    assert run.lengths == []
    assert value_of(last) == 8.0
    assert run.lengths == [3]


def test_what_is_held_inside_a_segment_is_there_afterwards():
    run = Ran()
    first, second, third = chain(run, "a", "b", "c")
    assert value_of(third) == 8.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (first + 0, second * 1, 1 - first) == (2.0, 4.0, -1.0)
    assert run.lengths == [3]


def test_a_deferred_that_is_read_runs_what_it_needs_and_the_rest_waits():
    run = Ran()
    first, second, third = chain(run, "a", "b", "c")
    with pytest.warns(xmem.XmemWarning, match="after block 'b'"):
        assert second > 3
    assert run.lengths == [2]
    assert value_of(third) == 8.0
    assert run.lengths == [2, 1]
    assert value_of(first) == 2.0


def test_calls_under_another_precision_are_another_region():
    run = Ran()
    [first] = chain(run, "a")
    with pytest.warns(xmem.XmemWarning, match="cut short"):
        second = wait(run, "half", lambda x: 2 * x, "b", first)
    assert run.lengths == [1]
    assert value_of(second) == 4.0


def test_a_block_that_nobody_reads_runs_when_its_placeholder_is_dropped():
    run, calls = Ran(), []
    wait(run, "", calls.append, "a", 1)
    assert calls == [1]
    first = wait(run, "", lambda x: calls.append(x) or x, "a", 2)
    wait(run, "", calls.append, "b", first)
    assert calls == [1, 2, 2]
    assert value_of(first) == 2
    waiting = wait(run, "", lambda x: (calls.append(x), x), "c", 3)
    part = waiting[1]
    del waiting
    assert calls == [1, 2, 2]
    del part
    assert calls == [1, 2, 2, 3]


def test_two_readers_of_one_block_do_not_run_it_twice():
    run, calls = Ran(), []

    def block(x):
        calls.append(x)
        return 2 * x

    root = wait(run, "", block, "a", 1.0)
    left = wait(run, "", lambda x: x + 1, "b", root)
    with pytest.warns(xmem.XmemWarning):
        right = wait(run, "", lambda x: x + 2, "c", root)
    assert (value_of(left), value_of(right)) == (3.0, 4.0)
    assert calls == [1.0]


def test_parts_and_containers_of_deferred_values():
    run = Ran()
    made = wait(run, "", lambda x: {"y": [x, x + 1]}, "a", 1.0)
    later = wait(run, "", lambda pair, *, k: pair.left + k, "b", Pair(made["y"][1], 0), k=3)
    assert run.lengths == []
    assert settled([later, ({"z": later},)]) == [5.0, ({"z": 5.0},)]
    assert run.lengths == [2]


def test_an_error_in_a_segment_leaves_it_to_be_run_again():
    run, broken = Ran(), [True]

    def block(x):
        if broken:
            raise OSError("mine")
        return x

    waiting = wait(run, "", block, "a", 1.0)
    with pytest.raises(OSError, match="mine"):
        value_of(waiting)
    broken.clear()
    assert value_of(waiting) == 1.0


def test_a_deferred_holds_what_enters_it_only_until_it_has_run():
    class Input:
        pass

    import weakref

    given_ = Input()
    reference = weakref.ref(given_)
    waiting = wait(Ran(), "", lambda x: 3, "a", given_)
    del given_
    assert reference() is not None
    value_of(waiting)
    assert reference() is None


trees = st.recursive(
    st.one_of(st.integers(), st.text(max_size=2), st.none(), st.builds(object)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(st.integers(), inner, max_size=2).map(collections.OrderedDict),
        st.dictionaries(st.integers(), inner, max_size=2).map(
            lambda d: collections.defaultdict(list, d)
        ),
    ),
    max_leaves=12,
)


@given(trees)
def test_what_is_taken_apart_is_put_together_again(tree):
    found = []
    template = take_apart(tree, int, found)
    assert leaves(template, int) == []
    assert found == leaves(tree, int)
    assert [slot.index for slot in leaves(template, Slot)] == list(range(len(found)))
    again = fill(template, found)
    assert again == tree
    assert type(again) is type(tree)
    assert repr(again) == repr(tree)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["python", "numpy", "normal", "held", "legacy", "own"]), max_size=12),
    st.lists(st.sampled_from(["python", "numpy", "normal", "held", "legacy", "own"]), max_size=12),
)
def test_every_stream_draws_again_what_it_drew_and_goes_on(inside, between):
    held, legacy, own = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)

    def draw(kinds):
        return [
            {
                "python": random.random,
                "numpy": np.random.rand,
                "normal": np.random.randn,
                "held": held.standard_normal,
                "legacy": legacy.randn,
                "own": own.gauss,
            }[kind](*((0, 1) if kind == "own" else ()))
            for kind in kinds
        ]

    streams = Streams([held, legacy, own], stream_kinds())
    first = draw(inside)
    streams.first_pass_ended()
    assert streams.drawn == bool(inside)
    draw(between)
    plain = Streams([held, legacy, own], stream_kinds())
    after = draw(between + inside)
    plain.rewind()
    with streams.replayed():
        assert draw(inside) == first
    assert draw(between + inside) == after


class Module:
    def __init__(self, **parts):
        self.__dict__.update(parts)

    def forward(self):
        pass


NAMED = Module()


def test_modules_are_found_wherever_a_function_can_reach_them():
    a, b, c, d = (Module() for _ in range(4))
    caught = {"list": [a, (b,)]}

    def closure(x, default=d):
        return caught, c, NAMED, x

    class Callable:
        def __init__(self):
            self.part = [a]

        def __call__(self):
            pass

        def method(self):
            pass

    assert set(behind(closure, Module)) == {a, b, c, d, NAMED}
    assert behind(a.forward, Module) == [a]
    assert behind(a, Module) == [a]
    assert set(behind(functools.partial(closure.__get__(b), d), Module)) >= {a, b, c, d}
    assert behind(Callable(), Module) == [a]
    assert behind(Callable().method, Module) == [a]
    assert behind(print, Module) == []


@given(st.integers(0, 10**7))
def test_samples_are_bounded_and_of_the_whole(count):
    sampled = len(range(0, count, sample_step(count)))
    assert sampled <= 2 * SAMPLED_VALUES
    assert sampled >= min(count, SAMPLED_VALUES // 2)


def test_rounding_is_no_difference_and_other_data_is():
    a = np.random.default_rng(0).standard_normal(1000)
    assert not differs(a, a * (1 + 1e-6))
    assert differs(a, a * 1.01)
    assert differs(a, np.roll(a, 1))
    assert differs(a, a[:-1])
    assert differs(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    assert not differs(np.array([1.0, np.inf]), np.array([1.0, np.inf]))
    assert not differs(np.zeros(3), np.zeros(3))
    assert differs(np.zeros(3), np.ones(3))


def test_a_deferred_has_its_own_identity():
    first, second = chain(Ran(), "a", "b")
    assert len({first, second}) == 2
    assert isinstance(first, Deferred)
