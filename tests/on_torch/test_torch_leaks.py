"""Ten planted leaks are found and named within 20 steps; ten clean runs raise no alarm."""

import functools
import gc
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

import xmem
from xmem.leaks import watch_leaks

STEPS = 20
LOGGED = []


class Loop:
    """A small model with its optimizer, and what a person's trainer has."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.history = {"loss": []}
        self.features = torch.zeros(0, 8)

    def batch(self, rows=32):
        return torch.randn(rows, 16)

    def forward(self, rows=32):
        out = self.model(self.batch(rows))
        return out, out.square().mean()

    def train(self, rows=32):
        out, loss = self.forward(rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out, loss


def losses_in_a_list(loop, watch):
    losses = []
    for _ in range(STEPS):
        _, loss = loop.train()
        losses.append(loss)
        watch.step()


def losses_in_an_attribute(loop, watch):
    for _ in range(STEPS):
        _, loss = loop.train()
        loop.history["loss"].append(loss)
        watch.step()


def a_running_sum(loop, watch):
    total = 0
    for _ in range(STEPS):
        _, loss = loop.train()
        total += loss
        watch.step()


def evaluation_with_graphs(loop, watch):
    results = {}
    for step in range(STEPS):
        out, _ = loop.forward()
        results[step] = {"out": out, "step": step}
        watch.step()


def detached_outputs_in_a_global(loop, watch):
    LOGGED.clear()
    for step in range(STEPS):
        out, _ = loop.train(rows=8 + 5 * (step % 4))
        LOGGED.append(out.detach())
        watch.step()


def a_hook_that_collects(loop, watch):
    seen = []
    loop.model[0].register_forward_hook(lambda module, inputs, out: seen.append(out.detach()))
    for _ in range(STEPS):
        loop.train()
        watch.step()


def a_tensor_that_is_concatenated(loop, watch):
    for _ in range(STEPS):
        out, _ = loop.train()
        loop.features = torch.cat([loop.features, out.detach()])
        watch.step()


def a_hidden_state(loop, watch):
    hidden = torch.zeros(32, 8)
    for _ in range(STEPS):
        hidden = torch.tanh(loop.model(loop.batch()) + hidden)
        out = hidden * 2
        loss = out.square().mean()
        watch.step()
    return loss


def gradients_with_a_graph(loop, watch):
    for _ in range(STEPS):
        _, loss = loop.forward()
        loss.backward(create_graph=True)
        del loss
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
            Sample(torch.zeros(1000))
            watch.step()
    finally:
        gc.enable()


PLANTED = {
    losses_in_a_list: ("retained graph", "`losses`", "losses.append(loss)"),
    losses_in_an_attribute: ("retained graph", "`history['loss']`", "history["),
    a_running_sum: ("retained graph", "`total`", "total += loss"),
    evaluation_with_graphs: ("retained graph", "`results`", "results[step]"),
    detached_outputs_in_a_global: ("growing container", "`LOGGED`", "LOGGED.append"),
    a_hook_that_collects: ("growing container", "`seen`", "seen.append"),
    a_tensor_that_is_concatenated: ("growing tensor", "`features`", "torch.cat"),
    a_hidden_state: ("accumulation without a cut", "`hidden`", "hidden = torch.tanh"),
    gradients_with_a_graph: ("accumulation without a cut", "`grad`", None),
    reference_cycles: ("reference cycles", "Sample", None),
}


def lines():
    from pathlib import Path

    return Path(__file__).read_text().splitlines()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_leak_is_found_and_named_within_20_steps(backend, plant):
    kind, owner, line = PLANTED[plant]
    loop = Loop()
    found = []
    with watch_leaks(model=loop.model, optimizer=loop.optimizer, on_leak=found.append) as watch:
        plant(loop, watch)
    assert [leak.kind for leak in found] == [kind], found
    [leak] = found
    assert leak.found_at_step <= STEPS
    assert owner in leak.owner, leak
    print(leak)
    if line is not None:
        assert leak.made_at is not None
        file, number = leak.made_at.split(":")
        assert file == "test_torch_leaks.py"
        assert line in lines()[int(number) - 1]


def logged_numbers(loop, watch):
    losses = []
    for _ in range(2 * STEPS):
        _, loss = loop.train()
        losses.append(xmem.log_value(loss))
        watch.step()


def batches_of_all_sizes(loop, watch):
    for step in range(2 * STEPS):
        out, loss = loop.train(rows=8 + 37 * step % 64)
        watch.step()
    return out, loss


def evaluation_in_between(loop, watch):
    for step in range(2 * STEPS):
        loop.train()
        if step % 5 == 4:
            with xmem.inference(loop.model):
                scores = torch.cat([loop.forward()[0] for _ in range(3)])
        watch.step()
    return scores


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
    positions = functools.lru_cache(maxsize=32)(lambda length: torch.arange(length))
    masks = OrderedDict()
    for step in range(2 * STEPS):
        positions(10 + step)
        masks[step] = torch.zeros(16)
        if len(masks) > 10:
            masks.popitem(last=False)
        loop.train()
        watch.step()


def averaged_weights(loop, watch):
    average = [p.detach().clone() for p in loop.model.parameters()]
    for _ in range(2 * STEPS):
        loop.train()
        average = [
            0.9 * a + 0.1 * p.detach()
            for a, p in zip(average, loop.model.parameters(), strict=True)
        ]
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
    known = {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(3 * STEPS):
        for key in torch.randint(0, 40, (2,), generator=generator).tolist():
            if key not in known:
                known[key] = torch.zeros(8)
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


def test_tensors_are_counted_without_looking_at_them(backend):
    pool = backend.pool
    walked = len(pool.live_tensors())
    before = pool.live_counts()["tensors"]
    kept = [torch.zeros(1) for _ in range(7)] + [nn.Parameter(torch.zeros(1))]
    assert pool.live_counts()["tensors"] == before + 8
    assert len(pool.live_tensors()) == walked + 8
    del kept


def test_a_graph_is_what_a_tensor_keeps_alive(backend):
    pool = backend.pool
    weight = nn.Parameter(torch.ones(4))
    first = weight * 2
    second = first.exp().sum()
    assert pool.graph_of(weight) is None
    assert pool.graph_of(second.detach()) is None
    assert len(pool.graph_of(first).operations) == 1
    assert pool.graph_of(first).root in pool.graph_of(second).operations
    assert pool.tensor_bytes(weight) == 16
