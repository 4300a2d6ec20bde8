"""The group and its tensors on Jittor: two ranks, a world of one, and what mpirun needs."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks
from xmem_jittor import mpi

import xmem

USE, WRAPPER, YIELD = "use_mpi", "mpicc_path", "OMPI_MCA_mpi_yield_when_idle"
PROGRAM = """
import gc
import jittor as jt
from jittor import nn
from xmem_jittor import communication, messages, ranks

rank, size = here.rank, here.size
group = xmem.api.active().distributed
measure = xmem.api.active().measure
found = {"world": [here.rank, here.size, here.local_rank, here.local_size, here.engine]}

payloads = [bytes([r]) * n for r, n in enumerate((0, 65536))]
found["exchange"] = group.exchange(payloads[rank]) == payloads
found["short"] = [text.decode() for text in group.exchange(b"ab"[rank : rank + 1])]

# Lists of tensors, as one.
tensors = [jt.array(np.full(shape, rank + 1, "float32")) for shape in ((3, 2), (0,), (5,), (1,))]
flat = group.flatten(tensors)
found["flat"] = flat.numpy().tolist()
address = flat.raw_ptr
summed = group.all_reduce(flat, "sum").wait()
found["in place"] = summed.raw_ptr == address
parts = group.split(summed, tensors)
found["parts"] = [[list(p.shape), p.numpy().ravel().tolist()] for p in parts]
found["views"] = parts[2].raw_ptr == address + 4 * 6
del flat, summed

# A parameter keeps its handle, that it is trained, and the old value in graphs that have it.
layer = nn.Linear(2, 3)
layer.weight.assign(jt.zeros((3, 2)))
weight, number = layer.weight, id(layer.weight)
loss = (weight * 5).sum()
group.assign(weight, parts[0].reshape((3, 2)))
found["assigned"] = [
    id(layer.weight) == number, weight.requires_grad, weight.numpy().tolist(), loss.item(),
    weight.raw_ptr != parts[0].raw_ptr,
]
optimizer = nn.SGD(layer.parameters(), 0.1)
optimizer.step((layer.weight * 1.0).sum())
found["trained"] = layer.weight.numpy().tolist()
still = jt.array(np.zeros(3, "float32")).stop_grad()
group.assign(still, jt.array(np.array([1.4, 2.6, 3.0], "float32")))
buffer = jt.array(np.zeros(2, "int32"))
group.assign(buffer, jt.array(np.array([7, 8], "int32")))
half = jt.array(np.zeros(2, "float16"))
group.assign(half, jt.array(np.array([1 + 2**-11, 1 + 3 * 2**-11], "float32")))
found["buffers"] = [still.requires_grad, still.numpy().tolist(), buffer.numpy().tolist(),
                    [float(v) for v in half.numpy()], str(half.dtype)]

converted = group.convert(jt.array(np.array([1 + 2**-8, 1 + 3 * 2**-8], "float32")), "bfloat16")
found["converted"] = [str(converted.dtype), converted.float32().numpy().tolist()]
same = jt.ones((2,))
found["same"] = group.convert(same, "float32") is same

x = np.random.RandomState(rank).randn(1000).astype("float32")
packed = group.encode(jt.array(x))
unpacked = group.decode(packed, 1000).numpy()
error = np.abs(unpacked - x).max() / np.abs(x).max()
found["packed"] = [str(packed.dtype), packed.numel(), float(error)]

numbers = jt.array64(np.array([2**40 + rank, -5], "int64"))
found["int64"] = group.all_reduce(numbers, "sum").wait().numpy().tolist()
found["gathered"] = group.all_gather(numbers).wait().shape == [2, 2]
found["broadcast"] = group.broadcast(jt.ones((2,)) * rank, 1).wait().numpy().tolist()
found["scattered"] = group.reduce_scatter(jt.ones((2, 3)) + rank, "mean").wait().numpy().tolist()
square = jt.array(np.arange(4.0, dtype="float32").reshape(2, 2) + 10 * rank)
found["exchanged"] = group.all_to_all(square).wait().numpy().tolist()

# What waits elsewhere is not computed on the way, and a parameter in a graph is not overwritten.
other = jt.ones((4,)) * 2
p = jt.ones((4,)).start_grad()
p.sync()
y = p * p
group.all_reduce(p, "sum").wait()
found["graph"] = jt.grad(y.sum(), [p])[0].numpy().tolist()

# Buckets: one buffer, and nothing else.
many = [jt.ones((1 << 10,)) for _ in range(256)]
jt.sync(many)
gc.collect()
jt.sync_all(True)
before = measure.counters().allocated_bytes
measure.reset_peak()
views = group.split(group.all_reduce(group.flatten(many), "mean").wait(), many)
found["bucket"] = measure.counters().peak_allocated_bytes - before
del views

