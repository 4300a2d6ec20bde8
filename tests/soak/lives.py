"""Random lives of tensors, and what a meter must say of them."""

import gc
import random

from xmem.protocols import CATEGORIES


def live_and_check(measure, make, *, seed, actions, slack=0):
    """Allocate, tag and free at random; then every sum must be the model's.

    `make(size)` returns a tensor of that many bytes, `slack` is what it may take beside it for a
    moment, counted as temporary.
    """
    generator = random.Random(seed)
    gc.collect()
    measure.synchronize()
    measure.tag_untagged("other")
    measure.reset_peak()
    base = measure.counters().allocated_bytes
    live, sizes, category, frozen, at_peak = {}, {}, {}, {}, {}
    peak = base
    for serial in range(actions):
        action = generator.random()
        if action < 0.5 or not live:
            size = generator.randrange(1, 100_000)
            live[serial], sizes[serial], category[serial] = make(size), size, "temporary"
            if base + sum(sizes.values()) > peak:
                peak, at_peak, frozen = base + sum(sizes.values()), dict(sizes), {}
        elif action < 0.8:
            key = generator.choice(list(live))
            if key in at_peak:
                frozen[key] = category[key]
            del live[key], sizes[key]
        else:
            key = generator.choice(list(live))
            category[key] = generator.choice(CATEGORIES[1:7])
            assert measure.tag(category[key], [live[key]]).tensors == 1
    counters = measure.counters()
    assert counters.allocated_bytes == base + sum(sizes.values())
    beside = counters.peak_allocated_bytes - peak
    assert 0 <= beside <= slack
    expected = dict.fromkeys(CATEGORIES, 0)
    expected["other"] = base
    expected["temporary"] = beside
    for key, size in at_peak.items():
        expected[frozen.get(key, category[key])] += size
    assert measure.peak_by_category() == expected
