"""What leaves until backward on Jittor: gradients of plain training, and nothing left."""

from contextlib import nullcontext

import numpy as np
import pytest
from chain import chain, error, gradients, learnt, normal, trained, transformer
from leaving import Leaving, live

import xmem

pytestmark = pytest.mark.filterwarnings("ignore:a value was waited for")


def compared(model, *inputs, targets=None, reduce=None, **options):
    """Return losses and gradients, plain and offloaded, and the block."""
    import jittor as jt

    targets = trained(model) if targets is None else targets
    found = []
    jt.sync_all(True)  # what the initialisers draw

    def loss():
        jt.set_global_seed(3)
        return (reduce or (lambda y: (y**2).mean()))(model(*inputs))

    for block in (None, Leaving(**options)):
        if block is None:
            made = loss()
        else:
            with block:
                made = loss()
        grads = gradients(made, targets)
        found.append((made.item(), grads))
    return *found, block


def agree(plain, offloaded, most=0.0):
    assert offloaded[0] == pytest.approx(plain[0], rel=1e-6)
    errors = [error([f], [e]) for f, e in zip(offloaded[1], plain[1], strict=True)]
    assert max(errors) <= most, errors
    assert any(g.any() for g in plain[1])


@pytest.mark.parametrize("to", ["disk", "host"])
def test_a_chain_has_the_gradients_of_plain_training_bit_for_bit(backend, to):
    plain, offloaded, block = compared(chain(4, 64), normal(128, 64), to=to)
    agree(plain, offloaded)
    # Of each layer GELU's input leaves, the rest is made of it again; the last output as well.
    assert block.away_bytes >= 4 * 128 * 64 * 4
    assert block.device_bytes == 0
    stats = block.depot.stats
    assert stats.written_bytes == block.away_bytes
    assert (stats.count, stats.stored_bytes) == (0, 0), stats


def test_an_unmodified_transformer_leaves(backend):
    plain, offloaded, block = compared(transformer(2, 64), normal(2, 32, 64))
    agree(plain, offloaded, 1e-6)
    assert {"0.qkv", "1.up"} <= block.layers
    assert block.depot.stats.count == 0


def test_packed_bytes_travel(backend):
    plain, offloaded, block = compared(chain(4, 64), normal(128, 64), bits=8)
    agree(plain, offloaded, 0.02)
    assert block.away_bytes < 0.3 * block.raw_bytes, (block.away_bytes, block.raw_bytes)
    assert block.depot.stats.written_bytes == block.away_bytes


def test_convolutions_statistics_and_what_is_compared_in_backward(backend):
    from jittor import nn

    net = nn.Sequential(
        nn.Conv(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm(8),
        nn.ReLU(),
        nn.Pool(2, op="maximum"),
    )
    x = normal(4, 3, 8, 8)
    statistics = []
    for offloaded in (False, True):
        net[1].running_mean.assign(net[1].running_mean * 0)
        if offloaded:
            with Leaving() as block:
                loss = (net(x) ** 3).mean()
        else:
            loss = (net(x) ** 3).mean()
        found = gradients(loss, trained(net))
        statistics.append((net[1].running_mean.numpy(), found))
    (mean, plain), (again, found) = statistics
    np.testing.assert_array_equal(again, mean)
    assert error(found, plain) <= 1e-5
    # It comes back bit for bit, so it may leave; under a codec it may not.
    assert "compared in backward" not in block.kept_bytes


def test_dropout_draws_what_it_draws_in_plain_training(backend):
    from jittor import nn

    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5, is_train=True), nn.Linear(64, 64))
    plain, offloaded, _ = compared(net, normal(32, 64), reduce=lambda y: y.sum())
    agree(plain, offloaded, 1e-6)


def test_the_inputs_of_checkpointed_regions_leave(backend):
    net, x = chain(4, 64), normal(128, 64)
    receipt = xmem.apply_checkpointing(net, "every")
    try:
        plain, offloaded, block = compared(net, x)
    finally:
        receipt.undo()
    agree(plain, offloaded)
    assert block.away_bytes == 3 * 128 * 64 * 4  # the first region's is the batch
    assert block.depot.stats.count == 0