# Jittor's own operations go on beside ours.
found["own"] = (jt.ones((3,)) * (rank + 1)).mpi_all_reduce("mean").numpy().tolist()
found["in_mpi"] = bool(jt.in_mpi)

try:
    group.describe(np.zeros(3))
except xmem.UsageError as error:
    found["foreign"] = str(error)

# Lazy work that nobody has looked at is sent when the ranks leave.
left = messages.all_reduce(jt.ones((3,)) * 4)
xd.destroy()
found["left"] = left.numpy().tolist()
try:
    messages.all_reduce(left)
except xmem.UsageError as error:
    found["gone"] = str(error)
again = xd.init(timeout=30)
found["again"] = [again.size, group.all_reduce(jt.ones((1,)), "sum").wait().item()]
report(**found)
xd.destroy()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return ranks.run("jittor", PROGRAM, tmp_path_factory.mktemp("two"), ranks=2)


def test_every_rank_knows_its_place(two):
    assert [report["world"] for report in two] == [[0, 2, 0, 2, "mpi"], [1, 2, 1, 2, "mpi"]]


def test_a_few_bytes_go_to_everyone_of_any_length(two):
    assert all(report["exchange"] and report["short"] == ["a", "b"] for report in two)


def test_tensors_are_joined_combined_in_place_and_split_into_views(two):
    for rank, report in enumerate(two):
        assert report["flat"] == [rank + 1.0] * 12
        assert report["in place"]
        assert report["views"]
        assert report["parts"] == [[[3, 2], [3.0] * 6], [[0], []], [[5], [3.0] * 5], [[1], [3.0]]]
        assert report["bucket"] == (1 << 20) + 4  # the buffer and a token


def test_a_value_is_assigned_in_place_and_graphs_keep_the_old_one(two):
    for report in two:
        assert report["assigned"] == [True, True, [[3.0, 3.0]] * 3, 0.0, True]
        assert np.allclose(report["trained"], 2.9)
        assert report["graph"] == [2.0] * 4
        still, halves = [1.4, 2.6, 3.0], [1.0, 1 + 2**-9]  # ties go to even
        assert report["buffers"][0] is False
        assert np.allclose(report["buffers"][1], still)
        assert report["buffers"][2:] == [[7, 8], halves, "float16"]


def test_types_are_converted_to_nearest_and_packed_by_the_codec(two):
    for report in two:
        assert report["converted"] == ["bfloat16", [1.0, 1 + 2**-6]]
        assert report["same"]
        assert report["packed"][:2] == ["uint8", 1016]
        assert report["packed"][2] < 1 / 120


def test_int64_and_the_other_collectives_work_at_once(two):
    for rank, report in enumerate(two):
        assert report["int64"] == [2**41 + 1, -10]
        assert report["gathered"]
        assert report["broadcast"] == [1.0, 1.0]
        assert report["scattered"] == [1.5] * 3
        assert report["exchanged"] == [
            [2.0 * rank, 2.0 * rank + 1],
            [10 + 2.0 * rank, 11 + 2.0 * rank],
        ]


def test_jittor_s_own_operations_go_on(two):
    for report in two:
        assert report["in_mpi"]
        assert report["own"] == [1.5] * 3


def test_what_is_left_is_sent_before_ranks_leave_and_they_may_come_again(two):
    for report in two:
        assert report["left"] == [8.0] * 3
        assert "call xmem.distributed.init()" in report["gone"]
        assert report["again"] == [2, 2.0]
        assert "ndarray is not a jittor.Var" in report["foreign"]


def test_a_process_alone_is_a_world_of_one(backend):
    import jittor as jt
    from xmem_jittor import messages

    group = backend.distributed
    world = group.start("auto", 10.0)
    try:
        assert (world.rank, world.size, world.engine) == (0, 1, "none")
        assert group.exchange(b"x") == [b"x"]
        x = jt.array(np.arange(6, dtype="float32").reshape(1, 6))
        for op in ("sum", "mean", "max"):
            assert np.array_equal(group.all_reduce(x, op).wait().numpy(), x.numpy())
        assert group.all_gather(x).wait().shape == [1, 1, 6]
        assert group.reduce_scatter(x, "sum").wait().shape == [6]
        assert np.array_equal(group.all_to_all(x).wait().numpy(), x.numpy())
        assert np.array_equal(group.broadcast(x, 0).wait().numpy(), x.numpy())
        assert np.array_equal(messages.reduce(x, 0).numpy(), x.numpy())
        for wrong in (lambda: messages.send(x, 0), lambda: messages.send(x, 1)):
            with pytest.raises(xmem.UsageError, match="rank"):
                wrong()
        with pytest.raises(xmem.UsageError, match="no rank 3"):
            messages.broadcast(x, 3, x.shape, "float32")
        with pytest.raises(xmem.UsageError, match="floats, not int32"):
            messages.all_reduce(jt.array([1, 2]), "mean")
        with pytest.raises(xmem.UsageError, match="Did you mean 'sum'"):
            messages.all_reduce(x, "summ")
        with pytest.raises(xmem.UsageError, match="no part for each of 1 ranks"):
            messages.all_to_all(jt.ones((3,)))
        with pytest.raises(xmem.UsageError, match="float32, int32"):
            group.flatten([x, jt.array([1, 2])])
        with pytest.raises(xmem.UsageError, match="no part of"):
            messages.view(x, (3,), 4)
        with pytest.raises(xmem.UsageError, match="at most 64 KiB"):
            group.exchange(bytes(1 << 17))
    finally:
        group.stop()
    with pytest.raises(xmem.UsageError, match=r"xmem\.distributed\.init"):
        messages.all_reduce(x)
    with pytest.raises(xmem.UsageError, match="mpirun"):
        group.start("mpi", 10.0)
    with pytest.raises(xmem.UsageError, match="gloo"):
        group.start("gloo", 10.0)


