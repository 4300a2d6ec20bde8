"""Long campaigns on the PyTorch allocator: random lives of tensors against a model in Python."""

import gc
import random

import pytest

torch = pytest.importorskip("torch")

import xmem  # noqa: E402
from xmem.protocols import CATEGORIES  # noqa: E402

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("seed", range(20))
def test_random_allocations_tags_and_frees_keep_every_sum(seed):
    measure = xmem.use("torch", device="cpu").measure
    generator = random.Random(seed)
    gc.collect()
    measure.tag_untagged("other")
    measure.reset_peak()
    base = measure.counters().allocated_bytes
    live, category = {}, {}
    peak, at_peak, serial = base, {}, 0
    for _ in range(4000):
        action = generator.random()
        if action < 0.5 or not live:
            serial += 1
            live[serial] = torch.empty(generator.randrange(1, 5000), dtype=torch.uint8)
            category[serial] = "temporary"
            now = base + sum(t.nbytes for t in live.values())
            if now > peak:
                peak, at_peak = now, dict.fromkeys(live)
                at_peak = {k: live[k].nbytes for k in live}
                frozen = {}
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
    assert counters.allocated_bytes == base + sum(t.nbytes for t in live.values())
    assert counters.peak_allocated_bytes == peak
    expected = dict.fromkeys(CATEGORIES, 0)
    expected["other"] = base
    for key, size in at_peak.items():
        expected[frozen.get(key, category[key])] += size
    assert measure.peak_by_category() == expected
