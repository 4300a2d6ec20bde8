"""The largest batch that fits, on Jittor, held against plain bisection."""

import functools
import gc
import re

import batch_bar
import numpy as np
import pytest
from click.testing import CliRunner

import xmem
from xmem.batch_size import find_batch_size
from xmem.cli import main
from xmem.workloads import make_weights, workload

BACKEND = "jittor"

WORKLOADS = [("mlp", 1, 4), ("resnet18", 1, 3), ("bert", 1, 3), ("gpt2", 1, 3), ("unet3d", 1, 4.2)]


@pytest.mark.parametrize(("name", "minimum", "multiple"), WORKLOADS, ids=lambda v: str(v))
def test_the_size_is_what_bisection_finds_in_at_most_half_of_its_steps(
    backend, name, minimum, multiple
):
    counts = []
    make = functools.partial(batch_bar.make_step, name=name, counts=counts)
    # Jittor's Adam makes its states when it is made, so that one step is like all others.
    oracle = batch_bar.Oracle(backend, make, steps=1)
    budget = int(multiple * oracle.run(minimum, None))
    counts.clear()
    found = find_batch_size(make, budget=budget, minimum=minimum, isolate=False)
    ours = len(counts)
    assert ours == found.full_steps
    counts.clear()
    assert found == oracle.bisect(minimum, found.limit_bytes)
    print(f"{name}: {int(found)}, {ours} steps of {len(counts)} in {len(found.tries)} tries")
    assert 2 * ours <= len(counts), [str(t) for t in found.tries]
    assert oracle.peaks[int(found)] == found.peak_bytes <= found.limit_bytes


def test_a_size_lasts_for_twenty_steps(backend):
    make = functools.partial(batch_bar.make_step, name="mlp")
    found = find_batch_size(make, budget="40MiB", minimum=64, isolate=False)
    peak = batch_bar.Oracle(backend, make, steps=20).run(int(found), found.limit_bytes)
    assert peak == found.peak_bytes


def test_a_process_of_its_own_finds_the_same(backend):
    """With the pool as it is set here."""
    before = xmem.pool.settings
    xmem.pool.configure(large_block_size="8MiB", on_oom="trim_and_retry")
    settings = xmem.pool.settings

    def make(size):
        assert xmem.pool.settings == settings
        return batch_bar.make_step(size, "mlp")

    gc.collect()
    backend.measure.synchronize()
    already = xmem.pool.stats().allocated_bytes  # what other tests have left here
    try:
        find = functools.partial(find_batch_size, make, minimum=64, margin=0)
        own = find(budget=already + (40 << 20), isolate=False)
        found = find(budget="40MiB")
    finally:
        xmem.pool.configure(**before)
    assert found == own
    assert [(t.size, t.how) for t in found.tries] == [(t.size, t.how) for t in own.tries]
    [beside] = {o.peak_bytes - f.peak_bytes for o, f in batch_bar.peaks_of(own, found)}
    assert 0 <= beside <= already


def test_a_budget_beyond_the_limit_in_force_is_refused(backend):
    xmem.pool.configure(limit="30MiB")
    try:
        with pytest.raises(xmem.UsageError, match="more than the limit in force, 31457280 bytes"):
            find_batch_size(pytest.fail, budget="40MiB")
        found = find_batch_size(
            functools.partial(batch_bar.make_step, name="mlp"),
            budget="30MiB",
            minimum=64,
            maximum=65,
            isolate=False,
        )
        assert (found, xmem.pool.limit) == (65, 30 << 20)
    finally:
        xmem.pool.configure(limit=None)


def test_inference_has_a_larger_size(backend):
    def make(size):
        declared = workload("mlp")
        model = backend.models.build(declared.model, make_weights(declared))
        batch = backend.models.tensor(np.ones((size, 256), np.float32))
        return lambda: model(batch)

    steps = functools.partial(batch_bar.make_step, name="mlp")
    training = find_batch_size(steps, budget="40MiB", minimum=64, isolate=False)
    found = find_batch_size(make, budget="40MiB", for_inference=True, isolate=False)
    assert found > 5 * training
    assert find_batch_size(make, budget="40MiB", isolate=False) < found / 5


def test_nothing_stays_of_failed_tries(backend):
    make = functools.partial(batch_bar.make_step, name="bert")
    backend.measure.synchronize()
    before = backend.measure.counters().allocated_bytes
    for _ in range(3):
        with pytest.raises(xmem.InfeasibleBudgetError, match="minimum"):
            find_batch_size(make, budget="20MiB", isolate=False)
        gc.collect()
        backend.measure.synchronize()
        assert backend.measure.counters().allocated_bytes == before
    make(1)()


def test_the_command_finds_the_size_of_a_workload(backend):
    arguments = ["find-batch", "--workload", "mlp", "--backend", BACKEND, "--minimum", "256"]
    arguments += ["--technique", "checkpoint", "--budget"]
    result = CliRunner().invoke(main, [*arguments, "30MiB"])
    assert result.exit_code == 0, result.output
    [size] = re.findall(r"^(\d+) is the largest batch size of mlp", result.output, re.MULTILINE)
    table = [line.split() for line in result.output.splitlines() if line]
    assert [size, "verified"] in [row[:2] for row in table]
    assert [str(int(size) + 1), "refused"] in [row[:2] for row in table]
    result = CliRunner().invoke(main, [*arguments, "5MiB"])
    assert result.exit_code == 1
    assert "does not fit into 5242880 bytes" in result.output
