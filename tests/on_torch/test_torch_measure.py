"""The PyTorch meter against PyTorch's own profiler, and in all the corners of its memory."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from on_torch.gpt import GPT, forward_and_backward
from torch import nn

import xmem


def allocated(backend):
    gc.collect()
    return backend.measure.counters().allocated_bytes


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def image_step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def profiled_peak_above_start(step):
    """What the profiler's own memory events say: an independent count."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_the_peak_is_the_profilers_to_the_byte(backend, name):
    if name == "cnn":
        model, x = cnn(), torch.randn(8, 3, 32, 32)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)

        def step():
            image_step(model, optimizer, x)
    else:
        model = GPT(layers=4)
        ids = torch.randint(0, 1000, (4, 128))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            forward_and_backward(model, ids, ids)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    step()
    step()
    expected = profiled_peak_above_start(step)
    with xmem.measure(model=model, optimizer=optimizer) as m:
        step()
    assert m.source == "allocator"
    assert m.peak_above_static_bytes == expected


def test_the_breakdown_at_the_peak_is_exact(backend):
    model = GPT(layers=4)
    ids = torch.randint(0, 1000, (4, 128))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward_and_backward(model, ids, ids)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with xmem.measure(model=model, optimizer=optimizer, inputs=ids) as m:
        forward_and_backward(model, ids, ids)
        gradients = sum(p.grad.nbytes for p in model.parameters())
        optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    assert sum(m.by_category.values()) == m.peak_allocated_bytes
    assert m.by_category["parameter"] == weights
    assert m.by_category["input"] == ids.nbytes
    assert m.by_category["gradient"] <= gradients
    assert m.by_category["optimizer"] == sum(
        v.nbytes for s in optimizer.state.values() for v in s.values()
    )
    assert [p.name for p in m.timeline] == ["backward", "backward_end", "optimizer_end"]
    forward_end, backward_end, _ = m.timeline
    assert forward_end.allocated_bytes > m.static_bytes
    loss_bytes = 4
    assert backward_end.allocated_bytes == m.static_bytes + gradients + loss_bytes


def test_what_lived_before_and_belongs_to_nobody_is_other(backend):
    kept = torch.ones(1 << 20)
    model = nn.Linear(4, 4)
    with xmem.measure(model=model) as m:
        model(torch.ones(2, 4)).sum().backward()
    assert m.by_category["other"] >= kept.nbytes


