"""The CUDA pool without a GPU: the keys are checked, and PyTorch is called as it should be.

Nothing here runs on a GPU: torch.cuda's functions are stand-ins that write down their calls.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from xmem_torch import cuda_pool, cuda_settings
from xmem_torch.cuda_settings import SETTINGS
from xmem_torch.sources import CudaSource

import xmem

GIB = 2**30


class FakeCuda:
    """A device of 8 GiB with one segment: two live blocks and two free ones."""

    def __init__(self):
        self.calls = []
        self.fraction = 1.0
        self.reserved = 40_000
        self.initialized = True
        self.backend = "native"
        self.observer = None

    def set_fraction(self, fraction):
        self.calls.append(("fraction", fraction))
        self.fraction = fraction

    def empty_cache(self):
        self.calls.append("empty_cache")
        self.reserved -= 15_000

    def stats(self):
        return {
            "requested_bytes.all.current": 900,
            "requested_bytes.all.peak": 2000,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": 50_000,
            "segment.all.current": 1,
            "allocation.all.allocated": 7,
            "allocation.all.freed": 5,
            "num_ooms": 3,
            "num_alloc_retries": 4,
        }

    def snapshot(self):
        sizes = (("active_allocated", 512, 500), ("inactive", 1024, 0))
        sizes += (("active_pending_free", 512, 400), ("inactive", 2048, 0))
        blocks = [{"state": s, "size": n, "requested_size": r} for s, n, r in sizes]
        other = {"device": 1, "address": 1, "total_size": 10**9, "blocks": []}
        return [{"device": 0, "address": 4096, "total_size": 4096, "blocks": blocks}, other]


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for variable in cuda_settings.VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def attach(observer):
        fake.observer = observer

    stand_ins = {
        "is_initialized": lambda: fake.initialized,
        "get_allocator_backend": lambda: fake.backend,
        "memory_stats": fake.stats,
        "memory_snapshot": fake.snapshot,
        "memory_reserved": lambda: fake.reserved,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=8 * GIB),
        "set_per_process_memory_fraction": fake.set_fraction,
        "get_per_process_memory_fraction": lambda: fake.fraction,
        "empty_cache": fake.empty_cache,
        "synchronize": lambda: fake.calls.append("synchronize"),
        "reset_peak_memory_stats": lambda: fake.calls.append("reset_peak"),
        "device": lambda _: torch.no_grad(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", lambda s: fake.calls.append(("set", s))
    )
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)
    return fake


GOOD = {
    "backend": ["native", "cudaMallocAsync"],
    "expandable_segments": [True, False],
    "large_segment_size_mb": [11, 512],
    "max_split_size_mb": [20, 4096],
    "max_non_split_rounding_mb": [20],
    "garbage_collection_threshold": [0.1, 0.99],
    "roundup_power2_divisions": [1, 8, {256: 1, 512: 2, ">": 8}, {">": 0}],
    "per_process_memory_fraction": [0, 0.5, 1.0],
    "throw_on_cudamalloc_oom": [True],
    "release_lock_on_cudamalloc": [True],
    "graph_capture_record_stream_reuse": [True],
    "pinned_use_cuda_host_register": [True],
    "pinned_num_register_threads": [1, 128],
    "pinned_use_background_threads": [False],
    "pinned_free_catch_all": [True],
    "pinned_reserve_segment_size_mb": [1],
    "pinned_max_round_threshold_mb": [0, 64],
    "pinned_max_cached_size_mb": [0],
}
BAD = {
    "backend": ["Native", "cuda", 1],
    "expandable_segments": ["True", 1, None],
    "large_segment_size_mb": [10, -1, "20"],
    "max_split_size_mb": [19, -1, 1.5, "20", True, 2**31],
    "max_non_split_rounding_mb": [0, None],
    "garbage_collection_threshold": [0, 1, -0.5, "0.5", True],
    "roundup_power2_divisions": [
        0,
        3,
        {},
        {3: 1},
        {256: 3},
        {">": "a"},
        {2**20: 1},
        "[256:1]",
        2**70,
    ],
    "per_process_memory_fraction": [-0.1, 1.5, "0.5", True, float("nan")],
    "throw_on_cudamalloc_oom": ["True", 1],
    "release_lock_on_cudamalloc": ["yes"],
    "graph_capture_record_stream_reuse": [0],
    "pinned_use_cuda_host_register": ["True"],
    "pinned_num_register_threads": [0, 3, 256, True],
    "pinned_use_background_threads": [1],
    "pinned_free_catch_all": [None],
    "pinned_reserve_segment_size_mb": [0],
    "pinned_max_round_threshold_mb": [-1],
    "pinned_max_cached_size_mb": ["1"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in GOOD.items() for v in vs])
def test_good_values_are_written_and_read_again(name, value):
    parsed = SETTINGS[name].parse(value)
    assert cuda_settings.read(cuda_settings.write({name: parsed})) == {name: parsed}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_values_that_pytorch_would_refuse_or_misread_are_refused(name, value):
    with pytest.raises(xmem.UsageError):
        SETTINGS[name].parse(value)


def test_each_key_has_good_and_bad_values():
    assert set(SETTINGS) == set(GOOD) == set(BAD)


def test_each_key_of_pytorchs_own_headers_is_known():
    """Of a build without CUDA too: what it does not know, it takes in silence."""
    include = Path(torch.__file__).parent / "include/c10"
    text = (include / "cuda/CUDAAllocatorConfig.h").read_text()
    block = re.search(r"unordered_set<std::string> keys\{(.*?)\};", text, re.DOTALL).group(1)
    joined = re.sub(r'"\s+"', "", re.sub(r"//.*", "", block))
    keys = {key.replace("hip", "cuda") for key in re.findall(r'"(\w+)"', joined)}
    assert keys >= {"backend", "release_lock_on_cudamalloc"}
    assert keys <= set(SETTINGS)


FIRST_WINS = """
import os, sys, torch
try:
    torch._C._accelerator_setAllocatorSettings("")
