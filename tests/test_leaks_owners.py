"""Holders are named as a person names them; plain objects stand for tensors."""

import functools
import gc
import sys
from collections import OrderedDict, deque

import pytest

from xmem.leak_lines import LineFinder
from xmem.leak_owners import Search

GLOBAL = []


class Thing:
    """Stands for a tensor."""

    __slots__ = ("__weakref__",)


class Trainer:
    seen = {}  # noqa: RUF012

    def __init__(self):
        self.history = {"loss": []}


class Record:
    __slots__ = ("value",)


def owners(things):
    with Search(things) as search:
        return [
            search.owner_of(holder, members[0])
            for holder, members in search.common(things)
            if len(members) == len(things)
        ]


def in_a_local_list(things, look):
    losses = list(things)
    return look(things), "list `losses` (local of in_a_local_list, test_leaks_owners.py:", losses


def in_a_global_list(things, look):
    GLOBAL[:] = things
    return look(things), "list `GLOBAL` (global of module ", GLOBAL


def in_an_attribute(things, look):
    trainer = Trainer()
    trainer.history["loss"].extend(things)
    return look(things), "list `history['loss']` (attribute of Trainer)", trainer


def in_a_class_attribute(things, look):
    Trainer.seen.update(enumerate(things))
    return look(things), "dict `Trainer.seen` (class attribute)", None


def in_a_closure(things, look):
    def collector():
        kept = []
        return lambda thing: kept.append(thing)

    collect = collector()
    for thing in things:
        collect(thing)
    return look(things), "list `kept` (closure variable of in_a_closure.<locals>.", collect


def in_dicts_of_a_list(things, look):
    records = [{"loss": thing, "step": i} for i, thing in enumerate(things)]
    return look(things), "in `records[...]['loss']`", records


def in_slots_of_objects(things, look):
    records = [Record() for _ in things]
    for record, thing in zip(records, things, strict=True):
        record.value = thing
    return look(things), "in `records[...].value`", records


def in_an_ordered_dict(things, look):
    cache = OrderedDict(enumerate(things))
    return look(things), "OrderedDict `cache` (local of in_an_ordered_dict", cache


PLACES = (
    in_a_local_list,
    in_a_global_list,
    in_an_attribute,
    in_a_class_attribute,
    in_a_closure,
    in_dicts_of_a_list,
    in_slots_of_objects,
    in_an_ordered_dict,
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_the_holder_of_most_is_named(place):
    [owner], text, _ = place([Thing() for _ in range(6)], owners)
    assert text in owner.text
    GLOBAL.clear()
    Trainer.seen.clear()


def test_a_search_holds_nothing_afterwards():
    things = [Thing() for _ in range(4)]
    kept = list(things)
    owners(things)
    gc.collect()
    before = len(gc.get_referrers(things[0]))
    owners(things)
    assert len(gc.get_referrers(things[0])) == before
    assert len(kept) == 4


@pytest.mark.parametrize(("length", "bounded"), [(50, True), (None, False)])
def test_a_deque_says_how_much_it_takes(length, bounded):
    things = [Thing() for _ in range(6)]
    last = deque(things, maxlen=length)
    [owner] = owners(things)
    assert owner.bound == length
    assert owner.is_bounded is bounded
    assert last


def test_a_function_cache_says_how_much_it_takes():
    @functools.lru_cache(maxsize=32)
    def make(number):
        return Thing()

    [owner] = owners([make(i) for i in range(6)])
    assert owner.bound == 32
    assert "make" in owner.text


def test_a_capacity_that_is_passed_bounds_nothing():
    class Buffer:
        capacity = 4

        def __init__(self):
            self.items = []

    buffer = Buffer()
    things = [Thing() for _ in range(6)]
    buffer.items.extend(things)
    [owner] = owners(things)
    assert (owner.bound, owner.is_bounded) == (4, False)
    buffer.capacity = 10
    [owner] = owners(things)
    assert owner.is_bounded


def test_containers_that_the_collector_leaves_out_are_found():
    number = 10**20  # stands for a tensor that Python's garbage collector does not know
    cache = {"a": number}
    gc.collect()
    assert not gc.is_tracked(cache)
    with Search() as search:
        owner = search.owner_of(number)
    assert owner is not None
    assert "`number`" in owner.text
    with Search() as search:
        assert any(holder is cache for holder in search.holders([number])[id(number)])


def test_the_line_that_appends_is_found():
    if sys.gettrace() is not None:
        pytest.skip("something else traces")
    losses = []
    with Search() as search:
        owner = search.owner_of(losses)
    finder = LineFinder([owner], lambda value: None)
    assert finder.start()
    other = [1]
    losses.append(other)
    other = [2]
    lines = finder.stop()
    assert other == [2]
    assert sys.gettrace() is None
    file, line = lines[0].split(":")
    assert file == "test_leaks_owners.py"
    with open(__file__) as source:  # noqa: PTH123
        assert source.read().splitlines()[int(line) - 1].strip() == "losses.append(other)"
