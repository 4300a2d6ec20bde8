"""Kill one rank at a random point, again and again: the others name it, and nothing is left."""

import importlib.util
import os
import random
import signal

import dying
import pytest

pytestmark = pytest.mark.soak

TIMES = 50


@pytest.mark.parametrize("number", range(TIMES))
@pytest.mark.parametrize("backend", ["torch", "jittor"])
def test_a_killed_rank_is_named_by_all_others_and_nothing_is_left(backend, number, tmp_path):
    pytest.importorskip("xmem")
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    seed = random.randrange(2**32) if os.environ.get("XMEM_EXPLORE") else number
    drawn = random.Random(seed)
    programs = {**dying.PROGRAMS, "training": dying.training(backend)}
    del programs["throw"]
    program = drawn.choice([*sorted(programs), "training", "training"])
    size = drawn.choice([2, 2, 3, 4])
    victim = drawn.randrange(size)
    delay = drawn.uniform(0.0, 1.5)
    print(f"seed {seed}: {program}, rank {victim} of {size}, after {delay:.3f} s")
    death = dying.die(
        backend, programs[program], tmp_path / "job", victim=victim, size=size, delay=delay
    )
    dying.assert_others_name(death, victim)
    assert death.status == 128 + signal.SIGKILL