except ValueError:
    print(1)  # of the variable that is read
"""


def test_the_variable_that_wins_is_the_one_that_pytorch_reads():
    first, second, third = cuda_settings.VARIABLES
    refused = "max_split_size_mb:1"
    for values in (
        {first: "max_split_size_mb:64", second: refused, third: refused},
        {second: "", third: refused},
    ):
        said = subprocess.run(
            [sys.executable, "-c", FIRST_WINS],
            env={**os.environ, **values},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        assert said == ""


@pytest.mark.parametrize("text", ["", "max_split_size_mb:64,", ",max_split_size_mb: 64"])
def test_commas_at_the_ends_are_taken_as_pytorch_takes_them(text):
    torch._C._accelerator_setAllocatorSettings(text)
    assert cuda_settings.read(text) == ({"max_split_size_mb": 64} if "64" in text else {})
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize("name", ["large_segment_size_mb", "max_split_size_mb"])
def test_our_bounds_are_those_of_pytorchs_own_parser(name, monkeypatch):
    """Device-neutral keys are checked by this build too."""
    parse = torch._C._accelerator_setAllocatorSettings
    for value in (10, 11, 19, 20):
        try:
            SETTINGS[name].parse(value)
        except xmem.UsageError:
            with pytest.raises(ValueError, match="must be"):
                parse(f"{name}:{value}")
        else:
            parse(f"{name}:{value}")
    parse("")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_split_size_mb": 50, "large_segment_size_mb": 100}, "large_segment_size_mb=100"),
        ({"max_non_split_rounding_mb": 20, "large_segment_size_mb": 21}, "at least"),
        ({"pinned_max_round_threshold_mb": 8, "pinned_max_cached_size_mb": 4}, "never rounded"),
    ],
)
def test_values_that_contradict_each_other_are_refused(cuda, values, said):
    pool = cuda_pool.CudaPool()
    before = pool.in_force()
    with pytest.raises(xmem.UsageError, match=said):
        pool.configure(values, None)
    assert pool.in_force() == before
    assert not cuda.calls


def test_what_is_not_named_keeps_its_value(cuda, monkeypatch):
    """PyTorch's runtime parser resets what a call does not name."""
    monkeypatch.setenv(
        "PYTORCH_ALLOC_CONF", "max_split_size_mb:64, roundup_power2_divisions:[256:1,>:4]"
    )
    pool = cuda_pool.CudaPool()
    pool.configure({"expandable_segments": True}, None)
    pool.configure({"max_split_size_mb": 32}, "raise")
    rounding = "roundup_power2_divisions:[256:1,>:4]"
    assert cuda.calls == [
        ("set", f"max_split_size_mb:64,{rounding},expandable_segments:True"),
        ("set", f"max_split_size_mb:32,{rounding},expandable_segments:True"),
    ]
    assert pool.in_force() == {
        "backend": "native",
        "max_split_size_mb": 32,
        "roundup_power2_divisions": {256: 1, ">": 4},
        "expandable_segments": True,
        "on_oom": "raise",
    }


