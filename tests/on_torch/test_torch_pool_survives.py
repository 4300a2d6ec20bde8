"""The pool in the corners of PyTorch's memory: threads, processes, storages, switches."""

import contextlib
import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from on_torch.pooling import MB, allocated, check, library, old_objects_apart, pool, reserved
from torch import nn
from xmem_torch import native
from xmem_torch.pool import Pool

import xmem
from xmem.native.build import find_compiler

__all__ = ["old_objects_apart", "pool"]

STRATEGIES = ("passthrough", "size_class", "bfc")
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def in_threads(work, count=4):
    failures = []

    def run(number):
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@each_strategy
def test_four_threads_keep_their_values_and_leak_nothing(pool, strategy):
    pool.configure({"strategy": strategy}, None)
    before = allocated(pool)

    def work(number):
        draw = random.Random(number)
        live = []
        for step in range(300):
            tensor = torch.empty(int(2 ** draw.uniform(2, 18)))
            tensor.fill_(number * 1000 + step)
            live.append((tensor, number * 1000 + step))
            if len(live) > 20:
                found, value = live.pop(draw.randrange(len(live)))
                assert found.min() == found.max() == value

    in_threads(work)
    gc.collect()
    assert allocated(pool) == before
    assert check() == 0


def test_settings_may_change_while_threads_allocate(pool):
    done = threading.Event()

    def work(number):
        if number:
            while not done.is_set():
                live = [torch.full((n * 10_000,), float(n)) for n in range(1, 20)]
                assert all((t == n).all() for n, t in enumerate(live, 1))
            return
        try:
            for turn in range(60):
                pool.configure({"strategy": STRATEGIES[turn % 3]}, None)
                pool.trim()
                assert check() == 0
        finally:
            done.set()

    in_threads(work)


@torch.jit.script
def allocate(n: int):
    total = torch.zeros(1)
    for i in range(n):
        total = total + torch.ones(20_000 + i % 7 * 30_000).sum()
    return total


@torch.jit.script
def allocate_in_parallel(n: int):
    tasks = [torch.jit.fork(allocate, n) for _ in range(4)]
    return [torch.jit.wait(t) for t in tasks]


@torch.jit.script
def allocate_little(n: int):
    total = torch.zeros(1)
    for i in range(n):
        total = total + i
    return total


@torch.jit.script
def allocate_little_in_parallel(n: int):
    tasks = [torch.jit.fork(allocate_little, n) for _ in range(4)]
    return [torch.jit.wait(t) for t in tasks]


@each_strategy
def test_allocations_that_really_overlap_keep_the_pool_whole(pool, strategy):
    """torch.jit.fork runs without the interpreter's lock."""
    pool.configure({"strategy": strategy, "huge_pages": False}, None)
    allocate_in_parallel(2)
    expected = allocate(40)
    for _ in range(20):
        assert all(found == expected for found in allocate_in_parallel(40))
        assert check() == 0


def settled(pool):
    """What is allocated once TorchScript's tasks have ended, which go on after an error."""
    found = None
    while found != (found := allocated(pool)):
        time.sleep(0.02)
    return found


@each_strategy
def test_the_limit_is_never_passed_by_threads_together(pool, strategy):
    pool.configure({"strategy": strategy}, None)
    allocate_in_parallel(2)
    refused = pool.stats().out_of_memory_count
    for turn in range(20):
        limit = settled(pool) + (turn % 4 + 1) * 200_000
        pool.reset_peak()
        pool.set_limit(limit)
        with contextlib.suppress(RuntimeError):  # TorchScript's own type of error
            allocate_in_parallel(40)
        settled(pool)
        assert pool.stats().peak_allocated_bytes <= limit
        pool.set_limit(None)
    assert pool.stats().out_of_memory_count > refused


@each_strategy
def test_backward_in_several_threads(pool, strategy):
    pool.configure({"strategy": strategy}, None)
    model = nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 10))
    x = torch.randn(300, 200)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    def work(_):
        for _ in range(5):
            found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))

    in_threads(work)
    assert check() == 0


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((50_000,), float(index)).square()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loaders_work_in_both_kinds_of_process(pool, method):
    pool.configure({"strategy": "bfc"}, None)
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=4, num_workers=2, multiprocessing_context=method
    )
    found = torch.cat(list(loader))
    assert found[:, 0].tolist() == [float(n * n) for n in range(16)]


@pytest.mark.parametrize("values", [{"strategy": "bfc", "min_cached": 0}, {}], ids=str)
def test_a_fork_while_threads_allocate_leaves_lock_and_room_free(pool, values):
    pool.configure(values, None)
    pool.set_limit(allocated(pool) + 256 * MB)
    done = threading.Event()

    def allocate_without_the_interpreters_lock():
        while not done.is_set():
            allocate_in_parallel(100) if not values else allocate_little_in_parallel(1000)

    thread = threading.Thread(target=allocate_without_the_interpreters_lock)
    thread.start()
    try:
        for _ in range(50):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends it if it waits for the lock
                stats = pool.stats()
                torch.empty(stats.limit_bytes - stats.allocated_bytes, dtype=torch.uint8)
                os._exit(check())
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()


