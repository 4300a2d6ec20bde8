"""Snapshots of a pool: bounded files whose totals are exact, in xmem's form and in PyTorch's."""

import json
import pickle
import pickletools
import re
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from fakes.pool import FakePool, check_viewers_way_back, make_history, make_segments
from hypothesis import given
from hypothesis import strategies as st

from xmem import memory_viz, snapshots
from xmem.errors import MeasurementError, ReportError, SchemaError, UsageError
from xmem.pooling import Block, Point, Segment

# What the unpickler in PyTorch's MemoryViz.js knows; anything else stops it.
OPCODES = """
APPEND APPENDS LIST TUPLE NEWFALSE NEWTRUE NONE BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST
FRAME LONG1 BINPUT LONG_BINGET MARK MEMOIZE PROTO SETITEMS SETITEM DICT SHORT_BINUNICODE BINUNICODE
STOP EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 BINFLOAT
"""


def busy_pool(*, blocks=300, segments=7, points=500):
    return FakePool(make_segments(blocks=blocks, segments=segments), make_history(points))


def sums(snapshot):
    """Add up what a snapshot says singly and in sums."""
    rests = [s.rest for s in snapshot.segments if s.rest]
    size = sum(s.size_bytes for s in snapshot.segments)
    if snapshot.other_segments:
        rests.append(snapshot.other_segments.rest)
        size += snapshot.other_segments.size_bytes
    single = [b for s in snapshot.segments for b in s.blocks]
    return {
        "size": size,
        "live": sum(b.size_bytes for b in single if b.requested_bytes)
        + sum(r.live_bytes for r in rests),
        "free": sum(b.size_bytes for b in single if not b.requested_bytes)
        + sum(r.free_bytes for r in rests),
        "requested": sum(b.requested_bytes for b in single) + sum(r.requested_bytes for r in rests),
        "blocks": len(single) + sum(r.live_count + r.free_count for r in rests),
    }


def test_a_pool_of_a_hundred_thousand_blocks_gives_files_below_two_megabytes(tmp_path):
    pool = FakePool(make_segments(blocks=100_000, segments=400), make_history(50_000))
    for name in ("pool.json", "pool.pickle"):
        path = snapshots.write(pool, tmp_path / name)
        assert path.stat().st_size < 2_000_000, (name, path.stat().st_size)


def test_a_pool_of_a_hundred_thousand_segments_gives_files_below_two_megabytes(tmp_path):
    pool = FakePool(make_segments(blocks=100_000, segments=100_000), make_history(50_000))
    for name in ("pool.json", "pool.pickle"):
        path = snapshots.write(pool, tmp_path / name)
        assert path.stat().st_size < 2_000_000, (name, path.stat().st_size)


def test_what_was_written_is_what_is_read(tmp_path):
    pool = busy_pool()
    path = tmp_path / "pool.json"
    written = snapshots.write_snapshot(pool, path, names={(1 << 44): "encoder.0.weight"})
    found = snapshots.read_snapshot(path)
    assert found == written
    assert found.block_count == 300
    assert found.segments[0].blocks[0].owner == "encoder.0.weight"
    assert found.stats.fragmentation == pool.stats().fragmentation
    assert found.settings == {"strategy": "bfc", "on_oom": "raise"}
    assert [p.name for p in tmp_path.iterdir()] == ["pool.json"]


def test_a_snapshot_is_valid_by_its_own_schema(tmp_path):
    pool = busy_pool()
    path = snapshots.write(pool, tmp_path / "pool.json")
    jsonschema.validate(json.loads(path.read_text()), snapshots.schema())


