import threading

import pytest

from xmem.distributed import counting
from xmem.distributed.counting import Traffic, hold, note, release, sent_by_ring, traffic, waited
from xmem.errors import UsageError


@pytest.fixture(autouse=True)
def _from_zero():
    traffic(reset=True)
    yield
    traffic(reset=True)


@pytest.mark.parametrize(
    ("kind", "ranks", "sent"),
    [
        ("all_reduce", 2, 1000),
        ("all_reduce", 4, 1500),
        ("reduce_scatter", 4, 750),
        ("all_gather", 4, 750),
        ("all_to_all", 2, 500),
        ("broadcast", 4, 750),
        ("reduce", 2, 500),
        ("send", 4, 1000),
        ("all_reduce", 1, 0),
        ("send", 1, 0),
    ],
)
def test_bytes_are_those_of_a_ring(kind, ranks, sent):
    assert sent_by_ring(kind, 1000, ranks) == sent


def test_bytes_that_cannot_be_shared_are_rounded_up():
    assert sent_by_ring("all_reduce", 1001, 3) == 1335
    assert sent_by_ring("all_gather", 1, 3) == 1


def test_what_every_rank_sends_adds_up_to_what_a_broadcast_needs():
    assert 4 * sent_by_ring("broadcast", 1000, 4) == 3 * 1000


def test_an_unknown_kind_is_refused_before_it_is_counted():
    with pytest.raises(UsageError, match="'gossip' is no kind"):
        note("gossip", 10, 2)
    assert traffic().calls == {}


def test_calls_bytes_and_seconds_add_up_until_a_reset():
    note("all_reduce", 1000, 2, seconds=0.5)
    note("all_reduce", 1000, 2)
    note("send", 8, 2)
    waited(0.25)
    found = traffic(reset=True)
    assert found.calls == {"all_reduce": 2, "send": 1}
    assert found.sent_bytes == {"all_reduce": 2000, "send": 8}
    assert found.total_sent_bytes == 2008
    assert found.seconds == 0.75
    assert traffic() == Traffic({}, {}, 0.0, 0)


def test_buffers_count_as_the_most_that_was_held_at_once():
    hold(100)
    hold(50)
    release(100)
    hold(60)
    assert traffic(reset=True).buffer_bytes == 150
    assert traffic().buffer_bytes == 110
    release(110)


def test_what_was_returned_does_not_change_any_more():
    note("send", 8, 2)
    before = traffic()
    note("send", 8, 2)
    assert before.calls == {"send": 1}


def test_threads_lose_no_count():
    def work():
        for _ in range(500):
            note("send", 1, 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert traffic().calls == {"send": 2000}


def test_a_backend_s_own_clock_is_asked_each_time(monkeypatch):
    spent = [0.5, 0.25, 1.0]
    monkeypatch.setattr(counting, "_clocks", set())
    counting.ask(lambda: spent.pop(0))
    waited(2.0)
    assert traffic().seconds == 2.5
    assert traffic(reset=True).seconds == 2.75
    assert traffic().seconds == 1.0
