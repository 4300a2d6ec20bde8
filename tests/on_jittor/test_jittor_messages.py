"""Communication as operations of Jittor's graph, on real ranks: values, order, memory."""

import numpy as np
import pytest
import ranks

HEAD = """
sys.path[:0] = [os.path.join(sys.path[0], "on_jittor")]
import gc
import jittor as jt
import messages_program as program
from xmem_jittor import messages

rank, size = here.rank, here.size
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks report of a program that does everything that must work."""
    return ranks.run("jittor", HEAD + EVERYTHING, tmp_path_factory.mktemp("two"), ranks=2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return ranks.run("jittor", HEAD + ON_FOUR, tmp_path_factory.mktemp("four"), ranks=4)


EVERYTHING = """
wrong, checked = program.check_types(rank, size)

# Larger than the pieces in which tensors are combined and sent, and odd.
large = [program.values(r, "float32", (3_000_001,)) for r in range(2)]
x = jt.array(large[rank])
large_is_right = program.same(messages.all_reduce(x, "mean").numpy(), (large[0] + large[1]) / 2)
large_is_right &= program.same(messages.broadcast(x, 1, x.shape, "float32").numpy(), large[1])

# Halves: every pattern there is, except NaN, whose bits nobody promises.
patterns = np.arange(65536, dtype="uint16").view("float16")
patterns = patterns[~np.isnan(patterns)]
other = np.roll(patterns, 12345)
with np.errstate(over="ignore", invalid="ignore"):
    expected = (patterns.astype("float32") + other.astype("float32")).astype("float16")
found = messages.all_reduce(jt.array64([patterns, other][rank])).numpy()
numbers = ~np.isnan(expected)
halves_are_right = program.same(found[numbers], expected[numbers])
halves_are_right &= bool(np.isnan(found[~numbers]).all())
nan = jt.array(np.array([[np.nan, 1.0], [0.0, np.nan]][rank], "float32"))
nan = messages.all_reduce(nan, "max")
nan_stays = bool(np.isnan(nan.numpy()).all())

# One order, though one rank looks at results in between, and the other never does.
a, b = jt.ones((1000,)), jt.ones((1000,)) * 100
a.sync(), b.sync()
seen = []
for step in range(3):
    t = b + step
    A = messages.all_reduce((a / jt.sqrt(jt.mean(t.reshape(-1, 10), 1).mean() * 0 + 2)).stop_fuse())
    B = messages.all_reduce(t)
    if rank == 0:
        seen.append((A[0] * 2).item())
        sibling = a / jt.sqrt(jt.mean(B.reshape(-1, 10), 1).mean() * 0 + 2)
        seen.append(sibling.sum().item())
    b = B / 2
last = b[:1].numpy().tolist()
del A, B, a, b, t

# A result that nobody takes is communicated all the same.
messages.all_reduce(jt.ones((5,)) * 3)
messages.token().sync()

# What there is in memory, to the byte.
measure = xmem.api.active().measure
MiB = 1 << 20


def bytes_of(action):
    gc.collect()
    jt.sync_all(True)
    before = measure.counters().allocated_bytes
    measure.reset_peak()
    result = action()
    messages.token().sync()
    jt.sync_all(True)
    gc.collect()
    after = measure.counters()
    return [after.peak_allocated_bytes - before, after.allocated_bytes - before]


base = jt.ones((MiB // 4,))
base.sync()
source = jt.ones((MiB // 4,))
source.sync()
memory = {}
memory["lazy all_reduce"] = bytes_of(lambda: keep(messages.all_reduce((base + 1).stop_fuse())))
kept.clear()
""".replace(
    "def bytes_of", "kept = []\ndef keep(x):\n    kept.append(x)\n    return x\n\n\ndef bytes_of"
)
EVERYTHING += """
memory["all_reduce of what is held"] = bytes_of(lambda: keep(messages.all_reduce(base)))
kept.clear()
memory["broadcast"] = bytes_of(
    lambda: keep(messages.broadcast(source if rank == 0 else None, 0, source.shape, "float32"))
)
kept.clear()
memory["reduce"] = bytes_of(lambda: keep(messages.reduce((base + 1).stop_fuse(), 0)))
kept.clear()
memory["gate"] = bytes_of(lambda: keep(messages.gate(base, source)))
kept.clear()


def sent():
    if rank == 0:
        sending = messages.send((base + 1).stop_fuse(), 1)
        messages.wait(sending)
    else:
        keep(messages.receive(base.shape, "float32", 0))


memory["send, receive"] = bytes_of(sent)
kept.clear()
untouched = bool((base.numpy() == 1).all() and (source.numpy() == 1).all())

# All at once too.
with jt.flag_scope(lazy_execution=0):
    eager = messages.all_reduce(jt.ones((3,)) + rank).numpy().tolist()

# Gradients stop at it, and what is handed through keeps its memory.
v = jt.ones((3,)).start_grad()
stops = not messages.all_reduce(v).requires_grad and v.requires_grad
shares = messages.gate(base, source).raw_ptr == base.raw_ptr
report(
    wrong=wrong, checked=checked, large=large_is_right, halves=halves_are_right, nan=nan_stays,
    seen=seen, last=last, memory=memory, untouched=untouched, eager=eager, stops=stops,
    shares=shares,
)
xd.destroy()
"""

ON_FOUR = """
some = ("bool", "int64", "uint8", "float16", "bfloat16", "float32")
wrong, checked = program.check_types(rank, size, some)
large = [program.values(r, "float32", (1_500_007,)) for r in range(4)]
x = jt.array(large[rank])
expected = ((large[0] + large[1]) + large[2]) + large[3]
total = messages.reduce(x, 2).numpy()
parts = messages.broadcast(x if rank == 3 else None, 3, x.shape, "float32").numpy()
halves = messages.all_reduce(jt.array(np.array([2048 if rank == 0 else 1], "float16"))).numpy()
report(
    wrong=wrong, checked=checked, halves=halves.tolist(),
    reduced=program.same(total, expected) if rank == 2 else total.shape[0],
    spread=program.same(parts, large[3]),
    summed=program.same(messages.all_reduce(x).numpy(), expected),
)
xd.destroy()
"""


def test_every_type_shape_and_kind_of_message_gives_what_numpy_gives(two):
    for rank, report in enumerate(two):
        assert report["wrong"] == []
        assert report["checked"] == 380 + 52 * (rank == 1)  # the last rank owns what is reduced


def test_tensors_larger_than_a_piece_are_the_same_to_the_last_bit(two):
    assert all(report["large"] for report in two)


def test_halves_are_added_in_float32_and_rounded_once(two, four):
    assert all(report["halves"] for report in two)
    assert [report["halves"] for report in four] == [[2052.0]] * 4  # not 2048, step by step


def test_nan_survives_a_maximum(two):
    assert all(report["nan"] for report in two)


def test_the_order_is_kept_when_one_rank_looks_at_results_in_between(two):
    assert np.allclose(
        two[0]["seen"], [8**0.5, 1000 * 0.5**0.5] * 3, rtol=1e-4
    )  # fast square roots
    assert two[1]["seen"] == []
    assert two[0]["last"] == two[1]["last"] == [103.0]


def test_memory_is_what_is_said(two):
    one = 1 << 20
    for rank, report in enumerate(two):
        memory = report["memory"]
        print(rank, memory)
        small = 4096  # tokens, and what has one element
        expected = {
            # Where nothing else reads the tensor, its memory is taken over.
            "lazy all_reduce": (one, one),
            "all_reduce of what is held": (one, one),
            "broadcast": (0, 0) if rank == 0 else (one, one),
            "reduce": (one, one) if rank == 0 else (one, 0),
            "gate": (0, 0),
            "send, receive": (one, 0) if rank == 0 else (one, one),
        }
        for what, (peak, kept) in expected.items():
            assert peak <= memory[what][0] <= peak + small, what
            assert kept <= memory[what][1] <= kept + small, what
        assert report["untouched"]


def test_nothing_changes_without_lazy_execution(two):
    assert [report["eager"] for report in two] == [[3.0, 3.0, 3.0]] * 2


def test_no_gradient_flows_and_a_gate_copies_nothing(two):
    assert all(report["stops"] and report["shares"] for report in two)


def test_four_ranks_agree_with_numpy_too(four):
    for rank, report in enumerate(four):
        assert report["wrong"] == []
        assert report["checked"] == 180 + 24 * (rank == 3)
        assert report["reduced"] == (True if rank == 2 else 1)
        assert report["spread"]
        assert report["summed"]
