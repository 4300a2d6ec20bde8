"""What ranks of either framework do with collectives, and the facts that their tests judge."""

import gc

import numpy as np

import xmem
import xmem.distributed as xd
from xmem.api import active
from xmem.errors import CollectiveMismatchError

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
COMPRESS = (None, "bf16", "fp16", "int8")
BUCKET = 64 * 1024


class Checks:
    """The facts of one rank.

    Args:
        here: the world.
        tensor: turns a NumPy array into a tensor.
        array: turns a tensor into a NumPy array.
    """

    def __init__(self, here, tensor, array):
        self.here, self.tensor, self.array = here, tensor, array
        self.distributed = active().distributed

    def facts(self):
        """Return everything, as JSON holds it."""
        return {
            "wrong_types": self.types(),
            "errors": self.errors(),
            "equal": self.equal_on_all_ranks(),
            "list_bytes": self.memory_of_lists(),
            "large_bytes": self.memory_of_large(),
            "sent": self.sent_bytes(),
            "mismatch": self.mismatch(),
            "overlapped": self.overlapped(),
            "feedback": self.feedback(),
        }

    def drawn(self, count, rank=None, seed=0):
        """Return normally distributed numbers of a rank."""
        number = self.here.rank if rank is None else rank
        return np.random.default_rng([seed, number]).normal(size=count).astype("float32")

    def typed(self, values, dtype):
        """Return a tensor of any type, of small whole numbers."""
        if dtype == "bool":
            return self.tensor(values.astype(bool))
        return self.distributed.convert(self.tensor(values.astype("float32")), dtype)

    def plain(self, tensor):
        """Return a tensor's values, widened."""
        kind = self.distributed.describe(tensor)
        if kind.dtype in ("bfloat16", "float16"):
            tensor = self.distributed.convert(tensor, "float32")
        return kind.dtype, self.array(tensor).astype("float64")

    def types(self):
        """Return which calls gave another type, shape or value than NumPy."""
        size, rank = self.here.size, self.here.rank
        every = [np.arange(3 * size).reshape(size, 3) % 5 + r for r in range(size)]
        wrong = []

        def see(name, dtype, result, wanted):
            found, values = self.plain(result)
            if found != dtype or values.shape != wanted.shape or not np.array_equal(values, wanted):
                wrong.append([name, dtype, found, values.tolist(), wanted.tolist()])

        for dtype in (*FLOATS, *INTEGERS):
            x = self.typed(every[rank], dtype)
            for op, combine in {"sum": np.sum, "max": np.max, "mean": np.mean}.items():
                if op == "mean" and dtype in INTEGERS:
                    continue
                wanted = combine(every, axis=0)
                see(op, dtype, xd.all_reduce(x, op), wanted)
                see(f"list {op}", dtype, xd.all_reduce([x, x[:1], x], op)[1], wanted[:1])
                see(f"scatter {op}", dtype, xd.reduce_scatter(x, op), wanted[rank])
            own = self.typed(every[rank], dtype)
            xd.all_reduce(own, in_place=True)
            see("in place", dtype, own, np.sum(every, axis=0))
            see("input", dtype, x, every[rank])
        for dtype in (*FLOATS, *INTEGERS, "bool"):
            values = [v % 2 for v in every] if dtype == "bool" else every
            x = self.typed(values[rank], dtype)
            see("gather", dtype, xd.all_gather(x), np.stack(values))
            see("exchange", dtype, xd.all_to_all(x), np.stack([v[rank] for v in values]))
            see("broadcast", dtype, xd.broadcast(x, size - 1), values[-1])
            see("broadcasts", dtype, xd.broadcast([x, x])[1], values[0])
        return wrong

    def errors(self):
        """Return the relative errors of sums, by compression."""
        count = 100_003
        every = [self.drawn(count, rank).astype("float64") for rank in range(self.here.size)]
        found = {}
        for compress in COMPRESS:
            result = self.array(xd.all_reduce(self.tensor(every[self.here.rank].astype("float32")),
                                              compress=compress))  # fmt: skip
            found[str(compress)] = float(
                np.linalg.norm(result - sum(every)) / np.linalg.norm(sum(every))
            )
        return found

    def equal_on_all_ranks(self):
        """Say whether compressed sums are bit by bit the same everywhere."""
        same = True
        for compress in COMPRESS:
            result = xd.all_reduce(self.tensor(self.drawn(10_001)), compress=compress)
            rows = self.array(xd.all_gather(result))
            same = same and all(np.array_equal(row, rows[0]) for row in rows)
        return same

    def peak(self, call):
        """Return the most bytes that a call took beside what was there, and those it counted."""
        call()
        gc.collect()
        active().measure.synchronize()
        xd.traffic(reset=True)
        with xmem.measure() as measured:
            call()
        return measured.peak_above_static_bytes, xd.traffic().buffer_bytes

    def memory_of_lists(self):
        """Return bytes of reducing 300 tensors in place, by compression."""
        tensors = [self.tensor(self.drawn(900 + number % 7)) for number in range(300)]
        return {
            str(compress): self.peak(
                lambda how=compress: xd.all_reduce(
                    tensors, bucket=BUCKET, compress=how, in_place=True
                )
            )
            for compress in COMPRESS
        }

    def memory_of_large(self):
        """Return bytes of reducing a tensor of 1 MB in place, by compression."""
        found = {}
        for compress in COMPRESS:
            large = self.tensor(self.drawn(250_000))
            found[str(compress)] = self.peak(
                lambda how=compress, own=large: xd.all_reduce(
                    own, bucket=BUCKET, compress=how, in_place=True
                )
            )
        return found

    def sent_bytes(self):
        """Return what is counted as sent for a million elements, by compression."""
        found = {}
        tensor = self.tensor(self.drawn(1_000_000))
        for compress in COMPRESS:
            xd.traffic(reset=True)
            xd.all_reduce(tensor, compress=compress)
            counted = xd.traffic()
            assert counted.seconds > 0
            found[str(compress)] = sum(counted.sent_bytes.values())
        return found

    def mismatch(self):
        """Return what a rank is told when shapes differ, and a sum after it."""
        try:
            xd.all_reduce(self.tensor(self.drawn(3 + self.here.rank % 2)))
        except CollectiveMismatchError as error:
            told = str(error)
        ones = self.array(xd.all_reduce(self.tensor(np.ones(2, "float32"))))
        return [told, ones.tolist()]

    def overlapped(self):
        """Return whether asynchronous calls, waited for in order, give what others give."""
        tensors = [self.tensor(self.drawn(1000 + n, seed=n)) for n in range(3)]
        wanted = [self.array(xd.all_reduce(tensor)) for tensor in tensors]
        handles = [xd.all_reduce([tensor], bucket=512, async_=True) for tensor in tensors]
        packed = [xd.all_reduce(tensor, compress="bf16", async_=True) for tensor in tensors]
        gathered = xd.all_gather(tensors[0], async_=True)
        exact = [self.array(handle.wait()[0]) for handle in handles]
        close = [self.array(handle.wait()) for handle in packed]
        own = self.array(gathered.wait())[self.here.rank]
        return [
            all(np.array_equal(a, b) for a, b in zip(exact, wanted, strict=True)),
            all(np.allclose(a, b, atol=0.1) for a, b in zip(close, wanted, strict=True)),
            bool(np.array_equal(own, self.array(tensors[0]))),
        ]

    def feedback(self):
        """Return the error of one int8 sum, and of the mean of 20 with error feedback."""
        kept = xd.ErrorFeedback()
        values = self.drawn(5000)
        wanted = np.sum([self.drawn(5000, rank) for rank in range(self.here.size)], axis=0)
        results = []
        for _ in range(20):
            tensors = [self.tensor(values), self.tensor(values[:9])]
            result = xd.all_reduce(tensors, compress="int8", error_feedback=kept)[0]
            results.append(self.array(result).copy())

        def error(found):
            return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

        return [error(results[0]), error(np.mean(results, axis=0)), kept.size_bytes]


