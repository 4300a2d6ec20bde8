"""Limits, refusals and what is tried before one, and settings that are refused."""

import gc
import subprocess
import sys

import pytest
import torch
from on_torch.pooling import (
    KB,
    MB,
    allocated,
    check,
    library,
    old_objects_apart,
    pool,
    reserved,
)
from torch import nn

import xmem

__all__ = ["old_objects_apart", "pool"]

each_strategy = pytest.mark.parametrize("strategy", ["passthrough", "size_class", "bfc"])


class Cycle:
    """What only garbage collection frees."""

    def __init__(self, size):
        self.tensor = torch.empty(size, dtype=torch.uint8)
        self.myself = self


@each_strategy
def test_the_limit_is_exact_to_the_byte(pool, strategy):
    pool.configure({"strategy": strategy}, None)
    kept = torch.empty(5 * MB + 3, dtype=torch.uint8)
    pool.set_limit(allocated(pool) + 3 * MB + 1)
    assert pool.stats().limit_bytes == allocated(pool) + 3 * MB + 1
    fits = torch.empty(3 * MB + 1, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1, dtype=torch.uint8)
    del fits
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * MB + 2, dtype=torch.uint8)
    assert torch.empty(3 * MB + 1, dtype=torch.uint8).nbytes == 3 * MB + 1
    del kept
    assert torch.empty(8 * MB + 4, dtype=torch.uint8).nbytes == 8 * MB + 4


@pytest.mark.parametrize("strategy", ["size_class", "bfc"])
def test_what_is_cached_goes_back_before_more_is_reserved_than_the_limit(pool, strategy):
    pool.configure({"strategy": strategy}, None)
    for size in (3, 5, 7):
        torch.empty(size * MB, dtype=torch.uint8)
    limit = allocated(pool) + 20 * MB
    pool.set_limit(limit)
    live = torch.empty(12 * MB, dtype=torch.uint8)
    assert reserved(pool) <= limit
    pool.set_limit(allocated(pool) + MB)
    assert reserved(pool) <= allocated(pool) + 3 * MB  # the class of what is live
    del live


def test_a_refusal_tells_what_was_asked_for_and_what_was_there(pool, backend):
    pool.configure({"strategy": "bfc"}, None)
    kept = [torch.empty(n * KB, dtype=torch.uint8) for n in range(100, 400)]
    backend.measure.tag("activation", kept[:100])
    hole = torch.empty(MB, dtype=torch.uint8)
    del hole
    pool.set_limit(allocated(pool) + MB)
    before = pool.stats()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * MB, dtype=torch.uint8)
    found = pool.refusal()
    assert found.requested_bytes == 2 * MB
    assert found.allocated_bytes == before.allocated_bytes == sum(found.by_category.values())
    assert found.reserved_bytes == before.reserved_bytes
    assert found.limit_bytes == before.allocated_bytes + MB
    assert found.largest_free_bytes == before.largest_free_bytes > 0
    assert found.by_category["activation"] == sum(t.nbytes for t in kept[:100])
    assert found.in_backward is False
    sizes = [b.requested_bytes for b in found.blocks]
    assert len(sizes) == 256
    assert sizes == sorted((t.nbytes for t in kept), reverse=True)[:256]
    by_address = {b.address: b for b in found.blocks}
    assert by_address[kept[99].data_ptr()].category == "activation"
    assert all(b.birth < found.birth for b in found.blocks)
    assert pool.stats().out_of_memory_count == before.out_of_memory_count + 1


def test_a_refusal_by_the_system_has_no_limit(pool):
    with pytest.raises(torch.OutOfMemoryError, match="system has no"):
        torch.empty(1 << 50, dtype=torch.uint8)
    assert pool.refusal().limit_bytes is None
    assert pool.refusal().requested_bytes == 1 << 50


@pytest.mark.parametrize("size", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30])
def test_a_bound_that_no_machine_reaches_refuses_nothing(pool, backend, size):
    for bound in (pool.set_limit, backend.measure.set_limit):
        bound(size)
        assert torch.ones(MB).sum() == MB
        assert pool.stats().limit_bytes == (1 << 63) - 1
        bound(None)
    pool.configure({"strategy": "bfc", "cache_limit": size}, None)
    torch.empty(8 * MB, dtype=torch.uint8)
    assert reserved(pool) >= 8 * MB


