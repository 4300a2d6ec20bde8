"""Each case of the matrix: workload x technique x backend, every one in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from xmem.conformance.plugin import chosen_cases, gap, ok
from xmem.conformance.runner import result_path, run_case
from xmem.conformance.small import relative_error
from xmem.conformance.techniques import technique
from xmem.report.compare import FRAMEWORK_LOSS_TOLERANCE, finite, loss_difference
from xmem.report.model import Case, Result

if TYPE_CHECKING:
    from xmem.conformance.plugin import Results

# What checkpointing every block must at least bring: peak above static bytes, as a share of the
# baseline's. Where gradients or kernel scratch make the peak, less can be had.
_CHECKPOINT_SHARE = {"mlp": 0.8, "bert": 0.6, "gpt2": 0.6}


def test_it_runs_and_learns(result: Result) -> None:
    """Five finite losses, the last lower than the first."""
    assert len(result.losses) == 5
    first, last = result.losses[0], result.losses[-1]
    assert finite(result), result.losses
    assert first is not None
    assert last is not None
    assert last < first


def test_its_peak_is_the_same_every_time(result: Result) -> None:
    """Exact counting of the same work gives the same bytes."""
    assert len(result.peaks_bytes) == 3
    assert len(set(result.peaks_bytes)) == 1, result.peaks_bytes


def test_its_categories_add_up(result: Result) -> None:
    """The breakdown at the peak is the peak, or is honestly missing."""
    if result.by_category is None:
        gap("the backend's source cannot split the peak")
    assert sum(result.by_category.values()) == result.peak_allocated_bytes
    assert min(result.by_category.values()) >= 0
    assert result.by_category.get("activation", 0) > 0


@pytest.mark.technique("checkpoint", "plan", "autocast", "compress", "offload")
def test_its_losses_are_the_baselines(case: Case, result: Result, baseline: Result) -> None:
    """Within the technique's tolerance, at every step."""
    difference = loss_difference(result.losses, baseline.losses)
    assert difference is not None
    assert difference <= technique(case.technique).loss_tolerance, (
        f"{difference:.2e} off: {result.losses} against {baseline.losses}"
    )


@pytest.mark.technique("checkpoint", "plan", "autocast", "compress", "offload")
def test_its_gradients_are_the_baselines(
    case: Case, result: Result, baseline: Result, results_folder: Path
) -> None:
    """The first step's, all together, relative in the L2 norm."""
    found, expected = (
        dict(np.load(result_path(r.case, results_folder).with_suffix(".npz")))
        for r in (result, baseline)
    )
    assert expected
    error = relative_error(found, expected)
    assert error <= technique(case.technique).gradient_tolerance


@pytest.mark.technique("baseline", "autocast", "compress", "offload")
def test_plain_blocks_run_once(result: Result) -> None:
    """No block runs twice without being asked to."""
    if result.block_forward_calls is None:
        gap("the backend cannot count forward calls")
    assert result.block_forward_calls == result.block_count


@pytest.mark.technique("checkpoint")
def test_checkpointed_blocks_run_exactly_twice(result: Result) -> None:
    """Once forward, once recomputed."""
    assert result.applied_to == result.block_count
    assert result.block_count
    assert result.block_forward_calls == 2 * result.block_count


@pytest.mark.technique("checkpoint")
def test_checkpointing_lowers_the_peak(case: Case, result: Result, baseline: Result) -> None:
    """By as much as the workload allows."""
    assert result.peak_above_static_bytes is not None
    assert baseline.peak_above_static_bytes is not None
    share = _CHECKPOINT_SHARE.get(case.workload, 1.0)
    assert result.peak_above_static_bytes < share * baseline.peak_above_static_bytes, (
        f"{result.peak_above_static_bytes} bytes against {baseline.peak_above_static_bytes}"
    )


@pytest.mark.technique("plan")
def test_planning_lowers_the_peak(result: Result, baseline: Result) -> None:
    """Within a budget near the least; where one operation sets the peak, it stays that."""
    assert result.applied_to
    assert result.peak_above_static_bytes is not None
    assert baseline.peak_above_static_bytes is not None
    assert result.peak_above_static_bytes < baseline.peak_above_static_bytes


@pytest.mark.technique("autocast")
def test_autocast_lowers_what_is_kept(result: Result, baseline: Result) -> None:
    """Half precision keeps fewer bytes at the peak than float32."""
    assert result.dtype in ("bfloat16", "float16")
    assert result.peak_above_static_bytes is not None
    assert baseline.peak_above_static_bytes is not None
    assert result.peak_above_static_bytes < baseline.peak_above_static_bytes, (
        f"{result.peak_above_static_bytes} bytes against {baseline.peak_above_static_bytes}"
    )


@pytest.mark.technique("compress")
def test_compression_lowers_the_peak_and_rounds(
    case: Case, result: Result, baseline: Result, results_folder: Path
) -> None:
    """Fewer bytes at the peak; gradients without any error would mean that nothing was packed."""
    assert result.peak_above_static_bytes is not None
    assert baseline.peak_above_static_bytes is not None
    assert result.peak_above_static_bytes < baseline.peak_above_static_bytes, (
        f"{result.peak_above_static_bytes} bytes against {baseline.peak_above_static_bytes}"
    )
    assert result.losses[0] == pytest.approx(baseline.losses[0], rel=1e-6)
    found, expected = (
        dict(np.load(result_path(r.case, results_folder).with_suffix(".npz")))
        for r in (result, baseline)
    )
    assert relative_error(found, expected) > 1e-6


@pytest.mark.technique("offload")
def test_offload_lowers_the_peak(result: Result, baseline: Result) -> None:
    """What is kept for backward is not on the device at the peak."""
    assert result.peak_above_static_bytes is not None
    assert baseline.peak_above_static_bytes is not None
    assert result.peak_above_static_bytes < baseline.peak_above_static_bytes, (
        f"{result.peak_above_static_bytes} bytes against {baseline.peak_above_static_bytes}"
    )


def test_baseline_losses_agree_across_backends(pair: tuple[Case, Case], results: Results) -> None:
    """The same weights and data give the same losses on every framework, in float32."""
    first, second = (ok(results(case)) for case in pair)
    difference = loss_difference(first.losses, second.losses)
    assert difference is not None
    assert difference <= FRAMEWORK_LOSS_TOLERANCE, (
        f"{difference:.2e} off: {first.losses} against {second.losses}"
    )


def test_three_processes_have_one_peak(
    backend_name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The first workload's baseline, three times from the start."""
    case = next(
        c
        for c in chosen_cases(request.config)
        if c.backend == backend_name and c.technique == "baseline"
    )
    found = [ok(run_case(case, tmp_path / str(i))) for i in range(3)]
    assert len({(r.static_bytes, r.peaks_bytes) for r in found}) == 1, [
        r.peaks_bytes for r in found
    ]
    assert len({r.losses for r in found}) == 1, [r.losses for r in found]