def judge(facts, ranks):
    """See that a rank's facts are as they must be."""
    assert facts["wrong_types"] == []
    assert facts["equal"]
    errors = facts["errors"]
    # 2^-9 / sqrt(3) for each rounding of bf16, 2^-12 / sqrt(3) for fp16, twice
    limits = {"None": 1e-6, "bf16": 0.0025, "fp16": 0.0004, "int8": 0.01}
    assert all(errors[name] <= limit for name, limit in limits.items()), errors
    for name, (peak, counted) in facts["list_bytes"].items():
        print(f"{ranks} ranks, list, {name}: {peak} bytes, {counted} counted, bucket {BUCKET}")
        assert peak <= BUCKET, (name, peak, counted)
        assert counted <= BUCKET
    for name, (peak, counted) in facts["large_bytes"].items():
        print(f"{ranks} ranks, large, {name}: {peak} bytes, {counted} counted, bucket {BUCKET}")
        assert peak <= BUCKET, (name, peak, counted)
    assert facts["large_bytes"]["None"][1] == 0  # sent from where it lies
    sent = facts["sent"]
    assert sent["None"] == 2 * (ranks - 1) * 4_000_000 // ranks
    assert sent["bf16"] == sent["fp16"] == sent["None"] / 2
    assert 0.25 < sent["int8"] / sent["None"] <= 0.27, sent
    told, ones = facts["mismatch"]
    assert "First difference: tensor 0 of rank" in told
    assert ones == [ranks, ranks]
    assert facts["overlapped"] == [True, True, True]
    one, mean, size_bytes = facts["feedback"]
    assert one <= 0.01
    assert mean <= one / 5, (one, mean)
    assert size_bytes >= 4 * 5009
