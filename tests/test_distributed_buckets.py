from hypothesis import given
from hypothesis import strategies as st

from xmem.distributed.buckets import buckets, buckets_by_type
from xmem.distributed.squeezing import elements_at_once, parts_of
from xmem.distributing import Kind

SIZES = st.lists(st.integers(0, 50), max_size=40)
TYPES = {"float32": 4, "int64": 8, "bfloat16": 2}
KINDS = st.lists(
    st.builds(
        lambda dtype, count: Kind(dtype, (count,), TYPES[dtype] * count),
        st.sampled_from(list(TYPES)),
        st.integers(0, 12),
    ),
    max_size=30,
)


@given(SIZES, st.integers(1, 60))
def test_every_tensor_is_in_one_bucket_and_in_order(sizes, limit):
    found = buckets(sizes, limit)
    assert [number for bucket in found for number in bucket] == list(range(len(sizes)))


@given(SIZES, st.integers(1, 60))
def test_only_a_single_tensor_is_over_the_limit_and_no_two_neighbours_would_fit(sizes, limit):
    totals = []
    for bucket in buckets(sizes, limit):
        totals.append(sum(sizes[number] for number in bucket))
        assert len(bucket) == 1 or totals[-1] <= limit
    firsts = [sizes[bucket[0]] for bucket in buckets(sizes, limit)]
    for total, following in zip(totals, firsts[1:], strict=False):
        assert total + following > limit


def test_buckets_of_a_small_case():
    assert buckets([3, 3, 5, 9, 1, 1], 6) == [[0, 1], [2], [3], [4, 5]]
    assert buckets([], 6) == []


@given(KINDS, st.integers(1, 60))
def test_a_bucket_has_one_type_and_empty_tensors_are_in_none(kinds, limit):
    found = buckets_by_type(kinds, limit)
    for bucket in found:
        assert {kinds[number].dtype for number in bucket.numbers} == {bucket.dtype}
        assert sum(kinds[number].size_bytes for number in bucket.numbers) == bucket.size_bytes
    sent = sorted(number for bucket in found for number in bucket.numbers)
    assert sent == [number for number, kind in enumerate(kinds) if kind.size_bytes]


@given(st.integers(1, 10_000), st.integers(1, 9))
def test_parts_are_of_one_length_and_cover_everything(count, ranks):
    parts = parts_of(count, ranks)
    assert len(parts) == ranks
    assert {part.stop - part.start for part in parts} == {-(-count // ranks)}
    covered = set()
    for part in parts:
        assert part.start >= 0
        covered |= set(range(part.start, part.stop))
    assert covered == set(range(count))


def test_a_piece_and_what_it_needs_fit_a_bucket():
    for item_bytes in (2, 4, 8):
        count = elements_at_once(2**20, item_bytes)
        assert count * (item_bytes + 10) <= 2**20 < (count + 1) * (item_bytes + 10)
    assert elements_at_once(1, 4) == 1
