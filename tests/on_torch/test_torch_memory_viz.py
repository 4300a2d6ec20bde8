"""PyTorch's own memory tools read xmem's pickle."""

import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.cuda._memory_viz as viz
from fakes.pool import FakePool, check_viewers_way_back, make_history, make_segments
from torch import nn

from xmem import memory_viz, snapshots


def drawn_pool():
    return FakePool(make_segments(blocks=400, segments=6), make_history(300))


def flames(lines):
    """Stand in for flamegraph.pl, which is fetched from the network: add up its input."""
    return sum(int(line.rsplit(" ", 1)[1]) for line in lines.splitlines())


def test_its_summary_adds_up_to_the_pools_bytes():
    pool = drawn_pool()
    told = viz.segsum(memory_viz.as_viewed(pool))
    stats = pool.stats()
    assert "segments: 6" in told
    assert f"total_reserved: {viz.Bytes(stats.reserved_bytes)}" in told
    assert f"total_allocated: {viz.Bytes(stats.allocated_bytes)}" in told


def test_its_flame_graphs_cover_every_reserved_byte_and_name_owners():
    pool = drawn_pool()
    first = next(b for s in pool.segments() for b in s.blocks if b.requested_bytes)
    data = memory_viz.as_viewed(pool, names={first.address: "encoder.0.weight; bias"})
    assert viz.memory(data, flames) == viz.segments(data, flames) == pool.stats().reserved_bytes
    lines = viz.memory(data, lambda text: text)
    assert "category:0:activation" in lines
    assert ";owner:0:encoder.0.weight, bias " in lines


def test_its_trace_lists_every_live_block_and_the_history():
    pool = drawn_pool()
    told = viz.trace(memory_viz.as_viewed(pool))
    live = sum(b.requested_bytes > 0 for s in pool.segments() for b in s.blocks)
    first, second = told.split("Device 1 ---")
    assert len(re.findall(r"^\S+ = (?:seg_\d|MEM)\[", first, re.MULTILINE)) == live
    assert "cudaMalloc" in second


@pytest.mark.parametrize("plot", ["trace", "cached", "freed", "segments"])
def test_its_pages_are_made(plot):
    data = memory_viz.as_viewed(drawn_pool())
    page = {
        "trace": lambda: viz.trace_plot(data),
        "cached": lambda: viz.trace_plot(data, plot_segments=True),
        "freed": lambda: viz.trace_plot(data, filter_freed=True),
        "segments": lambda: viz.segment_plot(data),
    }[plot]()
    assert "MemoryViz.js" in page


@pytest.mark.parametrize("verb", ["stats", "trace", "trace_plot", "segment_plot"])
def test_its_command_line_reads_the_file(tmp_path, verb):
    path = snapshots.write(drawn_pool(), tmp_path / "pool.pickle")
    output = [] if verb in ("stats", "trace") else ["-o", str(tmp_path / "page.html")]
    # by its path, as PyTorch's documentation does: imports nothing of torch
    ran = subprocess.run(
        [sys.executable, viz.__file__, verb, *output, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_it_has_the_keys_of_pytorchs_own_snapshot():
    """`torch.cuda.memory._snapshot` documents them; the types there are all that 2.13 says."""
    documented = torch.cuda.memory._snapshot.__doc__
    data = memory_viz.as_viewed(drawn_pool())
    segment = data["segments"][0]
    block = segment["blocks"][0]
    for found, name in ((segment, "Segment"), (block, "Block")):
        body = re.search(rf"class {name}\(TypedDict\):(.*?)\n\n", documented, re.DOTALL)[1]
        keys = re.findall(r"^ +(\w+): (?:int|List|Literal|Tuple|str)", body, re.MULTILINE)
        assert keys
        assert set(keys) <= set(found), (name, keys)
    states = {b["state"] for s in data["segments"] for b in s["blocks"]}
    assert states == {"active_allocated", "inactive"}


def test_a_real_pool_adds_up_in_its_summary(backend, tmp_path):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(128, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    path = snapshots.write(backend.pool, tmp_path / "pool.pickle")
    data = pickle.loads(path.read_bytes())
    stats = backend.pool.stats()
    check_viewers_way_back(data)
    told = viz.segsum(data)
    assert f"total_reserved: {viz.Bytes(stats.reserved_bytes)}" in told
    assert sum(s["requested_size"] for s in data["segments"]) == stats.allocated_bytes
    snapshot = snapshots.read_snapshot(snapshots.write(backend.pool, tmp_path / "pool.json"))
    assert snapshot.backend == "torch"
    assert sum(snapshot.by_category.values()) == stats.allocated_bytes
    assert snapshot.peak is not None
    assert snapshot.peak.allocated_bytes == stats.peak_allocated_bytes


def test_what_is_claimed_has_names_and_categories_in_a_real_snapshot(backend):
    model = nn.Linear(64, 32)
    names = snapshots.claim(backend, model, None)
    snapshot = snapshots.take(backend.pool, names=names, most_blocks=10**6)
    found = {b.owner: b for s in snapshot.segments for b in s.blocks if b.owner}
    assert found["weight"].category == "parameter"
    assert found["weight"].requested_bytes == model.weight.nbytes
    assert snapshot.by_category["parameter"] >= model.weight.nbytes + model.bias.nbytes
