"""Ten planted leaks are found and named within 20 steps; ten clean runs raise no alarm."""

import functools
import gc
from collections import OrderedDict, deque
from pathlib import Path

import pytest

import xmem
from xmem.leaks import watch_leaks

STEPS = 20
LOGGED = []


class Loop:
    """A small model with its optimizer, and what a person's trainer has."""

    def __init__(self):
        import jittor as jt
        from jittor import nn

        self.jt = jt
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.optimizer = jt.optim.Adam(self.model.parameters(), lr=1e-3)
        self.history = {"loss": []}
        self.features = jt.zeros((0, 8))

    def batch(self, rows=32):
        return self.jt.randn(rows, 16)

    def forward(self, rows=32):
        out = self.model(self.batch(rows))
        return out, (out * out).mean()

    def train(self, rows=32):
        out, loss = self.forward(rows)
        self.optimizer.step(loss)
        return out, loss


def losses_in_a_list(loop, watch):
    losses = []
    for _ in range(STEPS):
        _, loss = loop.train()
        losses.append(loss)
        watch.step()


def losses_of_evaluation(loop, watch):
    for _ in range(STEPS):
        _, loss = loop.forward()
        loss.sync()
        loop.history["loss"].append(loss)
        watch.step()


def a_running_sum(loop, watch):
    total = 0
    for _ in range(STEPS):
        _, loss = loop.forward()
        total += loss
        total.sync()
        watch.step()


def outputs_with_graphs(loop, watch):
    results = {}
    for step in range(STEPS):
        out, _ = loop.forward()
        out.sync()
        results[step] = {"out": out, "step": step}
        watch.step()


def detached_outputs_in_a_global(loop, watch):
    LOGGED.clear()
    for step in range(STEPS):
        out, _ = loop.train(rows=8 + 8 * (step % 4))
        LOGGED.append(out.detach())
        watch.step()


def a_closure_that_collects(loop, watch):
    seen = []

    def collect(out):
        seen.append((0, out.detach()))

    for _ in range(STEPS):
        collect(loop.train()[0])
        watch.step()


def a_tensor_that_is_concatenated(loop, watch):
    for _ in range(STEPS):
        out, _ = loop.train()
        loop.features = loop.jt.concat([loop.features, out.detach()])
        loop.features.sync()
        watch.step()


def a_hidden_state(loop, watch):
    hidden = loop.jt.zeros((32, 8))
    for _ in range(STEPS):
        hidden = loop.jt.tanh(loop.model(loop.batch()) + hidden)
        out = hidden * 2
        loss = (out * out).mean()
        loss.sync()
        watch.step()
    return loss


def a_metric_that_nothing_runs(loop, watch):
    correct = loop.jt.zeros((1,))
    for _ in range(STEPS):
        with loop.jt.no_grad():
            correct = correct + (loop.forward()[0] > 0).sum()
        watch.step()


def averaged_weights_that_nothing_runs(loop, watch):
    average = [p.detach().clone() for p in loop.model.parameters()]
    for _ in range(STEPS):
        loop.train()
        for a, p in zip(average, loop.model.parameters(), strict=True):
            a.update(0.9 * a + 0.1 * p.detach())
        watch.step()


class Sample:
    def __init__(self, tensor):
        self.tensor = tensor
        self.me = self


def reference_cycles(loop, watch):
    gc.disable()  # else it depends on what has run before when they are collected
    try:
        for _ in range(STEPS):
            loop.train()
            Sample(loop.jt.zeros((1000,)).sync())
            watch.step()
    finally:
        gc.enable()