@pytest.mark.parametrize("size", [1 << 46, 1 << 50, (1 << 62) + 1, (1 << 63) - 1])
@each_strategy
def test_sizes_that_no_machine_has_leave_the_pool_whole(pool, strategy, size):
    pool.configure({"strategy": strategy}, None)
    pool.set_limit((1 << 62) - 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8)
    assert pool.refusal().requested_bytes == size
    assert check() == 0
    assert torch.ones(MB).sum() == MB


SYSTEM_IS_OUT_OF_MEMORY = """
import resource, torch, xmem
from pathlib import Path
MB = 1 << 20
pool = xmem.use("torch", device="cpu").pool
# Else free segments would go back before they are needed.
pool.configure({"strategy": "bfc", "reserve_ratio": None}, None)
kept = torch.ones(10 * MB, dtype=torch.uint8)
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 600 * MB,) * 2)
for size in (100, 200, 230):
    torch.empty(size * MB, dtype=torch.uint8)
cached = pool.stats().reserved_bytes
assert cached > 300 * MB, cached
large = torch.empty(480 * MB, dtype=torch.uint8)  # there is room once the cache has gone back
stats = pool.stats()
assert (stats.retry_count, stats.out_of_memory_count) == (1, 0), stats
try:
    torch.empty(480 * MB, dtype=torch.uint8)
except torch.OutOfMemoryError as error:
    assert "system has no" in str(error), error
else:
    raise AssertionError("more than there is")
assert pool.refusal().limit_bytes is None and pool.refusal().requested_bytes == 480 * MB
del large
assert torch.ones(100 * MB, dtype=torch.uint8)[-1] == 1 == kept[-1]
assert xmem.active().measure.counters().out_of_memory_count == 1
"""


def test_the_cache_goes_back_before_the_system_is_said_to_have_no_more():
    ran = subprocess.run(
        [sys.executable, "-c", SYSTEM_IS_OUT_OF_MEMORY],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


class AllocatesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        torch.empty(8 * MB)
        return gradient


def test_a_refusal_in_backward_says_so(pool):
    x = torch.ones(3, requires_grad=True)
    y = AllocatesInBackward.apply(x).sum()
    pool.set_limit(allocated(pool) + MB)
    with pytest.raises(torch.OutOfMemoryError):
        y.backward()
    assert pool.refusal().in_backward is True
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8 * MB)
    assert pool.refusal().in_backward is False


def test_garbage_is_collected_and_the_request_tried_again(pool):
    pool.configure({}, "trim_and_retry")
    gc.collect()
    gc.disable()
    try:
        Cycle(6 * MB)
        before = pool.stats()
        pool.set_limit(before.allocated_bytes + MB)
        assert torch.empty(5 * MB, dtype=torch.uint8).nbytes == 5 * MB
        after = pool.stats()
        assert after.out_of_memory_count == before.out_of_memory_count
        assert after.retry_count == before.retry_count + 1
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(50 * MB, dtype=torch.uint8)
        assert pool.stats().out_of_memory_count == before.out_of_memory_count + 1
    finally:
        gc.enable()


def test_a_request_is_counted_once_however_often_it_is_tried(pool):
    pool.configure({}, "trim_and_retry")
    before = pool.stats()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8)
    after = pool.stats()
    assert after.retry_count == before.retry_count + 1
    assert after.out_of_memory_count == before.out_of_memory_count + 1


def test_without_the_policy_nothing_is_tried_again(pool):
    gc.collect()
    gc.disable()
    try:
        pool.configure({}, "trim_and_retry")
        pool.configure({}, "raise")
        assert pool.in_force()["on_oom"] == "raise"
        Cycle(6 * MB)
        pool.set_limit(allocated(pool) + MB)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(5 * MB, dtype=torch.uint8)
    finally:
        gc.enable()
        gc.collect()


def test_what_garbage_does_while_it_is_collected_is_not_answered_again(pool):
    failed = []

    class Asks(Cycle):
        def __del__(self):
            try:
                torch.empty(64 * MB, dtype=torch.uint8)
            except torch.OutOfMemoryError:
                failed.append(1)

    pool.configure({}, "trim_and_retry")
    Asks(6 * MB)
    before = pool.stats()
    pool.set_limit(before.allocated_bytes + MB)
    assert torch.empty(5 * MB, dtype=torch.uint8).nbytes == 5 * MB
    assert failed == [1]
    assert pool.stats().retry_count == before.retry_count + 1
    assert pool.stats().out_of_memory_count == before.out_of_memory_count + 1


