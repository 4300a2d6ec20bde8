"""Long trainings: half precision ends where float32 does."""

import importlib.util

import pytest

from xmem.conformance.runner import matrix, run_cases
from xmem.report.compare import LONG_RUN_LOSS_TOLERANCE, compare_techniques, final_loss
from xmem.report.write import make_report
from xmem.workloads import LEARNING_WORKLOADS

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("backend", ["torch", "jittor"])
@pytest.mark.parametrize("workload", LEARNING_WORKLOADS)
def test_300_steps_in_half_end_within_2_percent_of_float32(backend, workload, tmp_path):
    """The project's own text, and pictures under noise, new ones in every step."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    cases = matrix([backend], [workload], ["baseline", "autocast"], device="cpu", steps=300)
    results = list(run_cases(cases, tmp_path))
    plain, half = results
    assert [r.status for r in results] == ["ok", "ok"], [r.reason for r in results]
    assert len(plain.losses) == len(half.losses) == 300
    print(final_loss(plain.losses), final_loss(half.losses))
    assert final_loss(plain.losses) < 0.7 * plain.losses[0]
    assert plain.losses != half.losses
    difference = compare_techniques(make_report(results))[1].loss_difference
    assert difference <= LONG_RUN_LOSS_TOLERANCE, difference
