"""xmem.find_batch_size in one process, without a framework."""

import copy
import functools
import logging
import pickle

import pytest
from fitting import BY_ITEM, STATES, STATIC, fitting, peak_of, plain, raise_above

import xmem
from xmem.batch_records import BatchSize
from xmem.batch_search import Space
from xmem.batch_size import Finder, find_batch_size
from xmem.batch_trials import Outcome
from xmem.errors import CapabilityError, InfeasibleBudgetError, MeasurementError, UsageError

__all__ = ["fitting"]

find = functools.partial(find_batch_size, isolate=False, margin=0)


@pytest.mark.parametrize("size", [1, 2, 17, 1000])
def test_the_size_found_is_the_last_that_fits(fitting, size):
    for budget in (peak_of(size), peak_of(size) + 999):
        found = find(plain, budget=budget)
        assert found == size
        assert found.peak_bytes == peak_of(size)
        assert found.limited_by == "budget"
        assert {t.size: t.how for t in found.tries}.items() >= {
            size: "verified", size + 1: "refused"
        }.items()  # fmt: skip
        assert fitting.MEASURE.allocated == 0
        assert fitting.MEASURE.limit is None


def test_the_margin_is_held_back_of_the_budget(fitting):
    found = find_batch_size(plain, budget=peak_of(100), margin=0.1, isolate=False)
    assert found.budget_bytes == peak_of(100)
    assert found.limit_bytes == int(peak_of(100) * 0.9)
    assert found.peak_bytes <= found.limit_bytes < found.peak_bytes + BY_ITEM
    assert find_batch_size(plain, budget=peak_of(100), isolate=False).limit_bytes == int(
        peak_of(100) * 0.98
    )


def test_every_step_counts_and_states_are_there_in_the_last_one(fitting, tmp_path):
    log = tmp_path / "log"
    found = find(functools.partial(plain, log=log), budget=peak_of(20))
    sizes = [int(line.split()[0]) for line in log.read_text().splitlines()]
    assert len(sizes) == found.full_steps
    # The second step finds as many bytes as it leaves; without states there was one more to make.
    assert [t.steps for t in found.tries if t.fits] == [2] * sum(t.fits for t in found.tries)


def test_a_model_that_is_trained_already_takes_one_step_a_try(fitting):
    import xmem_fitting

    model = xmem_fitting.Holding(STATIC + STATES)
    found = find(lambda size: lambda: xmem_fitting.Holding(BY_ITEM * size), budget=peak_of(9))
    assert found == 9
    assert all(t.steps == 1 for t in found.tries if t.fits)
    found = find(
        lambda size: lambda: xmem_fitting.Holding(BY_ITEM * size), budget=peak_of(9), steps=3
    )
    assert all(t.steps == 3 for t in found.tries if t.fits)
    del model


def test_a_step_for_inference_is_run_without_gradients(fitting):
    assert find(plain, budget=peak_of(5), for_inference=True) == 5
    assert fitting.TRAINING.without_gradients >= 4
    before = fitting.TRAINING.without_gradients
    find(plain, budget=peak_of(5))
    assert fitting.TRAINING.without_gradients == before


def test_the_maximum_is_tried_and_named(fitting):
    found = find(plain, budget=peak_of(50), maximum=30, multiple_of=4)
    assert (found, found.limited_by) == (28, "maximum")
    assert all(t.fits for t in found.tries)


def test_a_minimum_that_does_not_fit_is_measured_and_told(fitting):
    with pytest.raises(InfeasibleBudgetError, match="apply_checkpointing") as caught:
        find(plain, budget=peak_of(3), minimum=4)
    assert caught.value.budget_bytes == peak_of(3)
    assert caught.value.minimum_bytes == peak_of(4)
    assert "batch size 4, the minimum" in str(caught.value)
    with pytest.raises(InfeasibleBudgetError, match=r"before the step.*quantize_optimizer"):
        find(plain, budget=STATIC + STATES)
    assert fitting.MEASURE.allocated == 0


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("survived", [False, True])
def test_a_bug_is_raised_as_it_is_with_the_size(fitting, caplog, isolate, survived):
    """Also where a request was refused before it, and the step lived with that."""
    on_step = functools.partial(raise_above, 3, survived=survived)
    make = functools.partial(plain, on_step=on_step)
    with pytest.raises(KeyError, match="no such item") as caught:
        find(make, budget=peak_of(20), isolate=isolate)
    assert fitting.MEASURE.limit is None
    size = caught.value.args[0].split()[-1]
    assert f"batch size {size}" in caught.value.__notes__[0]
    assert f"batch size {size} failed: KeyError" in caplog.text


def test_an_error_that_lack_of_memory_led_to_is_a_size_that_does_not_fit(fitting):
    def make(size):
        inner = plain(size)

        def step():
            try:
                return inner()
            except RuntimeError:
                raise LookupError("a library's own") from None

        return step

    assert find(make, budget=peak_of(7)) == 7


def test_a_minimum_beyond_the_machine_is_not_run_without_any_limit(fitting, monkeypatch):
    """The system would end this process."""
    from xmem import batch_size

    monkeypatch.setattr(batch_size, "available_bytes", lambda backend: peak_of(5000))
    with pytest.raises(InfeasibleBudgetError, match="more than there is") as caught:
        find(plain, budget=peak_of(3), minimum=10_000)
    assert caught.value.minimum_bytes is None


