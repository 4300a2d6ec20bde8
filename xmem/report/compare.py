"""What a report's results say about each other: pure functions, nothing rendered.

A technique is held against the same backend's baseline, a backend against another backend with
the same workload. What cannot be compared stays None.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from xmem.conformance.techniques import known_technique
from xmem.report.model import Case, Report, Result

BASELINE = "baseline"
FRAMEWORK_LOSS_TOLERANCE = 1e-4
"""How far baseline losses of two frameworks may be apart, relative: both compute in float32 and
sum in different orders."""

LONG_RUN_LOSS_TOLERANCE = 2e-2
"""How far the ends of long loss curves may be apart, relative: the mean of their last tenth. Single
steps of a long training drift apart by rounding alone."""

STEADY_TIME_SPREAD = 0.3
"""Beyond this the machine had other work to do, and a time ratio says little."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class TechniqueComparison:
    """One result beside its baseline.

    Attributes:
        result: the result.
        baseline: the baseline of the same backend, workload and settings, if it ended well; None
            for a baseline itself. It is always of one process, with the whole batch.
        peak_saving_bytes: how much lower the peak is than the baseline's; negative if higher. All
            savings are None where losses differ by more than the tolerance.
        peak_saving_factor: the baseline's peak over this one.
        above_static_saving_bytes: the same for what a step adds to static bytes.
        above_static_saving_factor: the same for what a step adds to static bytes.
        time_ratio: step time over the baseline's; above 1 is slower.
        loss_difference: the largest relative difference over all steps, of a long training at its
            end; NaN where one of the two is not finite.
        loss_tolerance: what the technique may differ by, or None if it is unknown here.
        losses_agree: whether the difference is within the tolerance.
        repeatable: whether every measured step had the same peak.
    """

    result: Result
    baseline: Result | None
    peak_saving_bytes: int | None
    peak_saving_factor: float | None
    above_static_saving_bytes: int | None
    above_static_saving_factor: float | None
    time_ratio: float | None
    loss_difference: float | None
    loss_tolerance: float | None
    losses_agree: bool | None
    repeatable: bool | None


@dataclass(frozen=True)
class FrameworkComparison:
    """The baselines of two backends on one workload.

    Attributes:
        first: one backend's baseline.
        second: the other's.
        loss_difference: the largest relative difference over all steps.
        losses_agree: whether it is within `FRAMEWORK_LOSS_TOLERANCE`, or that of long runs.
        static_ratio: static bytes of the second over the first.
        peak_ratio: peak allocated bytes of the second over the first.
        time_ratio: step time of the second over the first.
    """

    first: Result
    second: Result
    loss_difference: float | None
    losses_agree: bool | None
    static_ratio: float | None
    peak_ratio: float | None
    time_ratio: float | None


def settings_key(case: Case, **changes: Any) -> Case:
    """Return what makes two cases comparable: all of a case but whether gradients were kept."""
    return msgspec.structs.replace(case, save_gradients=False, **changes)


def baseline_key(case: Case) -> Case:
    """Return what a case is held against: the same by one process, without a technique."""
    return settings_key(case, technique=BASELINE, world=1)


def loss_difference(
    losses: Sequence[float | None], reference: Sequence[float | None]
) -> float | None:
    """Return the largest relative difference between two loss curves.

    Returns:
        None where there is nothing to compare (no losses, or different numbers of steps); NaN
        where a loss is not finite.
    """
    if not losses or len(losses) != len(reference):
        return None
    largest = 0.0
    for loss, expected in zip(losses, reference, strict=True):
        if loss is None or expected is None:
            return float("nan")
        if loss != expected:
            largest = max(largest, abs(loss - expected) / max(abs(expected), abs(loss)))
    return largest