@given(
    blocks=st.integers(0, 60),
    segments=st.integers(1, 9),
    most_blocks=st.integers(0, 20),
    most_segments=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_the_bound_changes_no_total(blocks, segments, most_blocks, most_segments, seed):
    pool = FakePool(make_segments(blocks=blocks, segments=segments, seed=seed))
    everything = snapshots.take(pool)
    bounded = snapshots.take(pool, most_blocks=most_blocks, most_segments=most_segments)
    assert sums(bounded) == sums(everything)
    assert sums(everything)["blocks"] == blocks == bounded.block_count
    assert bounded.by_category == everything.by_category
    single = [b for s in bounded.segments for b in s.blocks]
    assert len(single) <= most_blocks
    assert len(bounded.segments) <= most_segments


def test_the_largest_blocks_are_those_written_singly():
    pool = busy_pool(segments=1)
    sizes = sorted((b.size_bytes for b in pool.segments()[0].blocks), reverse=True)
    written = snapshots.take(pool, most_blocks=10).segments[0].blocks
    assert sorted((b.size_bytes for b in written), reverse=True) == sizes[:10]


@given(count=st.integers(1, 400), most=st.integers(4, 60), seed=st.integers(0, 99))
def test_a_thinned_history_keeps_its_ends_and_its_peak_exactly(count, most, seed):
    points = make_history(count, seed=seed)
    thinned = snapshots.thin(points, most)
    assert len(thinned) <= max(most, 4)
    assert {points[0], points[-1], max(points, key=lambda p: p.allocated_bytes)} <= set(thinned)
    assert thinned == sorted(thinned, key=lambda p: p.event)
    assert set(thinned) <= set(points)


def test_the_peak_of_reserved_bytes_stays_too():
    points = [Point(n, 100, 100) for n in range(5000)]
    points[1234] = Point(1234, 100, 999)
    assert points[1234] in snapshots.thin(points, 50)


def test_every_spike_of_a_long_history_is_in_its_stretch():
    points = [Point(n, 10**9 if n % 1000 == 7 else 10**6, 2 * 10**9) for n in range(100_000)]
    kept = snapshots.thin(points, 2000)
    assert sum(p.allocated_bytes == 10**9 for p in kept) == 100


def test_another_version_says_so_and_what_to_do(tmp_path):
    path = snapshots.write(busy_pool(), tmp_path / "pool.json")
    changed = json.loads(path.read_text()) | {"schema_version": 99}
    path.write_text(json.dumps(changed))
    with pytest.raises(SchemaError, match=r"version 99; this xmem reads 1\. Take it again"):
        snapshots.read_snapshot(path)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 1}', "\x80\x04"])
def test_other_files_are_refused_by_name(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(SchemaError, match=r"other\.json"):
        snapshots.read_snapshot(path)


def test_a_field_of_the_wrong_type_is_refused_by_its_place(tmp_path):
    path = snapshots.write(busy_pool(), tmp_path / "pool.json")
    changed = json.loads(path.read_text())
    changed["stats"]["allocated_bytes"] = "much"
    path.write_text(json.dumps(changed))
    with pytest.raises(SchemaError, match=r"stats\.allocated_bytes"):
        snapshots.read_snapshot(path)


@pytest.mark.parametrize("name", ["pool", "pool.txt", "pool.pkl", "pool.json.gz"])
def test_another_suffix_is_refused_before_anything_is_asked(tmp_path, name):
    with pytest.raises(UsageError, match=r"\.json .* \.pickle"):
        snapshots.write(None, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        snapshots.write(busy_pool(), tmp_path / "none" / "pool.json")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = snapshots.write(busy_pool(), tmp_path / "pool.json")
    before = path.read_bytes()

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ReportError, match="No space left"):
        snapshots.write(busy_pool(blocks=3), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["pool.json"]


def test_a_file_that_cannot_be_read_is_an_error_by_name(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ReportError, match=re.escape(str(path))):
            snapshots.read_snapshot(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), OSError("framework says no")])
def test_a_framework_that_cannot_write_is_an_error_by_name_and_leaves_the_old(tmp_path, error):
    def dump(path):
        path.write_bytes(b"half")
        raise error

    path = tmp_path / "pool.pickle"
    path.write_bytes(b"old")
    with pytest.raises(ReportError, match=r"pool\.pickle: (No space left|framework says no)"):
        snapshots.write(SimpleNamespace(dump=dump), path)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


def test_what_a_pool_cannot_tell_is_said_in_the_file(tmp_path):
    pool = FakePool(gaps={"segments": "mallopt has no segments", "history": "nor a history"})
    path = snapshots.write(pool, tmp_path / "pool.json")
    found = snapshots.read_snapshot(path)
    assert found.gaps == pool.gaps
    assert found.segments == found.history == ()
    assert found.peak is None
    assert "mallopt has no segments" in snapshots.text(found)
    snapshots.write(pool, tmp_path / "pool.pickle")


def test_settings_that_json_cannot_hold_are_told_as_text():
    class Strategy:
        def __str__(self):
            return "bfc"

    pool = FakePool(settings_given={"strategy": Strategy(), "huge_pages": True})
    assert snapshots.take(pool).settings == {"strategy": "bfc", "huge_pages": True}


def test_the_text_has_totals_categories_owners_and_free_memory():
    segment = Segment(
        4096, 3072, (Block(4096, 2048, 2000, "activation", 5), Block(6144, 1024, 0, None, 0))
    )
    pool = FakePool((segment,))
    told = snapshots.text(snapshots.take(pool, names={4096: "layers.3"}))
    assert "layers.3" in told
    assert "activation" in told
    assert "1.95 KiB" in told
    assert "33%" in told


def heights(trace):
    """Return the height of the pile after each event, as the viewer adds it up."""
    height, found = 0, []
    for event in trace:
        height += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        found.append(height)
    return found


