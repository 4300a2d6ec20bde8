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


def test_measurements_nest(backend):
    with xmem.measure() as outer:
        x = torch.ones(1 << 18)
        with xmem.measure() as inner:
            y = torch.ones(1 << 18)
        del x, y
    assert inner.peak_above_static_bytes == 1 << 20
    # the inner block restarted the peak: the outer one sees what came after
    assert outer.static_bytes + (2 << 20) == inner.peak_allocated_bytes


WITHOUT_A_COMPILER = """
import os, warnings
os.environ["CXX"] = ""
os.environ["PATH"] = "/nowhere"
warnings.simplefilter("error")
import torch, xmem
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    backend = xmem.use("torch", device="cpu")
assert any("profiler" in str(w.message) for w in caught), caught
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
optimizer = torch.optim.Adam(model.parameters(), fused=True)
x = torch.randn(512, 256)
def step():
    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
step(); step()
with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
    step()
assert m.source == "profiler" and m.by_category is None, m.source
assert len(m.timeline) == 3
try:
    backend.measure.set_limit(1)
except xmem.MeasurementError as error:
    assert "g++" in str(error)
else:
    raise AssertionError("a limit that is not enforced")
print(m.static_bytes, m.peak_above_static_bytes, m.end_bytes)
"""


def test_without_a_compiler_the_profiler_counts_the_same_bytes():
    with_allocator = """
import torch, xmem
xmem.use("torch", device="cpu")
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
optimizer = torch.optim.Adam(model.parameters(), fused=True)
x = torch.randn(512, 256)
def step():
    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
step(); step()
with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
    step()
print(m.static_bytes, m.peak_above_static_bytes, m.end_bytes)
"""
    found = []
    for code in (WITHOUT_A_COMPILER, with_allocator):
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
