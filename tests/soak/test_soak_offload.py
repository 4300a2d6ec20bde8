"""A hundred runs that are killed at random points while activations, states and parameters move."""

import importlib.util

import pytest
from offload_killed import killed

pytestmark = pytest.mark.soak
RUNS = {"depot": 50, "torch": 30, "jittor": 20}


@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, count in RUNS.items() for seed in range(count)]
)
def test_nothing_stays_behind_a_killed_run(name, seed, tmp_path):
    if name != "depot" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    assert killed(name, tmp_path / "scratch", seed=seed) == []
