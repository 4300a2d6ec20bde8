"""The CPU pool on PyTorch: exact counters, what is kept, what goes back, and the same training."""

import functools
import random

import pytest
import torch
from on_torch.pooling import (
    KB,
    MB,
    allocated,
    blocks,
    check,
    library,
    old_objects_apart,
    pool,
    reserved,
    same,
    train,
)

import xmem

__all__ = ["old_objects_apart", "pool"]

STRATEGIES = {
    "passthrough": {"strategy": "passthrough"},
    "passthrough huge": {"strategy": "passthrough", "huge_pages": True},
    "size_class": {"strategy": "size_class", "min_cached": 64 * KB},
    "bfc": {"strategy": "bfc"},
    "bfc all sizes": {"strategy": "bfc", "min_cached": 0, "segment_size": 256 * KB},
    "bfc huge": {"strategy": "bfc", "huge_pages": True, "segment_size": 4 * MB},
    "bfc bounded": {"strategy": "bfc", "cache_limit": MB, "reserve_ratio": None},
    "bfc nothing kept": {"strategy": "bfc", "cache_limit": 0},
}
strategies = pytest.mark.parametrize("values", STRATEGIES.values(), ids=STRATEGIES)


@strategies
def test_training_gives_the_same_bits_with_each_strategy(pool, values):
    pool.configure(values, None)
    assert same(train(), trained_without_xmem())
    assert check() == 0


@functools.cache
def trained_without_xmem():
    library().xmem_torch_uninstall()
    try:
        return train()
    finally:
        library().xmem_torch_install()


@strategies
@pytest.mark.parametrize("seed", range(3))
def test_counters_are_exact_under_random_requests(pool, values, seed):
    pool.configure(values, None)
    draw = random.Random(seed)
    before, start = pool.stats(), allocated(pool)
    live, asked, peak, made = [], 0, 0, 0
    for step in range(600):
        if live and draw.random() < 0.48:
            asked -= live.pop(draw.randrange(len(live))).nbytes
        else:
            size = int(2 ** draw.uniform(0, 21 if draw.random() < 0.3 else 17))
            live.append(torch.empty(size, dtype=torch.uint8))
            asked += size
            made += 1
            peak = max(peak, asked)
        if step % 100 == 0:
            assert check() == 0
            found = pool.stats()
            assert found.allocated_bytes == start + asked
            assert found.peak_allocated_bytes == start + peak
            assert found.allocation_count - before.allocation_count == made
            segments = pool.segments()
            assert sum(s.size_bytes for s in segments) == found.reserved_bytes
            assert len(segments) == found.segment_count
            assert found.peak_reserved_bytes >= found.reserved_bytes >= found.allocated_bytes
    live.clear()
    found = pool.stats()
    assert found.allocated_bytes == start
    assert found.free_count - before.free_count == made
    held = found.reserved_bytes
    assert pool.trim() == held - reserved(pool)
    assert check() == 0


def test_segments_are_tiled_by_their_blocks(pool):
    pool.configure({"strategy": "bfc", "segment_size": MB}, None)
    live = [torch.empty(n * KB, dtype=torch.uint8) for n in (100, 200, 300, 5000)]
    del live[1]
    addresses = {t.data_ptr(): t.nbytes for t in live}
    for segment in pool.segments():
        address = segment.address
        for block in segment.blocks:
            assert block.address == address
            assert (block.requested_bytes == 0) == (block.category is None) == (block.birth == 0)
            address += block.size_bytes
        assert address == segment.address + segment.size_bytes
    found = {b.address: b.requested_bytes for b in blocks(pool) if b.requested_bytes}
    assert addresses.items() <= found.items()


def test_what_is_freed_in_any_order_becomes_one_piece_again(pool):
    pool.configure({"strategy": "bfc", "segment_size": 4 * MB}, None)
    for seed in range(10):
        live = [torch.empty(256 * KB, dtype=torch.uint8) for _ in range(15)]
        assert len(blocks(pool)) == 16
        random.Random(seed).shuffle(live)
        while live:
            live.pop()
        [block] = blocks(pool)
        assert block.requested_bytes == 0
        assert block.size_bytes == 4 * MB + 4 * KB
    assert pool.stats().largest_free_bytes == 4 * MB + 4 * KB - 64
    again = torch.empty(4 * MB, dtype=torch.uint8)
    assert again.data_ptr() == block.address
    assert len({s.address for s in pool.segments() if s.size_bytes > MB}) == 1


def test_the_best_fit_is_taken_and_the_rest_stays_free(pool):
    pool.configure({"strategy": "bfc", "segment_size": 8 * MB}, None)
    walls, holes = [], []
    for size in (3 * MB, MB, 2 * MB):
        holes.append(torch.empty(size, dtype=torch.uint8))
        walls.append(torch.empty(64 * KB, dtype=torch.uint8))
    large, small, middle = (t.data_ptr() for t in holes)
    holes.clear()
    first = torch.empty(MB, dtype=torch.uint8)
    second = torch.empty(1900 * KB, dtype=torch.uint8)  # more than is left behind the last wall
    third = torch.empty(100 * KB, dtype=torch.uint8)  # from the rest of the middle one
    assert [t.data_ptr() for t in (first, second, third)] == [
        small,
        middle,
        middle + second.nbytes + 64,
    ]
    assert torch.empty(3 * MB, dtype=torch.uint8).data_ptr() == large


