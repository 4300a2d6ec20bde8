"""Long campaigns on the Jittor pool: random lives of tensors against a model in Python."""

import gc
import importlib.util
import random

import pytest

import xmem
from xmem.protocols import CATEGORIES

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("jittor") is None, reason="needs Jittor"),
]


@pytest.mark.parametrize("seed", range(10))
def test_random_allocations_tags_and_frees_keep_every_sum(seed):
    measure = xmem.use("jittor", device="cpu").measure
    import jittor as jt

    generator = random.Random(seed)
    gc.collect()
    measure.synchronize()
    measure.tag_untagged("other")
    measure.reset_peak()
    base = measure.counters().allocated_bytes
    live, category, frozen, at_peak = {}, {}, {}, {}
    peak = base
    for serial in range(3000):
        action = generator.random()
        if action < 0.5 or not live:
            # not jt.array: Jittor holds its copy of the NumPy array and the tensor for a moment
            live[serial] = jt.zeros((generator.randrange(1, 300_000),), dtype="int8").sync()
            category[serial] = "temporary"
            now = base + sum(t.numel() for t in live.values())
            if now > peak:
                peak, frozen = now, {}
                at_peak = {k: t.numel() for k, t in live.items()}
        elif action < 0.8:
            key = generator.choice(list(live))
            if key in at_peak:
                frozen[key] = category[key]
            del live[key]
        else:
            key = generator.choice(list(live))
            category[key] = generator.choice(CATEGORIES[1:7])
            assert measure.tag(category[key], [live[key]]).tensors == 1
    counters = measure.counters()
    assert counters.allocated_bytes == base + sum(t.numel() for t in live.values())
    scalars = counters.peak_allocated_bytes - peak  # the zero that is being spread, for a moment
    assert 0 <= scalars <= 8
    expected = dict.fromkeys(CATEGORIES, 0)
    expected["other"] = base
    expected["temporary"] = scalars
    for key, size in at_peak.items():
        expected[frozen.get(key, category[key])] += size
    assert measure.peak_by_category() == expected