def final_loss(losses: Sequence[float | None]) -> float | None:
    """Return the mean of the last tenth of a loss curve; None where one is not finite."""
    last = losses[-max(1, len(losses) // 10) :]
    known = [loss for loss in last if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(last) else None


def _difference(result: Result, reference: Result) -> float | None:
    """Return how far two curves are apart: everywhere, or at their ends where they are long."""
    if result.case.steps is None:
        return loss_difference(result.losses, reference.losses)
    ends = final_loss(result.losses), final_loss(reference.losses)
    if len(result.losses) != len(reference.losses):
        return None
    return loss_difference(ends[:1], ends[1:])


def finite(result: Result) -> bool:
    """Say whether training went on in numbers: no loss was infinite or NaN."""
    return all(loss is not None for loss in result.losses)


def time_spread(result: Result) -> float | None:
    """Return how far the measured steps' times are apart, as a share of their median."""
    if not result.step_seconds or result.step_seconds_spread is None:
        return None
    return result.step_seconds_spread / result.step_seconds


def repeatable(result: Result) -> bool | None:
    """Say whether all measured steps had the same peak; None for fewer than two."""
    if len(result.peaks_bytes) < 2:
        return None
    return len(set(result.peaks_bytes)) == 1


def baselines(report: Report) -> dict[Case, Result]:
    """Return the baselines that ended well, by what makes a case comparable to them."""
    return {
        settings_key(r.case): r
        for r in report.results
        if r.case.technique == BASELINE and r.status == "ok"
    }


def compare_technique(result: Result, baseline: Result | None) -> TechniqueComparison:
    """Hold one result against a baseline."""
    if result.status != "ok" or result.case.technique == BASELINE:
        baseline = None
    known = known_technique(result.case.technique)
    tolerance = known.loss_tolerance if known is not None else None
    if tolerance is not None and result.case.steps is not None:
        tolerance = LONG_RUN_LOSS_TOLERANCE
    difference = _difference(result, baseline) if baseline else None
    agree = _within(difference, tolerance)
    beside = baseline
    if agree is False:
        baseline = None  # what trains differently has saved nothing
    return TechniqueComparison(
        result=result,
        baseline=beside,
        peak_saving_bytes=_of_both(baseline, result, _peak, _less),
        peak_saving_factor=_of_both(baseline, result, _peak, _over),
        above_static_saving_bytes=_of_both(baseline, result, _above_static, _less),
        above_static_saving_factor=_of_both(baseline, result, _above_static, _over),
        time_ratio=_of_both(result, baseline, _seconds, _over),
        loss_difference=difference,
        loss_tolerance=tolerance,
        losses_agree=agree,
        repeatable=repeatable(result),
    )


def compare_techniques(report: Report) -> tuple[TechniqueComparison, ...]:
    """Hold every result of a report against its baseline, in the report's order."""
    found = baselines(report)
    return tuple(compare_technique(r, found.get(baseline_key(r.case))) for r in report.results)


def compare_frameworks(report: Report) -> tuple[FrameworkComparison, ...]:
    """Hold the baselines of every two backends against each other, workload by workload."""
    groups: dict[Case, list[Result]] = {}
    for case, result in baselines(report).items():
        groups.setdefault(settings_key(case, backend=""), []).append(result)
    return tuple(
        _compare_frameworks(first, second)
        for group in groups.values()
        for first, second in itertools.combinations(group, 2)
    )


def _compare_frameworks(first: Result, second: Result) -> FrameworkComparison:
    difference = _difference(second, first)
    tolerance = FRAMEWORK_LOSS_TOLERANCE if first.case.steps is None else LONG_RUN_LOSS_TOLERANCE
    return FrameworkComparison(
        first=first,
        second=second,
        loss_difference=difference,
        losses_agree=_within(difference, tolerance),
        static_ratio=_of_both(second, first, _static, _over),
        peak_ratio=_of_both(second, first, _peak, _over),
        time_ratio=_of_both(second, first, _seconds, _over),
    )


def _within(difference: float | None, tolerance: float | None) -> bool | None:
    if difference is None or tolerance is None:
        return None
    return difference <= tolerance  # false for NaN


def _static(result: Result) -> int | None:
    return result.static_bytes


def _peak(result: Result) -> int | None:
    return result.peak_allocated_bytes


def _above_static(result: Result) -> int | None:
    return result.peak_above_static_bytes


def _seconds(result: Result) -> float | None:
    return result.step_seconds


def _less(a: int, b: int) -> int:
    return a - b


def _over(a: float, b: float) -> float | None:
    return a / b if b else None


Answer = TypeVar("Answer")


def _of_both(
    a: Result | None,
    b: Result | None,
    read: Callable[[Result], Number | None],
    combine: Callable[[Number, Number], Answer | None],
) -> Answer | None:
    """Combine a figure of two results; None where either is not known."""
    first = read(a) if a is not None else None
    second = read(b) if b is not None else None
    if first is None or second is None:
        return None
    return combine(first, second)
