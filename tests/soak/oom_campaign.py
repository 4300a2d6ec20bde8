"""Run out of memory again and again at drawn limits; one process, one JSON line on stdout.

`python -m soak.oom_campaign BACKEND SEED STEPS ERRORS`: trains for so many steps; between them,
others fail. Prints losses, and what was alive after the first and after the last error.
"""

import gc
import json
import random
import sys


def main():
    name, seed, steps, errors = sys.argv[1], *map(int, sys.argv[2:])
    import xmem
    from xmem.conformance.small import SmallRun, small_workload
    from xmem.out_of_memory import oom_guard

    backend = xmem.use(name, device="cpu")
    run = SmallRun(backend, small_workload(depth=4, width=64, batch=512))

    def step():
        with oom_guard(model=run.model, optimizer=run.optimizer):
            return run.step()

    def alive():
        backend.measure.synchronize()
        gc.collect()
        stats = backend.pool.stats()
        return {"allocated_bytes": stats.allocated_bytes, **backend.pool.live_counts()}

    losses = [step(), step()]
    static = alive()["allocated_bytes"]
    backend.measure.reset_peak()
    losses.append(step())
    peak = backend.measure.counters().peak_allocated_bytes
    draw = random.Random(seed)
    phases, before, worst = {}, alive(), 0
    remaining, ahead = errors, steps - len(losses) - 1
    while remaining or ahead:
        if remaining and draw.random() < remaining / (remaining + ahead):
            remaining -= 1
            # anywhere; every other time in the uppermost part, which only backward reaches
            lowest = static + 1 if remaining % 2 else peak - (peak - static) // 16
            backend.pool.set_limit(draw.randrange(lowest, peak))
            try:
                step()
                raise AssertionError("no error below the peak")
            except xmem.OutOfMemoryError as error:
                found = error.diagnosis
                # the error still held, and nothing collected but by the guard
                worst = max(worst, backend.pool.stats().allocated_bytes)
            backend.pool.set_limit(None)
            phases[found.phase] = phases.get(found.phase, 0) + 1
            assert sum(found.by_category.values()) == found.allocated_bytes
            assert not found.may_be_updated
            if errors - remaining == 1:
                before = alive()  # what the first error has made for good: modules, caches
        else:
            ahead -= 1
            losses.append(step())
    after = alive()
    losses.append(step())
    print(
        "CAMPAIGN",
        json.dumps(
            {
                "losses": losses,
                "phases": phases,
                "static_bytes": static,
                "worst_bytes": worst,
                "before": before,
                "after": after,
            }
        ),
    )


if __name__ == "__main__":
    main()