def test_the_best_fit_is_found_among_nearly_equal_pieces(pool):
    pool.configure({"strategy": "bfc", "segment_size": 8 * MB}, None)
    walls, holes = [], {}
    for size in (1100, 1030, 1060, 1040, 1090):
        holes[size] = torch.empty(size * KB, dtype=torch.uint8)
        walls.append(torch.empty(64 * KB, dtype=torch.uint8))
    addresses = {size: hole.data_ptr() for size, hole in holes.items()}
    holes.clear()
    live = []
    for asked, size in ((1035, 1040), (1035, 1060), (1080, 1090), (1000, 1030), (1035, 1100)):
        live.append(torch.empty(asked * KB, dtype=torch.uint8))
        assert live[-1].data_ptr() == addresses[size]


def test_a_size_class_fits_again_and_nothing_larger_than_the_slack_is_given(pool):
    pool.configure({"strategy": "size_class", "divisions": 4, "slack": 0.25}, None)
    start = reserved(pool)
    address = torch.empty(4 * MB, dtype=torch.uint8).data_ptr()
    assert reserved(pool) - start == 5 * MB  # the header makes it the class after 4 MiB
    again = torch.empty(4 * MB + 100, dtype=torch.uint8)
    assert again.data_ptr() == address
    del again
    other = torch.empty(2 * MB, dtype=torch.uint8)
    assert other.data_ptr() != address


@pytest.mark.parametrize("divisions", [1, 3, 5, 8, 10, 1000])
def test_what_is_freed_of_a_class_serves_the_largest_request_it_says(pool, divisions):
    """A class is its own class, whole pages or not."""
    pool.configure({"strategy": "size_class", "divisions": divisions, "slack": 0.0}, None)
    for size in (MB, 1_300_000, 2_700_001, 4 * MB - 4, 4 * MB, 9_999_999):
        pool.trim()
        torch.empty(size, dtype=torch.uint8)
        held, largest = reserved(pool), pool.stats().largest_free_bytes
        assert largest >= size
        again = torch.empty(largest, dtype=torch.uint8)
        assert reserved(pool) == held
        del again


def test_a_free_piece_that_no_request_would_get_is_no_largest_one(pool):
    pool.configure({"strategy": "bfc"}, None)
    live = torch.empty(2 * MB - 16 * KB, dtype=torch.uint8)
    assert pool.stats().largest_free_bytes == 0  # smaller requests pass through
    pool.configure({"min_cached": 0}, None)
    assert pool.stats().largest_free_bytes > 16 * KB
    del live