@given(
    blocks=st.integers(1, 60),
    segments=st.integers(1, 9),
    most_blocks=st.integers(1, 20),
    most_segments=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_the_viewers_segments_are_filled_and_their_totals_exact(
    blocks, segments, most_blocks, most_segments, seed
):
    pool = FakePool(make_segments(blocks=blocks, segments=segments, seed=seed))
    data = memory_viz.as_viewed(pool, most_blocks=most_blocks, most_segments=most_segments)
    for segment in data["segments"]:
        place = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == place
            place += block["size"]
        assert place == segment["address"] + segment["total_size"]
    stats = pool.stats()
    assert sum(s["total_size"] for s in data["segments"]) == stats.reserved_bytes
    assert sum(s["requested_size"] for s in data["segments"]) == stats.allocated_bytes
    assert heights(data["device_traces"][0])[-1] == stats.allocated_bytes
    spans = sorted((s["address"], s["address"] + s["total_size"]) for s in data["segments"])
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_live_blocks_come_in_the_order_they_were_made():
    pool = busy_pool()
    births = {b.address: b.birth for s in pool.segments() for b in s.blocks}
    trace = memory_viz.as_viewed(pool)["device_traces"][0]
    found = [births[e["addr"]] for e in trace if e["action"] == "alloc"]
    assert found == sorted(found)
    assert len(found) == sum(birth > 0 for birth in births.values())


def test_the_viewers_second_device_is_the_history_with_its_peak():
    points = make_history(300)
    trace = memory_viz.as_viewed(FakePool(history_given=points))["device_traces"][1]
    reached = heights(trace)
    assert max(reached) == max(p.allocated_bytes for p in points) == (1 << 40) + 1
    assert reached[-1] == points[-1].allocated_bytes
    assert {p.allocated_bytes for p in points} <= {0, *reached}


def test_the_viewer_stops_at_nothing(tmp_path):
    """Its unpickler knows few opcodes; any category asks for one event with "unknown"."""
    path = snapshots.write(busy_pool(), tmp_path / "pool.pickle", names={1 << 44: "a;b\nc"})
    content = path.read_bytes()
    assert {op.name for op, *_ in pickletools.genops(content)} <= set(OPCODES.split())
    assert content[:2] == b"\x80\x04"
    data = pickle.loads(content)
    categories = {e["category"] for t in data["device_traces"] for e in t if "category" in e}
    assert "unknown" in categories
    segment = data["device_traces"][1]
    begin, end = segment[0]["addr"], segment[0]["addr"] + segment[0]["size"]
    assert (segment[0]["action"], segment[-1]["action"]) == ("segment_alloc", "segment_free")
    assert all(begin <= e["addr"] <= e["addr"] + e["size"] <= end for e in segment)
    assert "a,b c" in {f["name"] for f in data["segments"][0]["blocks"][0]["frames"]} or (
        data["segments"][0]["blocks"][0]["state"] == "inactive"
    )


@pytest.mark.parametrize("most", [1, 10, 1000])
def test_the_viewer_finds_a_segment_for_every_block_at_every_event(most):
    pool = busy_pool(blocks=120, points=200)
    check_viewers_way_back(memory_viz.as_viewed(pool, most_blocks=most, most_segments=most))


def test_what_no_block_takes_is_free_for_the_viewer():
    segment = Segment(1024, 1024, (Block(1088, 64, 60, None, 1),))
    blocks = memory_viz.as_viewed(FakePool((segment,)))["segments"][0]["blocks"]
    assert [(b["size"], b["state"]) for b in blocks] == [
        (64, "inactive"),
        (64, "active_allocated"),
        (896, "inactive"),
    ]


def test_blocks_that_overlap_are_a_bug_of_the_backend():
    segment = Segment(0, 1024, (Block(0, 512, 500, None, 1), Block(256, 512, 500, None, 2)))
    with pytest.raises(MeasurementError, match="overlap"):
        memory_viz.as_viewed(FakePool((segment,)))


def test_a_framework_that_writes_the_file_itself_is_asked_first(tmp_path):
    class Own(FakePool):
        def dump(self, path):
            Path(path).write_bytes(b"its own")
            return True

    class Not(FakePool):
        def dump(self, path):
            return False

    assert snapshots.write(Own(), tmp_path / "a.pickle").read_bytes() == b"its own"
    assert (
        pickle.loads(snapshots.write(Not(), tmp_path / "b.pickle").read_bytes())["segments"] == []
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pickle", "b.pickle"]


def test_a_large_pool_is_written_in_seconds(tmp_path):
    pool = FakePool(make_segments(blocks=100_000, segments=400), make_history(50_000))
    started = time.process_time()
    snapshots.write(pool, tmp_path / "pool.json")
    # 1 s where it was written; it must not take a minute in the middle of an error.
    assert time.process_time() - started < 10
