"""`xmem.pool` without a framework: what is checked before a backend is asked."""

import ctypes
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import xmem
from xmem import api, meter
from xmem.errors import CapabilityError, MeasurementError, OffloadError, UsageError, XmemWarning
from xmem.offload.adaptive import SETTINGS as PLACES
from xmem.offload.adaptive import Adaptive, wanted_bytes
from xmem.pooling import PoolStats, Setting
from xmem.sizes import parse_size

EMPTY = PoolStats(0, 0, 0, 0, None, 0, 0, 0, 0, 0, None)


SETTINGS = {"segment_size": Setting("segment_size", parse_size, "bytes of a segment")}
ELSEWHERE = {"expandable_segments": "PyTorch on CUDA"}


@dataclass
class FakePool:
    """Remembers what it was told."""

    told: list = field(default_factory=list)
    state: PoolStats = EMPTY
    settings: dict = field(default_factory=lambda: dict(SETTINGS))
    elsewhere: dict = field(default_factory=lambda: dict(ELSEWHERE))
    gaps: dict = field(default_factory=dict)

    def in_force(self):
        return {"on_oom": "raise", "told": tuple(self.told)}

    def configure(self, values, on_oom):
        self.told.append((dict(values), on_oom))

    def set_limit(self, limit):
        self.told.append(limit)

    def stats(self):
        return self.state

    def trim(self):
        self.told.append("trim")
        return 7

    def reset_peak(self):
        self.told.append("reset")

    def preallocate(self, size):
        self.told.append(size)
        return size


@pytest.fixture
def fake(monkeypatch):
    pool = FakePool()
    measure = SimpleNamespace(synchronize=lambda: pool.told.append("sync"))
    monkeypatch.setattr(api, "_active", SimpleNamespace(pool=pool, measure=measure))
    return pool


def test_values_are_parsed_before_the_backend_sees_them(fake):
    xmem.pool.configure(limit="1GiB", segment_size="2MiB", on_oom="trim_and_retry")
    assert fake.told == [({"segment_size": 2 << 20}, "trim_and_retry"), 1 << 30]


def test_a_limit_alone_leaves_the_settings_alone_and_none_takes_it_away(fake):
    xmem.pool.configure(limit=5)
    xmem.pool.configure(limit=None)
    assert fake.told == [5, None]


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({}, UsageError, "segment_size"),
        ({"limit": "much"}, UsageError, "much"),
        ({"limit": 1, "on_oom": "hope"}, UsageError, "trim_and_retry"),
        ({"limit": 1, "segment_sise": 1}, UsageError, "Did you mean 'segment_size'"),
        ({"limit": 1, "segment_size": "x"}, UsageError, "'x' is not a size"),
        ({"limit": 1, "expandable_segments": True}, CapabilityError, "PyTorch on CUDA"),
    ],
)
def test_wrong_values_are_refused_before_anything_changes(fake, values, error, words):
    with pytest.raises(error, match=words):
        xmem.pool.configure(**values)
    assert fake.told == []


def test_a_limit_that_cannot_be_had_changes_nothing_else(fake):
    fake.gaps["limit"] = "nothing here can refuse"
    with pytest.raises(CapabilityError, match=r"limit='1GiB'.*nothing here can refuse"):
        xmem.pool.configure(limit="1GiB", segment_size=1)
    assert fake.told == []
    xmem.pool.configure(limit=None, segment_size=1)
    assert fake.told == [({"segment_size": 1}, None), None]


def test_fragmentation_is_the_share_that_nobody_asked_for():
    assert replace(EMPTY, allocated_bytes=25, reserved_bytes=100).fragmentation == 0.75
    assert EMPTY.fragmentation == 0.0
    assert replace(EMPTY, reserved_bytes=None).fragmentation is None


def test_the_limit_is_read_and_not_set(fake):
    fake.state = replace(EMPTY, limit_bytes=9)
    assert xmem.pool.limit == 9
    with pytest.raises(AttributeError):
        xmem.pool.limit = 10


def test_a_peak_that_is_being_measured_is_not_reset(fake, monkeypatch):
    xmem.pool.reset_peak()
    monkeypatch.setattr(meter, "_open", object())
    with pytest.raises(MeasurementError, match="there is one peak"):
        xmem.pool.reset_peak()
    assert fake.told == ["reset"]


def test_preallocating_takes_sizes_and_refuses_nothing(fake):
    assert xmem.pool.preallocate("1KiB") == 1024
    with pytest.raises(UsageError, match="preallocate"):
        xmem.pool.preallocate(0)
    assert fake.told == [1024]


