import numpy as np
import pytest
from fakes.threads import Threads, put_in_place, tensor

from xmem.distributed import (
    ErrorFeedback,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from xmem.distributed.counting import traffic
from xmem.errors import CollectiveMismatchError, DistributedError, UsageError


@pytest.fixture(params=[1, 2, 3])
def threads(request, monkeypatch):
    ranks = Threads(request.param)
    put_in_place(monkeypatch, ranks)
    return ranks


@pytest.fixture
def two(monkeypatch):
    ranks = Threads(2)
    put_in_place(monkeypatch, ranks)
    return ranks


def drawn(rank, count, dtype="float32"):
    return tensor(np.random.default_rng(rank).normal(size=count), dtype)


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_lists_of_mixed_types_come_back_combined_in_order_and_type(threads, op):
    def given(rank):
        return [
            tensor([1 + rank, 2]),
            tensor([[1.5], [rank]], "float64"),
            tensor([], "float32"),
            tensor([4 * rank], "float16"),
            tensor(rank),
        ]

    every = [given(rank) for rank in range(threads.size)]
    combine = {"sum": np.sum, "mean": np.mean, "max": np.max}[op]
    for results in threads.run(lambda rank: all_reduce(given(rank), op, bucket=8)):
        for number, result in enumerate(results):
            wanted = combine([own[number] for own in every], axis=0)
            assert result.dtype == every[0][number].dtype
            assert result.shape == every[0][number].shape
            np.testing.assert_allclose(result, wanted)


def test_integers_are_added_up_as_they_are(threads):
    for dtype in ("int64", "int32", "int16", "int8", "uint8"):
        results = threads.run(lambda rank, dtype: all_reduce(tensor([3, rank], dtype)), dtype)
        for result in results:
            assert result.dtype == dtype
            assert result.tolist() == [3 * threads.size, sum(range(threads.size))]


@pytest.mark.parametrize("compress", [None, "fp16", "int8"])
def test_in_place_writes_into_the_tensors_and_otherwise_they_stay(threads, compress):
    def program(rank, in_place):
        values = [drawn(rank, 5), drawn(rank + 9, 300)]
        before = [value.copy() for value in values]
        results = all_reduce(values, in_place=in_place, compress=compress)
        same = all(np.array_equal(a, b) for a, b in zip(values, results, strict=True))
        kept = all(np.array_equal(a, b) for a, b in zip(values, before, strict=True))
        return same, kept, [r is v for r, v in zip(results, values, strict=True)]

    alone = threads.size == 1
    for same, kept, identical in threads.run(program, True):
        assert (same, kept, identical) == (True, alone, [True, True])
    for same, kept, identical in threads.run(program, False):
        assert (same, kept, identical) == (alone, True, [False, False])


@pytest.mark.parametrize("compress", [None, "fp16", "int8"])
@pytest.mark.parametrize("count", [1, 2, 257, 1000])
def test_compressed_sums_are_equal_on_all_ranks_and_close(threads, compress, count):
    wanted = sum(np.asarray(drawn(rank, count), "float64") for rank in range(threads.size))
    results = threads.run(lambda rank: all_reduce(drawn(rank, count), compress=compress))
    for result in results:
        assert np.array_equal(result, results[0])
        error = np.linalg.norm(result - wanted) / np.linalg.norm(wanted)
        assert error <= {None: 1e-6, "fp16": 1e-3, "int8": 1e-2}[compress], error


def test_a_large_tensor_goes_in_pieces_that_fit_the_bucket(two):
    results = two.run(lambda rank: all_reduce(drawn(rank, 5000), compress="fp16", bucket="10KiB"))
    wanted = drawn(0, 5000) + drawn(1, 5000)
    np.testing.assert_allclose(results[0], wanted, rtol=1e-2, atol=1e-2)
    assert len(two.sent) > 2
    assert max(size for _, size in two.sent) <= 10 * 1024


def test_halves_are_added_in_float32_and_rounded_once(monkeypatch):
    ranks = Threads(4)
    put_in_place(monkeypatch, ranks)
    values = [2048.0, 1.0, 1.0, 1.0]  # in float16, 2048 + 1 is 2048
    for result in ranks.run(lambda rank: all_reduce(tensor([values[rank]], "float16"))):
        assert result.tolist() == [2052.0]  # 2051, to nearest
    scattered = ranks.run(lambda rank: reduce_scatter(tensor([[values[rank]]] * 4, "float16")))
    assert [part.tolist() for part in scattered] == [[2052.0]] * 4


def test_a_mean_of_large_halves_does_not_overflow(two):
    for result in two.run(lambda rank: all_reduce(tensor([60000.0], "float16"), "mean")):
        assert result.tolist() == [60000.0]


def test_gather_scatter_exchange_and_broadcast(threads):
    size = threads.size

    def program(rank):
        parts = tensor([[10 * rank + other, 0] for other in range(size)])
        return (
            all_gather(tensor([rank, 7])).tolist(),
            reduce_scatter(parts).tolist(),
            all_to_all(parts).tolist(),
            broadcast([tensor([rank]), tensor([rank], "int64")], size - 1),
        )

    for rank, (gathered, scattered, exchanged, sent) in enumerate(threads.run(program)):
        assert gathered == [[other, 7] for other in range(size)]
        assert scattered == [sum(10 * other + rank for other in range(size)), 0]
        assert exchanged == [[10 * other + rank, 0] for other in range(size)]
        assert [(int(value[0]), str(value.dtype)) for value in sent] == [
            (size - 1, "float32"),
            (size - 1, "int64"),
        ]


def test_one_bucket_is_gone_before_the_next_is_made(two):
    def program(rank):
        values = [drawn(number, 10) for number in range(40)]
        all_reduce(values, bucket=100, in_place=True)

    assert two.run(program) == [None, None]
    assert len(two.sent) == 20
    assert two.most_buffers == 1


def test_asynchronous_calls_begin_at_once_and_end_once(two):
    def program(rank):
        values = [drawn(number, 10) for number in range(4)]
        handle = all_reduce(values, bucket=40, async_=True)
        begun = len(two.sent)
        first, second = handle.wait(), handle.wait()
        return (
            begun,
            first is second,
            [float(a[0] / b[0]) for a, b in zip(first, values, strict=True)],
        )

    assert two.run(program)[0] == (4, True, [2.0] * 4)


def test_asynchronous_calls_in_few_bits_may_not_be_waited_for_in_another_order(two):
    def program(rank):
        handles = [all_reduce(drawn(0, 10 + n), compress="int8", async_=True) for n in range(2)]
        return handles[rank].wait()

    for error in two.run(program):
        assert isinstance(error, CollectiveMismatchError)
        assert "wait for all_reduce of 1 tensor (40 B)" in str(error)
        assert "wait for all_reduce of 1 tensor (44 B)" in str(error)


def test_infinity_and_nan_arrive_in_few_bits(two):
    def program(rank, compress):
        values = drawn(rank, 600)
        values[[0, 599]] = [np.inf, np.nan] if rank else [np.inf, 1]
        return all_reduce(values, compress=compress)

    for compress in ("fp16", "int8"):
        for result in two.run(program, compress):
            assert np.isposinf(result[0])
            assert np.isnan(result[599])
            assert np.isfinite(result[1:599]).all()


def test_sent_bytes_of_int8_are_at_most_0_27_of_float32(two):
    sent = {}
    for compress in (None, "int8"):
        traffic(reset=True)
        two.run(lambda rank, how: all_reduce(drawn(rank, 10_000), compress=how), compress)
        sent[compress] = traffic(reset=True).total_sent_bytes
    assert sent[None] == 2 * 40_000  # both threads count
    assert 0.25 < sent["int8"] / sent[None] <= 0.27, sent


MISMATCHES = {
    "shape": (
        lambda rank: all_reduce([tensor([1.0]), tensor([1.0] * (2 + rank))]),
        "First difference: tensor 1 of rank 0 and rank 1, float32 (2,) and float32 (3,).",
    ),
    "type": (
        lambda rank: all_reduce(tensor([1.0], ["float32", "float64"][rank])),
        "First difference: tensor 0 of rank 0 and rank 1, float32 (1,) and float64 (1,).",
    ),
    "number": (
        lambda rank: all_reduce([tensor([1.0])] * (6 + rank)),
        "First difference: the number of tensors of rank 0 and rank 1, 6 and 7.",
    ),
    "op": (
        lambda rank: all_reduce(tensor([1.0]), ["sum", "max"][rank]),
        "rank 0: all_reduce(float32 (1,), op=sum); rank 1: all_reduce(float32 (1,), op=max).",
    ),
    "compress": (
        lambda rank: all_reduce(tensor([1.0]), compress=[None, "int8"][rank]),
        "First difference: compress of rank 0 and rank 1, None and int8.",
    ),
    "bucket": (
        lambda rank: all_reduce(tensor([1.0]), bucket=[8, 9][rank]),
        "First difference: bucket of rank 0 and rank 1, 8 and 9.",
    ),
    "in_place": (
        lambda rank: all_reduce(tensor([1.0]), in_place=bool(rank)),
        "First difference: in_place of rank 0 and rank 1, False and True.",
    ),
    "source": (
        lambda rank: broadcast(tensor([1.0]), rank),
        "First difference: source of rank 0 and rank 1, 0 and 1.",
    ),
    "call": (
        lambda rank: [all_gather, all_to_all][rank](tensor([1.0, 2.0])),
        "rank 0: all_gather(float32 (2,)); rank 1: all_to_all(float32 (2,)).",
    ),
    "a list": (
        lambda rank: all_reduce([[], [tensor([1.0])]][rank]),
        "First difference: the number of tensors of rank 0 and rank 1, 0 and 1.",
    ),
}


@pytest.mark.parametrize("name", list(MISMATCHES))
def test_a_mismatch_is_told_on_every_rank_before_anything_is_sent(two, name):
    program, told = MISMATCHES[name]
    errors = two.run(program)
    assert two.sent == []
    for error in errors:
        assert isinstance(error, CollectiveMismatchError), error
        assert told in str(error)
        assert error.ranks == (1,)
        assert len(str(error)) < 500
    assert [float(x[0]) for x in two.run(lambda rank: all_reduce(tensor([1.0])))] == [2.0, 2.0]


def test_ranks_that_called_the_same_are_told_together(monkeypatch):
    ranks = Threads(4)
    put_in_place(monkeypatch, ranks)
    errors = ranks.run(lambda rank: all_reduce(tensor([1.0] * (1 + rank % 2))))
    assert "ranks 0, 2: all_reduce(float32 (1,)); ranks 1, 3: all_reduce(float32 (2,))." in str(
        errors[3]
    )
    assert errors[0].ranks == (1, 3)


def test_another_kind_of_call_is_named(two):
    def program(rank):
        return two.exchange(b"barrier") if rank else all_reduce(tensor([1.0]))

    error, _ = two.run(program)
    assert isinstance(error, CollectiveMismatchError)
    assert "rank 0: all_reduce; rank 1: barrier." in str(error)


def test_a_difference_far_down_a_long_list_is_a_mismatch_too(two):
    def program(rank):
        shapes = np.random.default_rng(3).integers(1, 10**6, (8_000, 3))
        values = [np.broadcast_to(np.float32(0), tuple(s)).view(type(tensor(0))) for s in shapes]
        return all_reduce(values[: 8_000 - rank])

    for error in two.run(program):
        assert isinstance(error, CollectiveMismatchError), error


def test_what_is_wrong_on_one_rank_ends_the_call_on_all(two):
    errors = two.run(lambda rank: all_reduce([tensor([1.0]), "text"] if rank else tensor([1.0])))
    assert isinstance(errors[1], UsageError)
    assert str(errors[1]) == "all_reduce: tensor 1 of 2: str is not a tensor"
    assert isinstance(errors[0], DistributedError)
    assert "failed on rank 1: UsageError: all_reduce: tensor 1 of 2" in str(errors[0])
    assert errors[0].ranks == (1,)
    assert two.sent == []


X = tensor([1.0])
REFUSED = [
    (lambda: all_reduce(tensor([1.0]), "product"), "op is 'product'"),
    (lambda: all_reduce(tensor([1.0]), ["sum"]), "op is ['sum']"),
    (lambda: all_reduce(tensor([1], "int32"), "mean"), 'op="mean" of int32'),
    (lambda: reduce_scatter(tensor([1, 2], "int32"), "mean"), 'op="mean" of int32'),
    (lambda: all_reduce(tensor([True], "bool")), "bool cannot be reduced"),
    (lambda: all_reduce(tensor([1], "complex64")), "complex64 cannot be reduced"),
    (lambda: all_reduce(tensor([1.0]), bucket=0), "bucket is 0"),
    (lambda: all_reduce(tensor([1.0]), bucket="much"), "'much' is not a size"),
    (lambda: all_reduce(tensor([1.0]), compress="int4"), "compress is 'int4'"),
    (lambda: all_reduce(tensor([1.0]), "max", compress="int8"), "for sums and means"),
    (lambda: all_reduce(tensor([1.0]), error_feedback=ErrorFeedback()), "say compress="),
    (lambda: all_reduce(tensor([1.0]), compress="int8", error_feedback=True), "made once"),
    (lambda: all_reduce([X, tensor([2.0]), X], in_place=True), "tensors 0 and 2 are the same"),
    (lambda: broadcast([X, X], in_place=True), "tensors 0 and 1 are the same"),
    (lambda: all_reduce(None), "NoneType is not a tensor"),
    (lambda: broadcast(tensor([1.0]), 2), "ranks are 0 to 1"),
    (lambda: broadcast(tensor([1.0]), True), "source is True"),
    (lambda: all_gather([tensor([1.0])]), "takes one tensor, not a list"),
    (lambda: reduce_scatter(tensor([1.0, 2.0, 3.0])), "one part for each of the 2 ranks"),
    (lambda: all_to_all(tensor(1.0)), "one part for each of the 2 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "why"), REFUSED)
def test_what_cannot_be_is_refused_on_every_rank_and_nothing_is_sent(two, call, why):
    for error in two.run(lambda rank: call()):
        assert isinstance(error, UsageError), error
        assert why in str(error)
    assert two.sent == []
