"""What the pool tells and takes: counters, segments, refusals, history, settings."""

import gc
import random

import pytest
from chain import MIB, chain, normal, trained

from xmem.errors import CapabilityError, MeasurementError, UsageError
from xmem.pooling import Pool

DEFAULTS = {
    "large_block_size": 5 * MIB,
    "free_ratio": 1.0,
    "min_free_size": 0,
    "huge_pages": False,
    "save_mem": False,
}


@pytest.fixture
def pool(backend):
    import jittor as jt

    gc.collect()
    jt.sync_all(True)
    backend.pool.trim()
    backend.pool.reset_peak()
    yield backend.pool
    backend.pool.configure(DEFAULTS, "raise")


def ones(size_bytes):
    import jittor as jt

    return jt.ones((size_bytes // 4,)).sync()


def check_sums(pool):
    """Segments, counters and live tensors are three ways to the same bytes."""
    from xmem_jittor import native

    stats, segments = pool.stats(), pool.segments()
    blocks = [block for segment in segments for block in segment.blocks]
    assert sum(s.size_bytes for s in segments) == stats.reserved_bytes
    assert len(segments) == stats.segment_count
    assert sum(b.requested_bytes for b in blocks) == stats.allocated_bytes
    assert sum(b.category is not None for b in blocks) == (
        stats.allocation_count - stats.free_count
    )
    assert stats.allocated_bytes == native.allocator().xmem_jittor_reachable_bytes()
    for segment in segments:
        address = segment.address
        for block in segment.blocks:
            assert block.address == address, "blocks fill a segment without a gap"
            assert block.requested_bytes <= block.size_bytes
            address += block.size_bytes
        assert address == segment.address + segment.size_bytes
    return blocks


def test_it_is_a_pool(pool):
    assert isinstance(pool, Pool)


def test_counters_segments_and_live_tensors_agree_under_random_programs(pool):
    rng = random.Random(3)
    held = []
    for step in range(150):
        choice = rng.random()
        if choice < 0.5 or not held:
            held.append(ones(4 * rng.choice([1, 100, 5000, 200_000, 400_000, 2_000_000])))
        elif choice < 0.6:
            held.append(rng.choice(held).reshape((-1, 1)).sync())  # a view
        elif choice < 0.95:
            held.pop(rng.randrange(len(held)))
        else:
            pool.trim()
        if step % 10 == 0:
            check_sums(pool)
    blocks = check_sums(pool)
    free = [b.size_bytes for b in blocks if b.category is None]
    assert pool.stats().largest_free_bytes == max(free, default=0)
    held.clear()
    assert pool.stats().allocated_bytes == sum(b.requested_bytes for b in check_sums(pool))


def test_a_block_tells_its_category_and_the_node_that_it_was_made_for(backend, pool):
    first = ones(4000)
    second = ones(8000)
    backend.measure.tag("parameter", [second])
    blocks = {b.requested_bytes: b for s in pool.segments() for b in s.blocks}
    assert (blocks[4000].category, blocks[4000].birth) == ("temporary", first.id)
    assert (blocks[8000].category, blocks[8000].birth) == ("parameter", second.id)
    assert blocks[0].birth == 0


def run_of_steps():
    """Eight blocks, batches of seven sizes; returns what stays alive, and calls for segments."""
    import jittor as jt

    before = segment_calls()
    net = chain(8, 256)
    optimizer = jt.optim.SGD(trained(net), 1e-3)
    batches = [normal(n, 256) for n in (1000, 1500, 2000, 700, 2500, 300, 3000)]
    jt.sync_all(True)
    for x in batches:
        optimizer.step((net(x) ** 2).mean())
        jt.sync_all(True)
    return (net, optimizer, batches), segment_calls() - before


def segment_calls():
    from xmem_jittor import ran_out

    return ran_out.counters()[5]


def partly_used(pool):
    return sum(s.size_bytes for s in pool.segments() if any(b.requested_bytes for b in s.blocks))


@pytest.fixture(scope="module")
def plain_run(backend):
    """The run with Jittor's own settings: calls for segments, statistics before and after trim."""
    gc.collect()
    backend.pool.trim()
    start = backend.pool.stats().reserved_bytes
    alive, calls = run_of_steps()
    before, partly = backend.pool.stats(), partly_used(backend.pool)
    freed = backend.pool.trim()
    after = backend.pool.stats()
    assert backend.pool.trim() == 0
    assert alive
    return {
        "calls": calls,
        "before": before,
        "after": after,
        "partly": partly,
        "freed": freed,
        "start": start,
    }


def test_trim_leaves_only_segments_that_are_partly_in_use(plain_run):
    before, after = plain_run["before"], plain_run["after"]
    assert plain_run["freed"] == before.reserved_bytes - after.reserved_bytes
    assert after.reserved_bytes == plain_run["partly"]
    assert before.reserved_bytes - plain_run["start"] >= 100 * MIB
    assert after.reserved_bytes - plain_run["start"] <= 25 * MIB, after
    assert after.allocated_bytes == before.allocated_bytes


@pytest.mark.parametrize("how", ["preallocate", "large_block_size"])
def test_large_pieces_cut_the_calls_for_segments_by_a_third(plain_run, pool, how):
    start = segment_calls()
    if how == "preallocate":
        assert pool.preallocate(128 * MIB) == 128 * MIB
        assert pool.preallocate(128 * MIB) == 0, "it has that piece"
        assert pool.stats().largest_free_bytes == 128 * MIB
    else:
        pool.configure({"large_block_size": 32 * MIB}, None)
    alive, _ = run_of_steps()
    fewer = segment_calls() - start
    assert fewer <= plain_run["calls"] * 2 / 3, (plain_run["calls"], fewer)
    check_sums(pool)
    assert alive


@pytest.mark.parametrize("size", [1 << 60, 1 << 64])
def test_preallocated_memory_that_the_system_lacks_is_an_error_with_the_size(pool, size):
    with pytest.raises(RuntimeError, match=str(size)) as caught:
        pool.preallocate(size)
    assert pool.is_out_of_memory(caught.value)
    check_sums(pool)


def test_a_limit_beyond_all_numbers_refuses_nothing(pool):
    pool.set_limit(1 << 70)
    ones(MIB)
    assert pool.stats().limit_bytes >= 1 << 60


def test_free_ratio_bounds_what_stays_unused(pool):
    def unused():
        for count in (3, 5, 7, 9):
            ones(count * 4 * MIB)
        stats = pool.stats()
        return stats.reserved_bytes - stats.allocated_bytes

    plain = unused()
    pool.trim()
    pool.configure({"free_ratio": 0.25}, None)
    assert unused() <= plain / 2
    pool.trim()
    pool.configure({"free_ratio": 0.25, "min_free_size": 1 << 30}, None)
    assert unused() >= plain * 0.9


def test_a_refusal_is_told_as_it_was_at_that_instant(backend, pool):
    import jittor as jt

    large, small = ones(3 * MIB), ones(MIB)
    backend.measure.tag("parameter", [large])
    limit = pool.stats().allocated_bytes + MIB
    pool.set_limit(limit)
    asked = jt.empty((MIB // 2,))
    node = asked.id
    with pytest.raises(RuntimeError) as caught:
        asked.sync()
    pool.set_limit(None)
    held = pool.stats()
    ones(4096)  # what comes later is not in it
    refusal = pool.refusal()
    assert pool.is_out_of_memory(caught.value)
    assert (refusal.requested_bytes, refusal.limit_bytes) == (2 * MIB, limit)
    assert refusal.birth == node
    assert (refusal.allocated_bytes, refusal.reserved_bytes) == (
        held.allocated_bytes,
        held.reserved_bytes,
    )
    assert refusal.largest_free_bytes == held.largest_free_bytes
    assert [b.requested_bytes for b in refusal.blocks[:2]] == [3 * MIB, MIB]
    assert [b.birth for b in refusal.blocks[:2]] == [large.id, small.id]
    assert refusal.blocks[0].category == "parameter"
    assert refusal.by_category["parameter"] == 3 * MIB
    assert sum(refusal.by_category.values()) == refusal.allocated_bytes
    assert refusal.in_backward is None
    assert pool.tensor_bytes(asked.sync()) == 2 * MIB, "the same one, once there is memory"


def test_a_refusal_by_the_system_has_no_limit_and_lists_256_blocks(pool):
    import jittor as jt

    held = [ones(4 * (1000 + i)) for i in range(300)]
    with pytest.raises(RuntimeError):
        jt.empty((1 << 44,)).sync()
    refusal = pool.refusal()
    assert (refusal.requested_bytes, refusal.limit_bytes) == (1 << 46, None)
    sizes = [b.requested_bytes for b in refusal.blocks]
    assert len(sizes) == 256
    assert sizes == sorted(sizes, reverse=True)
    assert pool.stats().out_of_memory_count >= 1
    assert len(held) == 300


def test_a_refusal_knows_whether_backward_has_begun(backend, pool):
    import jittor as jt

    w = normal(64, 64).start_grad()
    jt.sync_all(True)
    with backend.measure.watch(None, None, lambda name: None):
        g = jt.grad((w * w).sum(), w)
        later = (g * 2).stop_fuse()
        pool.set_limit(pool.stats().allocated_bytes)
        with pytest.raises(RuntimeError):
            later.sync()
        assert pool.refusal().in_backward is True
        pool.set_limit(None)
    later.sync()


def test_another_runtime_error_is_not_out_of_memory(pool):
    import jittor as jt

    pool.set_limit(pool.stats().allocated_bytes)
    with pytest.raises(RuntimeError) as first:
        ones(MIB)
    pool.set_limit(None)
    with pytest.raises(RuntimeError) as other:
        jt.ones((2, 3)).reshape((5,))
    assert pool.is_out_of_memory(first.value)
    assert not pool.is_out_of_memory(other.value)
    assert pool.is_out_of_memory(first.value), "asked twice"
    assert pool.is_out_of_memory(MemoryError())
    assert not pool.is_out_of_memory(ValueError("out of memory"))
    assert issubclass(pool.out_of_memory_type(), RuntimeError)
    assert pool.is_out_of_memory(pool.out_of_memory_type()("this one"))


def test_history_is_bounded_and_keeps_the_peak(pool):
    keep = [ones(4096) for _ in range(5)]
    pool.reset_peak()
    start = pool.stats()
    spikes = {701: 5, 1402: 6, 2503: 7, 3308: 4, 4001: 8, 5555: 3}  # at any place of their parts
    for i in range(6000):
        ones(4 * (i % 50 + 1))
        if i in spikes:
            ones(spikes[i] * MIB)
    points = pool.history()
    events = [point.event for point in points]
    assert 1000 < len(points) <= 4100
    assert events == sorted(set(events))
    assert events[0] == start.allocation_count + start.free_count
    now = pool.stats()
    assert events[-1] == now.allocation_count + now.free_count > 12000
    assert points[-1].allocated_bytes == now.allocated_bytes
    assert max(p.allocated_bytes for p in points) == now.peak_allocated_bytes
    heights = {p.allocated_bytes // MIB for p in points}
    assert heights >= set(spikes.values()), "every height that nothing near it passed"
    pool.reset_peak()
    assert len(pool.history()) == 1
    assert len(keep) == 5


def test_settings_say_what_they_are_and_refuse_what_they_are_not(pool):
    for setting in pool.settings.values():
        assert setting.meaning
    assert set(pool.in_force()) == {*pool.settings, "on_oom"}
    for name, value in (
        ("large_block_size", "1MiB"),
        ("large_block_size", "2TiB"),
        ("free_ratio", 1.5),
        ("free_ratio", "half"),
        ("min_free_size", -1),
        ("huge_pages", 1),
    ):
        with pytest.raises(UsageError):
            pool.settings[name].parse(value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("use_sfrl_allocator", 0), ("use_nfef_allocator", 1), ("use_stat_allocator", 2)],
)
def test_broken_allocators_are_refused_with_the_reason(backend, pool, flag, value):
    import jittor as jt

    with pytest.raises(UsageError, match="silently wrong"):
        pool.settings[flag].parse(value)
    before = getattr(jt.flags, flag)
    assert pool.settings[flag].parse(before) == before
    setattr(jt.flags, flag, value)
    try:
        with pytest.raises(MeasurementError, match=flag):
            pool.stats()
        with pytest.raises(MeasurementError, match=flag):
            pool.configure({"free_ratio": 0.5}, None)
    finally:
        setattr(jt.flags, flag, before)
    assert pool.in_force()["free_ratio"] == 1, "refused before anything changes"


def test_what_comes_too_late_or_is_not_to_be_had_changes_nothing(pool):
    before = pool.in_force()
    with pytest.raises(UsageError, match="JT_SAVE_MEM=1"):
        pool.configure({"free_ratio": 0.5, "save_mem": True}, "trim_and_retry")
    with pytest.raises(CapabilityError, match="no such memory"):
        pool.configure({"free_ratio": 0.5}, "spill")
    assert pool.in_force() == before
    pool.configure({"save_mem": False}, None)


def test_huge_pages_are_asked_for_or_refused(pool, monkeypatch):
    from xmem_jittor import pool_settings

    monkeypatch.setattr(pool_settings, "_has_huge_pages", lambda: False)
    with pytest.raises(CapabilityError, match="never"):
        pool.configure({"huge_pages": True}, None)
    monkeypatch.setattr(pool_settings, "_has_huge_pages", lambda: True)
    pool.configure({"huge_pages": True}, None)
    block = ones(8 * MIB)
    [segment] = [s for s in pool.segments() if s.size_bytes == 8 * MIB]
    assert segment.address % (2 * MIB) == 0
    assert block.sum().item() == 2 * MIB
    del block
    assert pool.trim() >= 8 * MIB


def test_blocks_of_empty_tensors_fill_no_room(pool):
    held = [ones(0) for _ in range(40)]
    for _ in range(40):
        held += [ones(4), ones(0)]
    check_sums(pool)
    del held[::2]
    check_sums(pool)


def test_a_limit_beyond_64_bits_is_no_limit_of_0(pool, backend):
    for control in (pool, backend.measure):
        for limit in (1 << 62, 1 << 63, 1 << 70):
            control.set_limit(limit)
            assert pool.stats().limit_bytes == 1 << 62
            ones(4)
    pool.set_limit(None)


@pytest.mark.parametrize("reads", [True, False])
def test_counters_are_level_over_steps_with_checkpointing(pool, reads):
    import jittor as jt

    import xmem

    net = chain(depth=6, width=32)
    optimizer = jt.optim.Adam(net.parameters(), 1e-3)
    xmem.apply_checkpointing(net, "every")
    found = []
    for _ in range(8):
        loss = (net(normal(16, 32)) ** 2).mean()
        optimizer.step(loss)
        if reads:
            loss.item()
        stats = pool.stats()
        found.append((stats.allocated_bytes, stats.allocation_count - stats.free_count))
    assert len(set(found[2:])) == 1
    del loss
    jt.sync_all(True)
    check_sums(pool)