def test_gradients_at_the_peak_are_told_from_scratch(backend):
    """Weights outweigh activations here, so the peak comes when backward ends."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    with xmem.measure(model=model) as m:
        model(torch.ones(2, 256)).sum().backward()
    last, first = (sum(p.grad.nbytes for p in model[i].parameters()) for i in (2, 0))
    assert last <= m.by_category["gradient"] <= last + first


def test_gradients_alive_at_entry_are_gradients(backend):
    model = nn.Linear(256, 256)
    model(torch.ones(2, 256)).sum().backward()
    with xmem.measure(model=model) as m:
        torch.ones(10)
    assert m.by_category["gradient"] == sum(p.grad.nbytes for p in model.parameters())


def test_the_limit_raises_the_frameworks_own_error(backend):
    before = allocated(backend)
    backend.measure.set_limit(before + (1 << 20))
    with pytest.raises(torch.OutOfMemoryError, match=r"CPU out of memory.*limit"):
        torch.empty(1 << 20)
    backend.measure.set_limit(None)
    assert torch.empty(1 << 20).nbytes == 4 << 20


def test_a_request_that_no_machine_can_serve_raises_and_counts(backend):
    refused = backend.measure.counters().out_of_memory_count
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8)
    assert backend.measure.counters().out_of_memory_count == refused + 1
    assert torch.ones(3).sum() == 3


def test_memory_from_elsewhere_is_reported_and_warned_about(backend):
    model = nn.Linear(64, 64)
    model.weight = nn.Parameter(torch.from_numpy(np.ones((64, 64), np.float32)))
    with (
        pytest.warns(xmem.XmemWarning, match="16384 bytes"),
        xmem.measure(model=model) as m,
    ):
        pass
    assert m.untracked_bytes == 64 * 64 * 4


def test_four_threads_leak_nothing(backend):
    before = allocated(backend)

    def work():
        for i in range(2000):
            torch.empty(3000 + i % 7 * 1000)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert allocated(backend) == before


def test_storages_may_grow_be_shared_and_be_freed_early(backend):
    before = allocated(backend)
    a = torch.ones(10)
    a.resize_(100_000)
    assert allocated(backend) - before == 400_000
    a.untyped_storage().resize_(0)
    assert allocated(backend) == before
    b = torch.ones(1000)
    b.share_memory_()
    c = torch.ones(1000).numpy().copy()
    del a, b, c
    assert allocated(backend) == before


def test_a_data_loader_with_workers_runs(backend):
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
    assert sum(batch[0].shape[0] for batch in loader) == 64


def test_everything_is_undone_after_the_block(backend):
    doors = torch.autograd.backward, torch.autograd.grad
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xmem.measure(model=model, optimizer=optimizer) as m:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert (torch.autograd.backward, torch.autograd.grad) == doors
    with pytest.raises(KeyError), xmem.measure(model=model, optimizer=optimizer):
        raise KeyError
    assert (torch.autograd.backward, torch.autograd.grad) == doors
    before = len(m.timeline)
    optimizer.step()
    assert len(m.timeline) == before


def test_a_measured_block_inside_another_is_refused(backend):
    with xmem.measure() as outer:
        x = torch.ones(1 << 18)
        with pytest.raises(xmem.MeasurementError, match="open already"), xmem.measure():
            pass
        del x
    assert outer.peak_above_static_bytes == 1 << 20
    with pytest.raises(xmem.MeasurementError, match="make a new one"), outer:
        pass
    with xmem.measure() as after:
        pass
    assert after.peak_above_static_bytes == 0


@pytest.mark.parametrize("breaking", ["counters", "reset_peak", "synchronize", "tag"])
def test_whatever_breaks_at_either_end_everything_is_undone(backend, breaking, monkeypatch):
    doors = torch.autograd.backward, torch.autograd.grad
    model = nn.Linear(4, 4)

    def broken(*_):
        raise OSError("mine")

    with monkeypatch.context() as patch:
        patch.setattr(backend.measure, breaking, broken)
        with pytest.raises(OSError, match="mine"), xmem.measure(model=model):
            pass
    assert (torch.autograd.backward, torch.autograd.grad) == doors
    if breaking != "reset_peak":  # which is not called at the end
        with (
            monkeypatch.context() as patch,
            pytest.raises(OSError, match="mine"),
            xmem.measure(model=model),
        ):
            patch.setattr(backend.measure, breaking, broken)
    assert (torch.autograd.backward, torch.autograd.grad) == doors
    with xmem.measure(model=model) as m:
        pass
    assert m.peak_above_static_bytes == 0


def test_sparse_gradients_and_lazy_parameters_are_measured(backend):
    model = nn.Sequential(nn.Embedding(1000, 16, sparse=True), nn.LazyLinear(4))
    ids = torch.randint(0, 1000, (8,))
    with xmem.measure(model=model, inputs=ids) as m:
        model(ids).sum().backward()
    gradient = model[0].weight.grad
    assert gradient.is_sparse
    assert m.by_category["parameter"] >= 1000 * 16 * 4 + 16 * 4 * 4
    assert m.by_category["gradient"] > 0
    assert sum(m.by_category.values()) == m.peak_allocated_bytes
    with xmem.measure(model=model, inputs=ids) as m:  # alive at entry
        pass
    expected = gradient._values().nbytes + gradient._indices().nbytes
    assert m.by_category["gradient"] >= expected


def test_a_users_own_error_in_backward_is_the_one_that_is_seen(backend):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            raise KeyError("the user's")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(KeyError, match="the user's"), xmem.measure():
        Broken.apply(x).sum().backward()


def test_a_model_without_parameters_warns(backend):
    model = nn.Linear(4, 4)
    with (
        pytest.warns(xmem.XmemWarning, match="no parameters"),
        xmem.measure(model=model.parameters()),
    ):
        pass


def test_a_negative_limit_is_refused(backend):
    with pytest.raises(xmem.UsageError, match="negative"):
        backend.measure.set_limit(-5)


def test_a_limit_may_be_text(backend):
    backend.measure.set_limit("64GiB")
    assert torch.ones(3).sum() == 3
    with pytest.raises(torch.OutOfMemoryError, match=str(64 * 2**30)):
        torch.empty(65 * 2**30, dtype=torch.uint8)


def test_the_breakdown_adds_up_when_threads_allocate_at_once(backend):
    """torch.jit.fork runs without the interpreter's lock: allocations really overlap."""

    @torch.jit.script
    def work(n: int):
        total = torch.zeros(1)
        for i in range(n):
            total = total + torch.ones(1000 + i % 7 * 1000).sum()
        return total

    @torch.jit.script
    def spread(n: int):
        tasks = [torch.jit.fork(work, n) for _ in range(4)]
        return [torch.jit.wait(t) for t in tasks]

    spread(2)
    for _ in range(100):
        backend.measure.reset_peak()
        spread(20)
        found = backend.measure.peak_by_category()
        assert sum(found.values()) == backend.measure.counters().peak_allocated_bytes


PROGRAM = """
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
optimizer = torch.optim.Adam(model.parameters(), fused=True)
x = torch.randn(512, 256)
def step():
    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
step(); step()
with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
    step()
print(m.static_bytes, m.peak_above_static_bytes, m.end_bytes, m.allocation_count)
"""

WITH_A_COMPILER = f"""
import torch, xmem
xmem.use("torch", device="cpu")
{PROGRAM}
assert m.source == "allocator", m.source
"""

WITHOUT_A_COMPILER = f"""
import os, warnings
os.environ["CXX"] = ""
os.environ["PATH"] = "/nowhere"
import torch, xmem
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    backend = xmem.use("torch", device="cpu")
assert any("profiler" in str(w.message) for w in caught), caught
{PROGRAM}
assert m.source == "profiler" and m.by_category is None, m.source
assert not m.timeline and "timeline" in backend.measure.gaps
assert backend.measure.counters().peak_allocated_bytes is None
try:
    backend.measure.set_limit(1)
except xmem.MeasurementError as error:
    assert "g++" in str(error)
else:
    raise AssertionError("a limit that is not enforced")
"""


def test_without_a_compiler_the_profiler_counts_the_same_bytes():
    found = []
    for code in (WITHOUT_A_COMPILER, WITH_A_COMPILER):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        found.append([int(n) for n in ran.stdout.split()])
    assert found[0] == found[1]
