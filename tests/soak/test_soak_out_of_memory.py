"""200 out-of-memory errors in a row at drawn points of a step: nothing grows, training goes on."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

TESTS = Path(__file__).parent.parent
STEPS = 24


def campaign(framework, seed, errors):
    """A fresh process, so that nothing else is alive in it."""
    ran = subprocess.run(
        [sys.executable, "-m", "soak.oom_campaign", framework, *map(str, (seed, STEPS, errors))],
        cwd=TESTS,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("CAMPAIGN ")]
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return json.loads(lines[0].removeprefix("CAMPAIGN "))


@pytest.mark.parametrize("framework", ["torch", "jittor"])
@pytest.mark.parametrize("seed", range(3))
def test_after_200_errors_nothing_has_grown_and_losses_are_a_fresh_processs(framework, seed):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    found = campaign(framework, seed, 200)
    fresh = campaign(framework, seed, 0)
    assert sum(found["phases"].values()) == 200
    assert {"forward", "backward"} <= found["phases"].keys()
    assert found["losses"] == fresh["losses"], "the step after 200 errors, and all between them"
    assert found["after"] == found["before"], "alive after the first error and after the last"
    assert found["worst_bytes"] == found["static_bytes"] == found["after"]["allocated_bytes"]