def test_backward_may_be_refused_and_tried_again_without_the_interpreters_lock(pool):
    pool.configure({"strategy": "bfc"}, "trim_and_retry")
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    x = torch.randn(256, 512)
    model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    gc.collect()
    Cycle(8 * MB)
    pool.set_limit(allocated(pool) + 3 * MB)
    before = pool.stats()
    model(x).sum().backward()
    after = pool.stats()
    assert after.retry_count > before.retry_count
    assert after.out_of_memory_count == before.out_of_memory_count


def test_spilling_is_refused_with_the_reason(pool):
    before = pool.in_force()
    with pytest.raises(xmem.CapabilityError, match="nowhere to spill"):
        pool.configure({"strategy": "bfc"}, "spill")
    assert pool.in_force() == before


BAD = {
    "strategy": ["best", 3, None],
    "segment_size": [0, -1, "1KiB", True, 1.5, "much"],
    "reserve_ratio": [0.5, "1", True, 1e9],
    "min_cached": [-1, "x", 2.5],
    "cache_limit": [-1, "x", True],
    "huge_pages": [1, "yes", None],
    "divisions": [0, 2.5, True, "8", 10**6],
    "slack": [-0.1, 1.5, True, "0.5"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_bad_values_are_refused(pool, name, value):
    with pytest.raises(xmem.UsageError):
        pool.settings[name].parse(value)


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "size_class", "segment_size": 4 * MB},
        {"strategy": "bfc", "divisions": 4},
        {"cache_limit": MB},
        {"strategy": "passthrough", "slack": 0.5},
    ],
)
def test_a_setting_without_effect_is_refused_and_nothing_changes(pool, values):
    before = pool.in_force()
    with pytest.raises(xmem.UsageError, match="no effect"):
        pool.configure(values, "trim_and_retry")
    assert pool.in_force() == before


def test_settings_can_be_put_back_as_they_were(pool):
    for values in ({"strategy": "bfc", "cache_limit": MB}, {"strategy": "size_class"}):
        saved = pool.in_force()
        pool.configure(values, None)
        changed = pool.in_force()
        on_oom = saved.pop("on_oom")
        pool.configure(saved, on_oom)
        assert pool.in_force() == {**saved, "on_oom": on_oom}
        changed.pop("on_oom")
        pool.configure(changed, None)


def test_errors_are_told_by_their_type(pool):
    kind = pool.out_of_memory_type()
    assert issubclass(kind, xmem.OutOfMemoryError)
    assert issubclass(kind, torch.OutOfMemoryError)
    for error in (kind("x"), torch.OutOfMemoryError("x"), MemoryError()):
        assert pool.is_out_of_memory(error)
    for error in (RuntimeError("CUDA error: out of memory"), ValueError("out of memory")):
        assert not pool.is_out_of_memory(error)
    library().xmem_torch_uninstall()
    try:
        with pytest.raises(RuntimeError) as plain:
            torch.empty(1 << 50, dtype=torch.uint8)
    finally:
        library().xmem_torch_install()
    assert not isinstance(plain.value, torch.OutOfMemoryError)
    assert pool.is_out_of_memory(plain.value)


def test_torch_script_hides_the_type_and_not_the_error(pool):
    @torch.jit.script
    def work(n: int):
        return torch.zeros(n).sum()

    pool.set_limit(allocated(pool) + MB)
    with pytest.raises(RuntimeError) as caught:
        work(8 * MB)
    assert pool.is_out_of_memory(caught.value)


# Threads that are still at work would abort PyTorch itself, with any allocator.
EXIT = """
import atexit, gc, sys, threading, torch, xmem
class Late:
    def __del__(self):
        torch.empty(1 << 20)
        try:
            torch.empty(1 << 50, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            print("refused")
atexit.register(Late)
pool = xmem.use("torch", device="cpu").pool
pool.configure({"strategy": "bfc"}, "trim_and_retry")  # small requests pass through
kept = Late(); kept.myself = kept; kept.tensor = torch.ones(1 << 20)
sys.kept = Late(), torch.ones(1 << 20)
def work():
    for _ in range(100):
        torch.empty(50_000)
        torch.empty(5_000)
    work.kept = torch.ones(1 << 18)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
model = torch.nn.Linear(300, 300)
model(torch.ones(300, 300)).sum().backward()
"""


def test_a_process_ends_well_though_its_last_acts_are_refused():
    ran = subprocess.run(
        [sys.executable, "-c", EXIT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "refused" in ran.stdout