def test_a_refusal_that_the_step_caught_and_lived_with_fits(fitting):
    """Libraries try a faster way that needs more, and take another one."""

    def make(size):
        inner = plain(size)

        def step():
            with pytest.raises(RuntimeError):
                fitting.MEASURE.take(10**9)
            return inner()

        return step

    assert find(make, budget=peak_of(7)) == 7


def test_a_peak_that_nothing_refused_does_not_fit(fitting, monkeypatch):
    """As with memory that spills to the host."""
    monkeypatch.setattr(fitting.MEASURE, "set_limit", lambda limit_bytes: None)
    found = find(plain, budget=peak_of(7))
    assert found == 7
    assert "nothing refused" in found.tries[-1].reason + found.tries[-2].reason


def test_each_try_is_logged_and_told(fitting, caplog):
    told = []
    with caplog.at_level(logging.INFO, logger="xmem"):
        found = find(plain, budget=peak_of(20), on_try=told.append)
    assert tuple(told) == found.tries
    for made in found.tries:
        assert str(made) in caplog.text
    assert repr(found) in caplog.text


def test_a_batch_size_is_an_int_that_is_not_changed(fitting):
    found = find(plain, budget=peak_of(20))
    assert isinstance(found, int)
    assert (int(found), f"{found}", str(found), list(range(found))[-1]) == (20, "20", "20", 19)
    assert found.size == 20
    assert "peak" in repr(found)
    for twin in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert isinstance(twin, BatchSize)
        assert (twin, twin.tries, twin.peak_bytes) == (found, found.tries, found.peak_bytes)
    with pytest.raises(AttributeError, match="not changed"):
        found.size = 21


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": None}, "on a CPU"),
        ({"budget": "lots"}, "'lots' is not a size"),
        ({"budget": 0}, "budget=0"),
        ({"margin": 1.0}, r"margin=1\.0"),
        ({"margin": -0.1}, r"margin=-0\.1"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"margin": "0.1"}, "margin='0.1'"),
        ({"time_limit": "60"}, "time_limit='60'"),
        ({"time_limit": float("nan")}, "time_limit=nan"),
        ({"steps": 0}, "steps=0"),
        ({"minimum": 5, "maximum": 4}, "between minimum=5 and maximum=4"),
        ({"make_step": 3}, "make_step=3"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(fitting, wrong, message):
    make = wrong.pop("make_step", pytest.fail)
    with pytest.raises(UsageError, match=message):
        find(make, **{"budget": 10**6, **wrong})


def test_a_backend_without_limits_is_named(fitting, monkeypatch):
    monkeypatch.setattr(fitting.MEASURE, "gaps", {"limit": "it only watches"})
    with pytest.raises(CapabilityError, match="it only watches"):
        find(plain, budget=10**6)


class Clock:
    """Time that passes in tries only."""

    def __init__(self, seconds_per_try, ends=()):
        self.now = 0.0
        self.seconds_per_try = seconds_per_try
        self.ends = dict(ends)
        self.asked = []

    def __call__(self):
        return self.now

    def attempt(self, asked):
        self.asked.append(asked)
        peak = peak_of(asked.size)
        fits = asked.limit_bytes is None or peak <= asked.limit_bytes
        ended = self.ends.get(asked.size, "completed" if fits else "refused")
        late = asked.seconds is not None and asked.seconds < self.seconds_per_try
        self.now += min(self.seconds_per_try, asked.seconds) if late else self.seconds_per_try
        done = ended == "completed" and not late
        return Outcome(
            ended="late" if late else ended,
            peak_bytes=peak if done else None,
            static_bytes=STATIC + STATES if done else None,
            left_bytes=0,
            steps=2,
            seconds=self.seconds_per_try,
            reason="",
        )


def finder(clock, size, deadline=None):
    return Finder(
        trials=clock,
        space=Space.of(1, None, 1),
        budget_bytes=peak_of(size),
        limit_bytes=peak_of(size),
        deadline=deadline,
        clock=clock,
    )


def test_when_time_is_up_the_best_size_so_far_is_returned_and_says_so():
    for deadline in (15.0, 20.0, 25.0):
        clock = Clock(10.0)
        found = finder(clock, 5000, deadline).find()
        assert found.limited_by == "time"
        assert found == max(t.size for t in found.tries if t.fits)
        assert clock.now <= deadline
        assert clock.asked[0].seconds == deadline
    assert finder(Clock(10.0), 5000, 1000.0).find() == 5000


def test_no_size_in_time_is_an_error():
    with pytest.raises(MeasurementError, match="time was up before any"):
        finder(Clock(10.0), 5000, 5.0).find()


def test_a_size_whose_process_died_does_not_fit():
    found = finder(Clock(1.0, dict.fromkeys(range(12, 100), "died")), 20).find()
    assert (found, found.limited_by) == (11, "budget")


def test_a_crash_at_the_minimum_without_a_limit_is_no_question_of_budget():
    with pytest.raises(MeasurementError, match="crashes at the minimum"):
        finder(Clock(1.0, {1: "died", 2: "died"}), 20).find()


def test_an_open_measured_block_is_refused(fitting, monkeypatch):
    from xmem import meter

    monkeypatch.setattr(meter, "_open", object())
    with pytest.raises(MeasurementError, match=r"xmem\.measure is open"):
        find(plain, budget=10**6)
    assert xmem.active().name == "fitting"