def test_warming_up_waits_for_each_step_and_tells_first_and_last(fake):
    def step():
        fake.told.append("step")
        fake.state = replace(fake.state, allocated_bytes=fake.state.allocated_bytes + 1)

    warm = xmem.pool.warm_up(step, steps=3)
    assert fake.told == ["sync", "step", "sync", "step", "sync", "step", "sync"]
    assert (warm.before.allocated_bytes, warm.after.allocated_bytes, warm.steps) == (0, 3, 3)


@pytest.mark.parametrize(("step", "steps"), [(None, 2), (print, 1), (print, 2.0), (print, True)])
def test_warming_up_needs_a_function_and_two_steps(fake, step, steps):
    with pytest.raises(UsageError):
        xmem.pool.warm_up(step, steps=steps)
    assert fake.told == []


def test_without_a_backend_it_says_what_to_call(monkeypatch):
    monkeypatch.setattr(api, "_active", None)
    with pytest.raises(xmem.NoActiveBackendError, match=r"xmem\.use"):
        xmem.pool.stats()


def test_moving_without_a_limit_warns_and_with_one_does_not(fake, monkeypatch, recwarn):
    monkeypatch.setattr(fake, "in_force", lambda: {"on_oom": "offload"})
    with pytest.warns(XmemWarning, match="without a limit"):
        xmem.pool.configure(on_oom="offload")
    fake.state = replace(EMPTY, limit_bytes=5)
    xmem.pool.configure(limit=5, on_oom="offload")
    assert fake.told == [({}, "offload"), ({}, "offload"), 5]
    assert not [w for w in recwarn if issubclass(w.category, XmemWarning)]


def test_what_must_be_free_is_exact_and_a_margin_is_better():
    assert wanted_bytes(100, 6400, 6450) == (50, 50 + 6450 // 64)
    assert wanted_bytes(40, 6400, 6450) == (0, 6450 // 64)
    assert wanted_bytes(640, 6400, None) == (640, 650)


def test_where_tensors_go_is_checked_before_anything_changes(tmp_path):
    adaptive = Adaptive()
    for values, words in (
        ({"offload_to": "host"}, "no effect"),
        ({"offload_directory": str(tmp_path)}, "no effect"),
    ):
        with pytest.raises(UsageError, match=words):
            adaptive.prepare(values, on=False)
    with pytest.raises(UsageError, match="it is 'host'"):
        adaptive.prepare({"offload_to": "host", "offload_directory": str(tmp_path)}, on=True)
    with pytest.raises(OffloadError):
        adaptive.prepare({"offload_directory": str(tmp_path / "missing")}, on=True)
    assert adaptive.away is None
    assert adaptive.settings == {"offload_to": "disk", "offload_directory": None}


def test_what_was_moved_is_counted_over_all_depots_and_settings_can_be_put_back(tmp_path):
    adaptive = Adaptive()
    piece = ctypes.create_string_buffer(5000)
    before = adaptive.settings

    def put(values, count):
        adaptive.put_in_force(**adaptive.prepare(values, on=True))
        for number in range(count):
            adaptive.away.depot.put(number, ctypes.addressof(piece), 5000)

    put({"offload_directory": str(tmp_path)}, 2)
    first = adaptive.away
    put({}, 1)
    assert adaptive.away is first
    put({"offload_to": "host"}, 3)
    assert adaptive.away is not first
    assert adaptive.settings == {"offload_to": "host", "offload_directory": None}
    assert adaptive.moved_bytes == 6 * 5000
    adaptive.put_in_force(**adaptive.prepare(before, on=False))
    assert adaptive.away is None
    assert adaptive.moved_bytes == 6 * 5000
    assert adaptive.settings == before


@pytest.mark.parametrize(
    ("name", "value"), [("offload_to", "tape"), ("offload_to", None), ("offload_directory", 5)]
)
def test_values_that_are_no_place_are_refused(name, value):
    with pytest.raises(UsageError, match=name):
        PLACES[name].parse(value)
    assert PLACES["offload_directory"].parse(Path("x")) == "x"


def test_moving_to_the_hosts_memory_is_warned_of_on_a_cpu(fake, monkeypatch):
    fake.state = replace(EMPTY, limit_bytes=5)
    fake.settings.update(PLACES)
    monkeypatch.setattr(fake, "in_force", lambda: {"on_oom": "offload"})
    with pytest.warns(XmemWarning, match="the process keeps it"):
        xmem.pool.configure(on_oom="offload", offload_to="host")