@pytest.fixture
def launched(monkeypatch):
    for name in (USE, WRAPPER, YIELD):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    return monkeypatch


def test_under_mpirun_mpicc_is_found_beside_it_or_beside_python(launched, tmp_path):
    launched.setattr(mpi, "_launcher_folder", lambda: tmp_path)
    mpi.prepare()
    assert Path(os.environ[WRAPPER]) == Path(sys.executable).parent / "mpicc"
    assert os.environ[YIELD] == "1"
    launched.delenv(WRAPPER)
    beside = tmp_path / "mpicc"
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    mpi.prepare()
    assert os.environ[WRAPPER] == str(beside)


def test_the_launcher_is_found_through_those_in_between(launched, tmp_path):
    import shutil

    # A program of the launcher's name that starts a shell that starts Python.
    launcher = tmp_path / "prterun"
    shutil.copy("/bin/sh", launcher)
    code = "from xmem_jittor import mpi; print(mpi._launcher_folder())"
    inner = f"sh -c '{sys.executable} -c \"{code}\"; true'; true"
    ran = subprocess.run([launcher, "-c", inner], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(tmp_path)


def test_what_is_set_against_mpi_is_gone_after_the_import(launched):
    launched.delenv("OMPI_COMM_WORLD_SIZE")
    mpi.prepare()
    assert os.environ[USE] == "0"
    mpi.tidy()
    assert USE not in os.environ
    launched.setenv(USE, "0")
    mpi.prepare()
    mpi.tidy()
    assert os.environ[USE] == "0"  # the user's own stays


def test_the_user_s_own_mpicc_wins(launched):
    launched.setenv(WRAPPER, "/bin/true")
    mpi.prepare()
    assert os.environ[WRAPPER] == "/bin/true"


def test_without_mpicc_under_mpirun_the_error_says_what_to_install(launched, tmp_path):
    launched.setattr(mpi, "find_wrapper", lambda: None)
    with pytest.raises(xmem.BackendUnavailableError, match="libopenmpi-dev"):
        mpi.prepare()
    launched.setenv(WRAPPER, str(tmp_path / "nothing"))
    with pytest.raises(xmem.BackendUnavailableError, match="no such program"):
        mpi.prepare()
    launched.delenv(WRAPPER)
    launched.setenv(USE, "0")
    with pytest.raises(xmem.BackendUnavailableError, match="use_mpi='0'"):
        mpi.prepare()


def test_reductions_are_right_without_instructions_for_halves(tmp_path):
    """The arithmetic alone, compiled for a processor that has none, over all halves."""
    native = Path(mpi.__file__).parent / "native"
    source = tmp_path / "halves.cc"
    source.write_text(
        '#define XMEM_PORTABLE\n#include "mpi_reduce.h"\n'
        'extern "C" void reduce(int dtype, const void* const* from, void* to, long long count) {\n'
        "    xmem::combine_any(dtype, xmem::SUM, 2, from, to, count); }\n"
    )
    library = tmp_path / "halves.so"
    command = ["g++", "-O2", "-std=c++17", "-fPIC", "-shared", f"-I{native}", str(source), "-o"]
    subprocess.run([*command, str(library)], check=True)
    import ctypes

    patterns = np.arange(65536, dtype="uint16").view("float16")
    patterns = patterns[~np.isnan(patterns)]
    other = np.roll(patterns, 4321)
    found = np.empty_like(patterns)
    from_ = (ctypes.c_void_p * 2)(patterns.ctypes.data, other.ctypes.data)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (patterns.astype("float32") + other.astype("float32")).astype("float16")
    number = 9  # float16
    ctypes.CDLL(str(library)).reduce(
        number, from_, ctypes.c_void_p(found.ctypes.data), ctypes.c_longlong(patterns.size)
    )
    numbers = ~np.isnan(expected)
    assert found[numbers].tobytes() == expected[numbers].tobytes()
    assert np.isnan(found[~numbers]).all()
