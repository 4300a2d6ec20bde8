"""The bar of the batch size finder, in processes of its own, with other budgets and more steps."""

import functools
import importlib.util

import batch_bar
import pytest

import xmem
from xmem.batch_size import find_batch_size

pytestmark = pytest.mark.soak
BACKENDS = [name for name in ("torch", "jittor") if importlib.util.find_spec(name) is not None]
BUDGETS = {"mlp": 5, "resnet18": 5, "bert": 4.5, "gpt2": 4.5, "unet3d": 16.5}


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_sizes_are_exact_and_last_for_twenty_steps(backend_name, name, record_property):
    backend = xmem.use(backend_name, device="cpu")
    if backend_name == "torch":
        import torch

        torch.set_num_threads(2)
    counts = []
    make = functools.partial(batch_bar.make_step, name=name)
    steps = 2 if backend_name == "torch" else 1
    oracle = batch_bar.Oracle(backend, functools.partial(make, counts=counts), steps)
    minimum = 2 if name == "unet3d" else 1
    budget = int(BUDGETS[name] / minimum * oracle.run(minimum, None))
    found = find_batch_size(make, budget=budget, minimum=minimum)
    counts.clear()
    assert found == oracle.bisect(minimum, found.limit_bytes)
    record_property("steps", f"{found.full_steps} of {len(counts)}")
    assert 2 * found.full_steps <= len(counts), [str(t) for t in found.tries]
    peak = oracle.run(int(found), found.limit_bytes, steps=20)
    assert peak == found.peak_bytes