@each_strategy
def test_storages_may_grow_be_shared_and_be_freed_early(pool, strategy):
    pool.configure({"strategy": strategy}, None)
    before = allocated(pool)
    a = torch.ones(100_000)
    a.resize_(1_000_000)
    assert a[:100_000].sum() == 100_000
    a.untyped_storage().resize_(0)
    b = torch.ones(1_000_000)
    b.share_memory_()
    assert b.sum() == 1_000_000
    view = torch.ones(1_000_000).numpy()
    assert np.all(view == 1)
    assert torch.from_numpy(view).sum() == 1_000_000
    assert allocated(pool) - before == 4_000_000
    del a, b, view
    assert allocated(pool) == before
    assert check() == 0


@each_strategy
def test_tensors_outlive_every_switch(pool, strategy):
    before, unused = allocated(pool), reserved(pool) - allocated(pool)
    pool.configure({"strategy": strategy}, None)
    live = [torch.full((n,), 7.0) for n in (10, 20_000, 300_000, 2_000_000)]
    pieces = [torch.full((50_000,), 3.0) for _ in range(30)]
    del pieces[::2]
    for other in STRATEGIES:
        pool.configure({"strategy": other}, None)
        live.append(torch.full((400_000,), 7.0))
        assert check() == 0
    assert all((t == 7).all() for t in live)
    assert all((t == 3).all() for t in pieces)
    live.clear()
    pieces.clear()
    assert allocated(pool) == before
    pool.configure({"strategy": "passthrough"}, None)
    assert reserved(pool) - allocated(pool) == unused


@each_strategy
def test_it_can_be_taken_out_and_put_in_a_hundred_times(pool, strategy):
    pool.configure({"strategy": strategy}, None)
    before = allocated(pool)
    ours, theirs = [], []
    for turn in range(100):
        ours.append(torch.full((30_000,), float(turn)))
        assert library().xmem_torch_uninstall() == 1
        assert library().xmem_torch_uninstall() == 0
        theirs.append(torch.full((30_000,), float(turn)))
        if turn % 3 == 0:
            ours.pop(0)
        assert library().xmem_torch_install() == 1
        assert library().xmem_torch_install() == 0
        if turn % 3 == 1:
            theirs.pop(0)
    assert allocated(pool) - before == sum(t.nbytes for t in ours)
    assert [t[0].item() for t in ours] == [float(n) for n in range(34, 100)]
    assert all((t == t[0]).all() for t in (*ours, *theirs))
    ours.clear()
    theirs.clear()
    assert allocated(pool) == before
    assert check() == 0


def test_nothing_is_kept_once_it_has_been_taken_out(pool):
    pool.configure({"strategy": "bfc"}, None)
    start = reserved(pool)
    late = torch.empty(8 * MB, dtype=torch.uint8)
    torch.empty(16 * MB, dtype=torch.uint8)
    library().xmem_torch_uninstall()
    try:
        del late
        assert reserved(pool) == start
    finally:
        library().xmem_torch_install()


def test_another_backend_over_the_same_allocator_knows_its_settings(pool):
    pool.configure({"strategy": "bfc", "cache_limit": MB}, None)
    for device in ("cpu", "auto"):
        assert Pool(device).in_force() == pool.in_force()


OTHER = """
#include <c10/core/CPUAllocator.h>
extern "C" void take(int priority) {
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), static_cast<uint8_t>(priority));
}
"""


@pytest.fixture
def take(tmp_path):
    """Puts another allocator in place, with a priority; ours is put back."""
    root = Path(torch.__file__).parent
    source, built = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(OTHER)
    arguments = ("-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}")
    link = (f"-L{root / 'lib'}", "-lc10")
    subprocess.run([find_compiler(), *arguments, source, "-o", built, *link], check=True)
    yield ctypes.CDLL(str(built)).take
    native.install(library())


def test_another_allocator_is_told_of_and_ours_can_be_put_back(pool, take, backend):
    ours = torch.ones(MB)
    before = allocated(pool)
    take(100)
    with pytest.warns(xmem.XmemWarning, match="another allocator has taken the place"):
        pool.stats()
    theirs = torch.ones(MB)
    type(backend.measure)("cpu")  # as xmem.use does
    assert allocated(pool) == before
    again = torch.ones(MB)
    assert allocated(pool) == before + again.nbytes
    del ours, theirs
    assert allocated(pool) == before
    assert check() == 0


DISPLACED = """
import ctypes, sys, torch, xmem
ctypes.CDLL(sys.argv[1]).take(200)
try:
    xmem.use("torch", device="cpu").measure.counters()
except xmem.MeasurementError as error:
    assert "higher priority" in str(error)
else:
    raise AssertionError("counts what it does not make")
assert torch.ones(10).sum() == 10
"""


def test_an_allocator_that_cannot_be_displaced_is_an_error(take, tmp_path):
    program = [sys.executable, "-c", DISPLACED, str(tmp_path / "other.so")]
    subprocess.run(program, timeout=60, check=True)
