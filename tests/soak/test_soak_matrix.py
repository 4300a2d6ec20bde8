"""The whole quick matrix three times over, in fresh processes: one peak, one series of losses."""

import importlib.util

import pytest

from xmem.conformance.runner import matrix, run_case
from xmem.conformance.techniques import TECHNIQUES
from xmem.workloads import WORKLOADS

pytestmark = pytest.mark.soak

INSTALLED = [b for b in ("torch", "jittor") if importlib.util.find_spec(b)]
CASES = matrix(INSTALLED, WORKLOADS, list(TECHNIQUES))


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_a_case_repeats_to_the_byte(case, tmp_path):
    results = [run_case(case, tmp_path / str(i)) for i in range(3)]
    if results[0].status == "unsupported":
        pytest.skip(results[0].reason)
    assert {r.status for r in results} == {"ok"}, [r.reason for r in results]
    assert len({r.peaks_bytes for r in results}) == 1, [r.peaks_bytes for r in results]
    assert len(set(results[0].peaks_bytes)) == 1