def test_a_backend_that_is_named_too_late_says_which_variable_to_set(cuda):
    pool = cuda_pool.CudaPool()
    pool.configure({"backend": "native"}, None)
    with pytest.raises(
        xmem.UsageError, match=r"too late.*PYTORCH_ALLOC_CONF=backend:cudaMallocAsync"
    ):
        pool.configure({"backend": "cudaMallocAsync"}, None)
    assert pool.in_force()["backend"] == "native"


def test_settings_for_pinned_memory_come_before_cuda_is_used(cuda):
    pool = cuda_pool.CudaPool()
    with pytest.raises(xmem.UsageError, match="pinned_num_register_threads:4"):
        pool.configure({"expandable_segments": True, "pinned_num_register_threads": 4}, None)
    assert not cuda.calls
    cuda.initialized = False
    pool.configure({"pinned_num_register_threads": 4}, None)
    assert cuda.calls == [("set", "pinned_num_register_threads:4")]


def test_what_cuda_malloc_async_ignores_is_refused(cuda):
    cuda.backend = "cudaMallocAsync"
    pool = cuda_pool.CudaPool()
    with pytest.raises(xmem.UsageError, match="ignores max_split_size_mb"):
        pool.configure({"max_split_size_mb": 64}, None)


def test_the_drivers_pool_tells_what_it_knows_and_zero_of_nothing_else(cuda, monkeypatch):
    """PyTorch gives what cudaMallocAsync does not count as zero, and raises where it is asked."""

    def refuses(*_):
        raise RuntimeError("cudaMallocAsync does not support it")

    stats = dict.fromkeys(cuda.stats(), 0)
    stats |= {"allocated_bytes.all.current": 1024, "allocated_bytes.all.peak": 2048}
    stats |= {"reserved_bytes.all.current": 4096, "reserved_bytes.all.peak": 8192}
    cuda.backend = "cudaMallocAsync"
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuses)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuses)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    pool = cuda_pool.CudaPool()
    found, counters = pool.stats(), CudaSource().counters()
    assert (found.allocated_bytes, found.peak_allocated_bytes) == (1024, 2048)
    assert (found.reserved_bytes, found.peak_reserved_bytes) == (4096, 8192)
    assert found.segment_count is found.allocation_count is found.free_count is None
    assert found.out_of_memory_count is found.largest_free_bytes is found.retry_count is None
    assert (counters.allocated_bytes, counters.peak_allocated_bytes) == (1024, 2048)
    assert counters.allocation_count is counters.out_of_memory_count is None
    with pytest.raises(xmem.CapabilityError, match="cudaMallocAsync"):
        pool.segments()
    assert {"segments", "refusal"} <= set(pool.gaps)


