"""Training with parameters in a depot: the steps are those of plain training."""

import gc

import numpy as np
import pytest
from chain import chain, normal, trained
from streaming import descend, furthest, moving, network, offload, tokens, values

import xmem

__all__ = ["moving"]  # the fixture


def train(steps=20, prepare=None):
    """Return the losses, the final values, and what lived after each step."""
    import jittor as jt
    from xmem_jittor import moving

    net, batch = network(), tokens()
    if prepare is not None:
        prepare(net)
    optimizer = jt.optim.SGD(trained(net), 1e-2)
    losses, lived = [], []
    for _ in range(steps):
        loss = (net(batch) ** 2).mean()
        descend(optimizer, loss)
        losses.append(loss.item())
        del loss
        lived.append((jt.number_of_lived_vars(), jt.number_of_lived_ops(), moving.streamed()[0::4]))
    return np.array(losses), values(net), lived


@pytest.fixture(scope="module")
def plain(backend):
    return train()


@pytest.mark.parametrize("to", ["disk", "host"])
def test_twenty_steps_are_those_of_plain_training_and_leave_nothing(moving, plain, to):
    losses, found, lived = train(prepare=lambda net: offload(net, to, prefetch="64KiB"))
    # Layers' ends are borders of fused kernels: the last bit may differ.
    np.testing.assert_allclose(losses, plain[0], rtol=1e-6)
    assert furthest(found, plain[1]) <= 1e-6
    assert lived[2] == lived[-1]
    largest = 4 * (2 * 128 * 256 + 256 + 5 * 128)
    assert moving.streamed().peak_here_bytes <= largest + 4 * 128  # and the position beside blocks


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_with_its_states_away_too_next_to_nothing_stays_on_the_device(moving, backend, kind):
    import jittor as jt

    from xmem.offload.streaming import offload_optimizer

    found, x = [], normal(16, 256)
    start = [p.numpy().copy() for p in chain(6, 256).parameters()]
    for away in (False, True):
        net = chain(6, 256)
        for parameter, value in zip(net.parameters(), start, strict=True):
            parameter.assign(jt.array(value))
        own = {"sgd": jt.optim.SGD, "adam": jt.optim.Adam}[kind]
        optimizer = own(trained(net), 1e-3, **({"momentum": 0.9} if kind == "sgd" else {}))
        if away:
            offload_optimizer(optimizer, "disk", block="512KiB")
            offload(net)
        losses = []
        for step in range(20):
            if away and step == 10:
                static = backend.measure.counters().allocated_bytes
                gc.collect()
                moving.streamed()
            loss = ((net(x) - x) ** 2).mean()
            xmem.backward(loss, optimizer)
            xmem.clip_grad_norm_(optimizer, 1.0)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
            losses.append(loss.item())
        found.append((losses, values(net)))
    held = moving.streamed()
    print("static", static, "away", held.away_bytes, "at once", held.peak_here_bytes)
    assert held.away_bytes >= (2 if kind == "sgd" else 3) * 6 * 4 * 256 * 257
    assert static <= 100 << 10, (static, held.away_bytes)  # the batch and losses
    assert held.peak_here_bytes == 4 * 256 * 257
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    assert furthest(found[1][1], found[0][1]) <= 1e-6


@pytest.mark.filterwarnings("ignore:a segment was cut short")  # a block is called twice
@pytest.mark.parametrize("first", ["offload", "checkpointing"])
@pytest.mark.parametrize("layout", ["every", "sqrt"])
def test_checkpointing_goes_with_it_in_either_order(moving, plain, first, layout):
    def prepare(net):
        calls = [offload, lambda net: xmem.apply_checkpointing(net, layout)]
        for call in calls if first == "offload" else reversed(calls):
            call(net)

    moving.streamed()
    losses, _, _ = train(steps=5, prepare=prepare)
    np.testing.assert_allclose(losses, plain[0][:5], rtol=1e-6)
    assert moving.streamed().peak_here_bytes <= 2 * 4 * (2 * 128 * 256 + 256 + 5 * 128)