def test_the_loss_may_be_waited_for_before_backward(backend):
    import jittor as jt

    net, x = chain(4, 64), normal(256, 64)
    expected = gradients((net(x) ** 2).mean(), trained(net))
    with Leaving() as block:
        loss = (net(x) ** 2).mean()
    loss.sync()
    assert block.depot.stats.count > 0
    found = [g.numpy() for g in jt.grad(loss, trained(net), retain_graph=False)]
    assert error(found, expected) <= 1e-6
    assert block.depot.stats.count == 0


def test_two_blocks_alternate(backend):
    import jittor as jt

    first, second, x = chain(2, 64), chain(2, 64), normal(64, 64)
    expected = gradients((second(first(x)) ** 2).mean(), [*trained(first), *trained(second)])
    with Leaving() as one:
        hidden = first(x)
    with Leaving("host") as other:
        loss = (second(hidden) ** 2).mean()
    del hidden
    found = jt.grad(loss, [*trained(first), *trained(second)], retain_graph=False)
    assert error([g.numpy() for g in found], expected) <= 1e-6
    assert one.depot.stats.written_bytes > 0 < other.depot.stats.written_bytes
    assert one.depot.stats.count == other.depot.stats.count == 0


def test_twenty_steps_leave_no_tensor_and_no_number(backend):
    import jittor as jt
    from jittor import nn

    net = nn.Sequential(*chain(3, 32), nn.BatchNorm1d(32), nn.Dropout(0.2, is_train=True))
    x = normal(64, 32)
    optimizer = jt.optim.Adam(trained(net), 1e-3)
    seen = []
    for step in range(23):
        with Leaving("host" if step % 2 else "disk"):
            loss = (net(x) ** 2).mean()
        optimizer.step(loss)
        del loss
        seen.append(live(backend))
    assert len(set(seen[3:])) == 1, seen
    assert seen[-1][-2:] == (0, 0)


def test_a_forward_without_backward_leaves_nothing(backend):
    net, x = chain(3, 64), normal(256, 64)
    seen = []
    for waited in (True, False, True, True, False):
        with Leaving() as block:
            loss = (net(x) ** 2).mean()
        if waited:
            loss.sync()
        del loss, block
        seen.append(live(backend))
    assert len(set(seen[1:])) == 1, seen
    assert seen[-1][-2:] == (0, 0)


def test_a_depot_lives_until_pending_work_is_done(backend):
    import jittor as jt

    net, x = chain(3, 64), normal(256, 64)
    expected = gradients((net(x) ** 2).mean(), trained(net))
    with Leaving():  # nobody but the graph holds it
        loss = (net(x) ** 2).mean()
    found = jt.grad(loss, trained(net), retain_graph=False)
    del loss
    assert live(backend)[-1] == 0  # all ran, so it is closed
    assert error([g.numpy() for g in found], expected) <= 1e-6


def test_accumulation_loss_scaling_and_autocast(backend):
    import jittor as jt

    def trained_with(offloads):
        jt.set_global_seed(0)
        np.random.seed(0)
        net, x = chain(3, 64), normal(64, 64)
        optimizer = jt.optim.Adam(trained(net), 1e-3)
        scaler = xmem.GradScaler(8.0)
        for _ in range(3):
            with xmem.accumulate(2):
                for _ in range(2):
                    with Leaving() if offloads else nullcontext(), xmem.autocast():
                        loss = (net(x).float32() ** 2).mean()
                    xmem.backward(scaler.scale(loss), optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [p.numpy() for p in trained(net)]

    assert error(trained_with(True), trained_with(False)) <= 1e-6


def test_a_tensor_that_asks_for_gradients_and_is_held_elsewhere_stays(backend):
    x = learnt(64, 64)
    plain, offloaded, _ = compared(chain(1, 64), x, targets=[x])
    agree(plain, offloaded)