@strategies
def test_data_lies_on_cache_lines(pool, values):
    pool.configure(values, None)
    sizes = (1, 63, 64, 65, 4000, 64 * KB, 300_001, MB, 5 * MB + 3)
    live = [torch.empty(size, dtype=torch.uint8) for size in sizes for _ in range(3)]
    del live[::2]
    live += [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert not any(tensor.data_ptr() % 64 for tensor in live)


def test_small_requests_pass_through(pool):
    pool.configure({"strategy": "bfc", "min_cached": MB}, None)
    before = reserved(pool)
    small = torch.empty(MB - 1, dtype=torch.uint8)
    assert reserved(pool) - before == MB + 64
    del small
    assert reserved(pool) == before


def test_trim_gives_the_memory_of_the_process_back(pool):
    pool.configure({"strategy": "bfc", "huge_pages": True}, None)
    torch.ones(64 * MB, dtype=torch.uint8)
    with_cache = pool.stats()
    assert with_cache.reserved_bytes >= 64 * MB
    fell = pool.trim()
    after = pool.stats()
    assert fell == with_cache.reserved_bytes - after.reserved_bytes >= 64 * MB
    assert with_cache.process_bytes - after.process_bytes > 60 * MB
    assert pool.trim() == 0


@pytest.mark.parametrize("bound", [0, 3 * MB, 16 * MB])
@pytest.mark.parametrize("strategy", ["bfc", "size_class"])
def test_no_more_is_kept_than_the_bound(pool, bound, strategy):
    pool.configure({"strategy": strategy, "cache_limit": bound, "min_cached": 64 * KB}, None)
    for _ in range(3):
        live = [torch.empty(n * MB, dtype=torch.uint8) for n in (1, 2, 4, 8)]
        while live:
            live.pop()
            assert reserved(pool) - allocated(pool) - 64 * 8 <= bound + 2 * MB
        assert reserved(pool) - allocated(pool) <= bound + 64 * KB
        assert check() == 0


def test_a_lower_bound_or_another_strategy_gives_back_at_once(pool):
    for values in ({"cache_limit": 0}, {"strategy": "size_class"}, {"strategy": "passthrough"}):
        pool.configure({"strategy": "bfc", "cache_limit": None}, None)
        start = reserved(pool)
        torch.empty(8 * MB, dtype=torch.uint8)
        assert reserved(pool) - start >= 8 * MB
        pool.configure(values, None)
        assert reserved(pool) == start


def test_free_segments_go_back_before_much_more_is_reserved_than_was_ever_live(pool):
    def grow():
        pool.trim()
        for size in range(1, 40):  # each too small for the next
            torch.empty(size * MB, dtype=torch.uint8)
        return reserved(pool)

    pool.configure({"strategy": "bfc", "reserve_ratio": None}, None)
    unbounded = grow()
    pool.configure({"strategy": "bfc", "reserve_ratio": 1.5}, None)
    bounded = grow()
    print(f"unbounded {unbounded}, bounded {bounded}")
    assert unbounded > 500 * MB
    assert bounded <= 1.5 * 40 * MB


def test_preallocated_memory_is_there_in_one_piece(pool):
    pool.configure({"strategy": "bfc"}, None)
    before = reserved(pool)
    taken = pool.preallocate(32 * MB)
    assert taken == reserved(pool) - before >= 32 * MB
    assert pool.stats().largest_free_bytes >= 32 * MB
    assert pool.preallocate(32 * MB) == 0
    live = [torch.empty(4 * MB, dtype=torch.uint8) for _ in range(7)]
    assert reserved(pool) - before == taken
    assert pool.preallocate(32 * MB) > 0
    del live


def test_preallocation_that_could_not_be_kept_or_used_is_refused(pool):
    with pytest.raises(xmem.UsageError, match="passthrough"):
        pool.preallocate(MB)
    pool.configure({"strategy": "bfc", "cache_limit": MB}, None)
    with pytest.raises(xmem.UsageError, match="cache_limit"):
        pool.preallocate(2 * MB)
    with pytest.raises(xmem.UsageError, match="min_cached"):
        pool.preallocate(100)
    pool.configure({"cache_limit": None}, None)
    pool.set_limit(allocated(pool) + MB)
    with pytest.raises(xmem.UsageError, match="limit"):
        pool.preallocate(2 * MB)
    pool.set_limit(None)
    for size in (1 << 50, 1 << 62, (1 << 63) - 1, (1 << 63) + 5 * MB, (1 << 64) + MB):
        with pytest.raises(torch.OutOfMemoryError, match="one piece") as caught:
            pool.preallocate(size)
        assert isinstance(caught.value, xmem.OutOfMemoryError)
    assert check() == 0


@pytest.mark.parametrize("strategy", ["bfc", "size_class"])
def test_preallocation_keeps_to_the_cache_limit_and_the_limit(pool, strategy):
    pool.configure({"strategy": strategy, "cache_limit": 8 * MB}, None)
    with pytest.raises(xmem.UsageError, match="cache_limit"):
        pool.preallocate(8 * MB)  # and a header
    torch.empty(3 * MB, dtype=torch.uint8)
    assert pool.preallocate(6 * MB) > 0
    assert check() == 0
    assert pool.stats().largest_free_bytes >= 6 * MB
    pool.configure({"cache_limit": None}, None)
    torch.empty(9 * MB, dtype=torch.uint8)
    limit = allocated(pool) + 16 * MB
    pool.set_limit(limit)
    pool.preallocate(12 * MB)
    assert reserved(pool) <= limit


def test_the_history_has_the_peak_and_stays_small(pool):
    pool.reset_peak()
    start, base = pool.history(), allocated(pool)
    assert [(p.allocated_bytes, p.reserved_bytes) for p in start] == [(base, reserved(pool))]
    for turn in range(15_000):
        kept = torch.empty(100_000 if turn == 7777 else 10)
        del kept
    history = pool.history()
    assert 1000 < len(history) <= 4096
    assert max(p.allocated_bytes for p in history) == base + 400_000
    assert pool.stats().peak_allocated_bytes == base + 400_000
    events = [p.event for p in history]
    assert events == sorted(set(events))
    assert events[-1] <= start[0].event + 30_000
    assert events[-1] >= start[0].event + 29_900
    early = sum(e < start[0].event + 15_000 for e in events)
    assert 0.8 < early / (len(events) - early) < 1.25  # evenly, not only the latest
    pool.reset_peak()
    assert len(pool.history()) == 1


def test_categories_survive_splitting_and_reuse(pool, backend):
    pool.configure({"strategy": "bfc", "min_cached": 0}, None)
    backend.measure.reset_peak()
    kept = torch.empty(100_000)
    for _ in range(10):
        torch.empty(300_000)
    assert backend.measure.peak_by_category()["parameter"] == 0
    assert backend.measure.tag("parameter", [kept]).size_bytes == 400_000  # after the peak
    assert backend.measure.peak_by_category()["parameter"] == 400_000
    for _ in range(10):
        torch.empty(400_000)
        found = backend.measure.peak_by_category()
        assert sum(found.values()) == pool.stats().peak_allocated_bytes
        assert found["parameter"] == 400_000
    del kept
    assert check() == 0
