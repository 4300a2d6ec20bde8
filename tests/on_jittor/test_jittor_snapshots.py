"""Snapshots of Jittor's pool: totals exact, names and categories of what is claimed."""

import pickle

from chain import chain, normal, through, trained
from fakes.pool import check_viewers_way_back

from xmem import snapshots


def test_a_snapshot_adds_up_and_knows_what_the_model_owns(backend, tmp_path):
    import jittor as jt

    net = chain(3, 64)
    optimizer = jt.optim.Adam(trained(net), 1e-3)
    x = normal(256, 64)
    backend.measure.reset_peak()
    for _ in range(2):
        optimizer.step((through(net, x) ** 2).mean())
        jt.sync_all(True)
    names = snapshots.claim(backend, net, optimizer)
    path = snapshots.write(backend.pool, tmp_path / "pool.json", names=names)
    snapshot = snapshots.read_snapshot(path)
    stats = backend.pool.stats()
    assert snapshot.backend == "jittor"
    assert sum(snapshot.by_category.values()) == stats.allocated_bytes
    assert sum(s.size_bytes for s in snapshot.segments) == stats.reserved_bytes
    assert snapshot.peak.allocated_bytes == stats.peak_allocated_bytes
    assert snapshot.by_category["parameter"] == sum(4 * p.numel() for p in trained(net))
    assert snapshot.by_category["optimizer"] == 2 * snapshot.by_category["parameter"]
    owners = {b.owner for s in snapshot.segments for b in s.blocks if b.owner}
    assert any("optimizer state of" in owner for owner in owners), owners


def test_the_viewers_file_has_the_same_totals(backend, tmp_path):
    x = normal(1024, 256)
    x.sync()
    data = pickle.loads(snapshots.write(backend.pool, tmp_path / "pool.pickle").read_bytes())
    stats = backend.pool.stats()
    assert sum(s["total_size"] for s in data["segments"]) == stats.reserved_bytes
    assert sum(s["requested_size"] for s in data["segments"]) == stats.allocated_bytes
    check_viewers_way_back(data)
