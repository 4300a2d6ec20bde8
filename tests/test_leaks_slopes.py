"""Growth that goes on is told from caches, spikes, noise and sawteeth."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmem.slopes import WINDOWS, Series, judge


def first_trend(values):
    """Return the number of the sample that made it sure, and the trend; or None."""
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
        trend = series.trend()
        if trend is not None:
            return step, trend
    return None


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**9), st.integers(1, 10**7))
def test_a_steady_leak_is_sure_after_14_samples(start, per_step):
    step, trend = first_trend([start + per_step * i for i in range(30)])
    assert step == WINDOWS - 1
    assert trend.per_step == pytest.approx(per_step)
    assert trend.since_step == 0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=7), st.integers(0, 10**6))
def test_what_repeats_is_no_leak(period, start):
    assert first_trend([start + period[i % len(period)] for i in range(400)]) is None


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 12), st.integers(1, 1000))
def test_growth_that_stops_within_12_samples_is_no_leak(stops, per_step):
    assert first_trend([per_step * min(i, stops) for i in range(300)]) is None


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 150))
def test_a_cache_that_saturates_is_no_leak(time_constant):
    values = [1e9 * (1 - math.exp(-i / time_constant)) for i in range(8 * time_constant)]
    assert first_trend(values) is None


def test_keys_that_become_rare_are_no_leak():
    alarms = 0
    for seed in range(100):
        generator = random.Random(seed)
        known = set(generator.choices(range(40), k=10))  # in the warm-up of a watch
        values = []
        for _ in range(400):
            known.update(generator.choices(range(40), k=2))
            values.append(len(known))
        alarms += first_trend(values) is not None
    assert alarms <= 2  # new keys in a dozen steps in a row look like a leak, to anybody


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32))
def test_noise_is_no_leak(seed):
    generator = random.Random(seed)
    assert first_trend([generator.randrange(10**6) for _ in range(600)]) is None


def test_a_sawtooth_that_collections_cut_is_no_leak():
    assert first_trend([1000 * (i % 9) for i in range(2000)]) is None


def test_two_spikes_do_not_hide_a_leak():
    values = [10 * i + (500 if i in (4, 9) else 0) for i in range(20)]
    step, trend = first_trend(values)
    assert step == WINDOWS - 1
    assert trend.per_step == 10


@pytest.mark.parametrize("every", [2, 3, 10])
def test_a_leak_every_few_steps_is_found_later(every):
    step, trend = first_trend([64 * (i // every) for i in range(1000)])
    assert step < 60 * every
    assert trend.per_step == pytest.approx(64 / every, rel=0.2)


def test_a_leak_under_noise_is_found_in_the_end():
    generator = random.Random(3)
    values = [200 * i + generator.randrange(5000) for i in range(2000)]
    step, trend = first_trend(values)
    assert 14 < step < 1000
    assert trend.window >= 8
    assert trend.per_step == pytest.approx(200, rel=0.3)


def test_a_leak_that_begins_late_is_found_14_samples_later():
    values = [100] * 50 + [100 + 7 * i for i in range(1, 30)]
    step, trend = first_trend(values)
    assert 50 + 10 <= step < 50 + WINDOWS
    assert trend.since_step == 49


def test_too_few_windows_are_no_evidence():
    assert judge([(i, i) for i in range(WINDOWS - 1)], 1) is None
    assert judge([(i, i) for i in range(WINDOWS)], 1) is not None


def test_a_series_is_bounded_in_memory():
    series = Series()
    for step in range(20_000):
        series.add(step, step % 3)
    assert sum(len(level) for level in series._levels) <= WINDOWS * 15


def test_five_equal_rises_are_suspicious_and_four_are_not():
    series = Series()
    for step in range(4):
        series.add(step, step)
    assert not series.rising()
    series.add(4, 4)
    assert series.rising()


def test_growth_that_slows_down_in_wide_windows_is_no_leak():
    def line(later):
        return [(8 * i, 8.0 * min(i, 7) + later * max(i - 7, 0)) for i in range(WINDOWS)]

    assert judge(line(8.0), 8) is not None
    assert judge(line(6.2), 8) is None
