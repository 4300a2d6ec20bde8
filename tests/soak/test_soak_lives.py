"""Long campaigns on both meters: random lives of tensors against a model in Python."""

import importlib.util

import pytest
from soak.lives import live_and_check

import xmem

pytestmark = pytest.mark.soak


def needs(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


@pytest.mark.parametrize("seed", range(20))
def test_pytorchs_allocator_keeps_every_sum(seed):
    needs("torch")
    measure = xmem.use("torch", device="cpu").measure
    import torch

    live_and_check(
        measure, lambda size: torch.empty(size, dtype=torch.uint8), seed=seed, actions=4000
    )


@pytest.mark.parametrize("seed", range(10))
def test_jittors_pool_keeps_every_sum(seed):
    needs("jittor")
    measure = xmem.use("jittor", device="cpu").measure
    import jittor as jt

    # Not jt.array: Jittor holds its copy of the NumPy array and the tensor for a moment. With
    # zeros it is the scalar that is being spread.
    live_and_check(
        measure,
        lambda size: jt.zeros((size,), dtype="int8").sync(),
        seed=seed,
        actions=3000,
        slack=8,
    )
