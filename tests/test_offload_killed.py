"""A process that is killed while bytes are away leaves no file behind."""

import pytest
from offload_killed import killed


@pytest.mark.parametrize("seed", range(3))
def test_nothing_stays_behind_a_killed_process(seed, tmp_path):
    assert killed("depot", tmp_path / "scratch", seed=seed) == []