KEPT = ("growing container", "retained graph")
PLANTED = {
    losses_in_a_list: (KEPT, "`losses`", "losses.append(loss)"),
    losses_of_evaluation: (KEPT[1:], "`history['loss']`", "history["),
    a_running_sum: (KEPT[1:], "`total`", "total += loss"),
    outputs_with_graphs: (KEPT[1:], "`results`", "results[step]"),
    detached_outputs_in_a_global: (KEPT[:1], "`LOGGED`", "LOGGED.append"),
    a_closure_that_collects: (KEPT[:1], "`seen`", "seen.append"),
    a_tensor_that_is_concatenated: (("growing tensor",), "`features`", "jt.concat"),
    a_hidden_state: (("accumulation without a cut",), "`hidden`", "hidden = loop.jt.tanh"),
    a_metric_that_nothing_runs: (("pending operations",), "`correct`", "correct = correct"),
    averaged_weights_that_nothing_runs: (("pending operations",), "`average", None),
    reference_cycles: (("reference cycles",), "Sample", None),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_leak_is_found_and_named_within_20_steps(backend, plant):
    kinds, owner, line = PLANTED[plant]
    loop = Loop()
    found = []
    with watch_leaks(model=loop.model, optimizer=loop.optimizer, on_leak=found.append) as watch:
        plant(loop, watch)
    [leak] = found
    assert leak.kind in kinds
    assert leak.found_at_step <= STEPS
    assert owner in leak.owner, leak
    print(leak)
    if line is not None:
        assert leak.made_at is not None
        file, number = leak.made_at.split(":")
        assert file == Path(__file__).name
        assert line in Path(__file__).read_text().splitlines()[int(number) - 1]


def logged_numbers(loop, watch):
    losses = []
    for _ in range(2 * STEPS):
        _, loss = loop.train()
        losses.append(xmem.log_value(loss))
        watch.step()


def batches_of_all_sizes(loop, watch):
    for step in range(2 * STEPS):
        out, loss = loop.train(rows=8 + 8 * (5 * step % 4))
        watch.step()
    return out, loss


def evaluation_in_between(loop, watch):
    for step in range(2 * STEPS):
        loop.train()
        if step % 5 == 4:
            with xmem.inference(loop.model):
                scores = loop.jt.concat([loop.forward()[0] for _ in range(3)])
                scores.sync()
        watch.step()


def the_last_losses(loop, watch):
    last = deque(maxlen=8)
    for _ in range(2 * STEPS):
        last.append(loop.train()[1])
        watch.step()


def a_long_deque_that_fills(loop, watch):
    last = deque(maxlen=30)
    for _ in range(2 * STEPS):
        last.append(loop.train()[1].detach())
        watch.step()


def caches_that_fill_up(loop, watch):
    jt = loop.jt
    positions = functools.lru_cache(maxsize=32)(lambda number: jt.zeros((16,)) + number)
    masks = OrderedDict()
    for step in range(2 * STEPS):
        positions(10 + step)
        masks[step] = jt.zeros((16,))
        if len(masks) > 10:
            masks.popitem(last=False)
        loop.train()
        watch.step()


def averaged_weights(loop, watch):
    average = [p.detach().clone() for p in loop.model.parameters()]
    for _ in range(2 * STEPS):
        loop.train()
        for a, p in zip(average, loop.model.parameters(), strict=True):
            a.update(0.9 * a + 0.1 * p.detach())
        loop.jt.sync(average)
        watch.step()


def checkpointing(loop, watch):
    receipt = xmem.apply_checkpointing(loop.model, "every", blocks=[loop.model[0]])
    for _ in range(2 * STEPS):
        loop.train()
        watch.step()
    receipt.undo()


def accumulation(loop, watch):
    for _ in range(2 * STEPS):
        with xmem.accumulate(4, loop.optimizer):
            for rows in (8, 16, 24, 32):
                xmem.backward(loop.forward(rows)[1], loop.optimizer)
    assert watch.steps == 2 * STEPS


def keys_that_become_rare(loop, watch):
    import numpy as np

    known = {}
    generator = np.random.default_rng(1)
    for _ in range(3 * STEPS):
        for key in generator.integers(0, 40, 2).tolist():
            if key not in known:
                known[key] = loop.jt.zeros((8,))
        loop.train()
        watch.step()


CLEAN = (
    logged_numbers,
    batches_of_all_sizes,
    evaluation_in_between,
    the_last_losses,
    a_long_deque_that_fills,
    caches_that_fill_up,
    averaged_weights,
    checkpointing,
    accumulation,
    keys_that_become_rare,
)


@pytest.mark.parametrize("run", CLEAN, ids=lambda run: run.__name__)
def test_a_clean_run_raises_no_alarm(backend, run):
    loop = Loop()
    with watch_leaks(model=loop.model, optimizer=loop.optimizer, on_leak="raise") as watch:
        run(loop, watch)
    assert watch.findings == []
    print(watch.notes)


def test_the_patch_of_optimizers_is_gone_afterwards(backend):
    import jittor as jt

    before = jt.optim.Optimizer.post_step
    with watch_leaks():
        assert jt.optim.Optimizer.post_step is not before
        Loop().train()
    assert jt.optim.Optimizer.post_step is before


def test_reading_the_figures_runs_nothing(backend):
    import jittor as jt

    waiting = jt.ones((1000,)) + 1
    before = backend.measure.counters().allocation_count
    pool = backend.pool
    assert any(tensor is waiting for tensor in pool.live_tensors())
    assert pool.live_counts()["live_ops"] > 0
    assert pool.graph_of(waiting).is_pending
    assert pool.tensor_bytes(waiting) == 0
    assert backend.measure.counters().allocation_count == before
    waiting.sync()
    assert pool.tensor_bytes(waiting) == 4000