@pytest.mark.parametrize(
    "text",
    [
        "bogus:1",
        "max_split_size_mb:1",
        "max_split_size_mb:64_0",
        "expandable_segments:yes",
        "max_split_size_mb",
        "roundup_power2_divisions:[256:1",
    ],
)
def test_nonsense_in_the_environment_is_named(cuda, monkeypatch, text):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    with pytest.raises(xmem.UsageError, match="PYTORCH_CUDA_ALLOC_CONF"):
        cuda_pool.CudaPool()


def test_variables_that_differ_are_warned_about(cuda, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    with pytest.warns(xmem.XmemWarning, match="differ"):
        pool = cuda_pool.CudaPool()
    assert pool.in_force()["max_split_size_mb"] == 128
    with pytest.raises(xmem.UsageError, match="PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,b"):
        pool.configure({"backend": "cudaMallocAsync"}, None)


@pytest.mark.parametrize("policy", ["trim_and_retry", "spill"])
def test_policies_that_cannot_be_had_say_why(cuda, policy):
    pool = cuda_pool.CudaPool()
    with pytest.raises(xmem.CapabilityError, match=policy):
        pool.configure({"expandable_segments": True}, policy)
    assert f"on_oom={policy}" in pool.gaps
    assert not cuda.calls


def test_counters_limit_and_trim(cuda):
    pool = cuda_pool.CudaPool()
    pool.set_limit(2 * GIB)
    found = pool.stats()
    assert (found.allocated_bytes, found.peak_allocated_bytes) == (900, 2000)
    assert (found.reserved_bytes, found.peak_reserved_bytes) == (40_000, 50_000)
    assert (found.out_of_memory_count, found.retry_count) == (3, 4)
    assert (found.allocation_count, found.free_count, found.segment_count) == (7, 5, 1)
    assert found.limit_bytes == 2 * GIB
    assert found.largest_free_bytes == 2048
    assert pool.trim() == 15_000
    pool.set_limit(None)
    assert pool.stats().limit_bytes is None
    pool.set_limit(100 * GIB)  # more than there is
    pool.reset_peak()
    assert cuda.calls == [
        ("fraction", 0.25),
        "synchronize",
        "empty_cache",
        ("fraction", 1.0),
        ("fraction", 1.0),
        "reset_peak",
    ]


def test_segments_are_those_of_the_device_with_blocks_by_address(cuda):
    [segment] = cuda_pool.CudaPool().segments()
    assert (segment.address, segment.size_bytes) == (4096, 4096)
    assert [b.address for b in segment.blocks] == [4096, 4608, 5632, 6144]
    assert [b.requested_bytes for b in segment.blocks] == [500, 0, 400, 0]


def test_a_refusal_is_written_down_where_it_happens(cuda):
    pool = cuda_pool.CudaPool()
    assert pool.refusal() is None
    cuda.observer(0, 10**6, 8 * GIB, 123)
    found = pool.refusal()
    assert (found.requested_bytes, found.reserved_bytes) == (10**6, 40_000)
    assert [b.requested_bytes for b in found.blocks] == [500, 400]
    assert found.limit_bytes is None
    assert found.in_backward is False


def test_a_refusal_that_cannot_be_described_does_not_hide_the_error(cuda, monkeypatch):
    pool = cuda_pool.CudaPool()

    def fails():
        raise KeyError("another shape")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", fails)
    cuda.observer(0, 10**6, 8 * GIB, 123)
    assert pool.refusal() is None


def test_preallocation_makes_a_tensor_and_drops_it(cuda, monkeypatch):
    pool = cuda_pool.CudaPool()
    assert pool.preallocate(2048) == 0  # is there

    def empty(size, **_):
        cuda.reserved += size

    monkeypatch.setattr(torch, "empty", empty)
    assert pool.preallocate(10_000) == 10_000

    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(xmem.OutOfMemoryError, match="one piece"):
        pool.preallocate(10_000)


def test_a_cpu_knows_where_these_settings_are(backend):
    for name in SETTINGS:
        assert backend.pool.elsewhere[name] == "CUDA"
