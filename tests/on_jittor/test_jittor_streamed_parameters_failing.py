"""Depots that run full or break, with parameters in them."""

import gc
from pathlib import Path

import numpy as np
import pytest
from chain import chain, normal, trained
from streaming import descend, furthest, network, noted, offload, tokens, values

import xmem
from xmem.conformance.full_disk import files_of_at_most
from xmem.errors import OffloadError


def test_a_disk_that_is_full_at_once_changes_nothing(backend):
    from xmem_jittor import moving

    net = network()
    net(tokens()).sync()
    before, allocated = values(net), backend.measure.counters().allocated_bytes
    pieces = moving.streamed().pieces
    with files_of_at_most(300 << 10), pytest.raises(OffloadError, match="Nothing is lost"):
        offload(net)
    gc.collect()
    assert backend.measure.counters().allocated_bytes == allocated
    assert furthest(values(net), before) == 0
    assert not any(noted(p) for p in net.parameters())
    assert not any("execute" in vars(module) for module in net.modules())
    assert moving.streamed().pieces <= pieces
    offload(net)
    assert furthest(values(net), before) == 0


def test_a_disk_that_runs_full_within_a_step_loses_nothing_and_training_goes_on(backend):
    import jittor as jt
    from xmem_jittor import moving

    found = []
    for full in (False, True):
        net, batch = network(), tokens()
        optimizer = jt.optim.SGD(trained(net), 1e-2)
        if full:
            offload(net)
        losses = []
        for step in range(4):
            loss = (net(batch) ** 2).mean()
            if full and step == 1:
                with files_of_at_most(0), pytest.raises(OffloadError, match="train on without"):
                    descend(optimizer, loss, block=1000)
            else:
                descend(optimizer, loss, block=1000)
            losses.append(loss.item())
        found.append((losses, values(net)))
        if full:
            assert not any(moving.is_away(p) for p in trained(net)), "they stay where they are"
        del net, optimizer, loss
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    assert furthest(found[1][1], found[0][1]) <= 1e-5


def test_what_does_not_come_back_is_an_error_that_says_so(backend):
    import jittor as jt

    net, x = chain(4, 64), normal(4, 64)
    expected = net(x).numpy()
    receipt = offload(net)
    depot = noted(net[0][0].weight).depot
    [scratch] = [
        file
        for file in Path("/proc/self/fd").iterdir()
        if file.exists() and file.stat().st_size == depot.stats.file_bytes
    ]
    with scratch.open("r+b") as file:
        whole = file.read()
        file.truncate(0)
    y = net(x)
    with pytest.raises(OffloadError, match="it ends before them"):
        y.sync()
    with pytest.raises(OffloadError, match="it ends before them"):
        receipt.undo()
    with scratch.open("r+b") as file:
        file.write(whole)
    assert (y.numpy() == expected).all(), "what is pending can be executed"
    receipt.undo()
    assert (net(x).numpy() == expected).all()
    del y
    jt.sync_all(True)


def test_a_layer_that_does_not_fit_raises_and_can_run_later(backend):
    net, x = chain(4, 256), normal(4, 256)
    expected = net(x).numpy()
    offload(net)
    gc.collect()
    y = net(x)
    backend.measure.set_limit(backend.measure.counters().allocated_bytes + (100 << 10))
    with pytest.raises(RuntimeError, match="out of memory"):
        y.sync()
    backend.measure.set_limit(None)
    assert (y.numpy() == expected).all()


@pytest.mark.parametrize("what", ["parameters", "states"])
def test_an_undo_that_does_not_fit_raises_and_can_be_called_again(backend, what):
    import jittor as jt

    net, x = chain(4, 256), normal(4, 256)
    optimizer = jt.optim.Adam(trained(net), 1e-3)
    xmem.backward((net(x) ** 2).mean(), optimizer)
    xmem.optimizer_step(optimizer)
    xmem.zero_grad(optimizer)
    before, expected = values(net), net(x).numpy()
    receipt = offload(net) if what == "parameters" else xmem.offload_optimizer(optimizer, "disk")
    gc.collect()
    jt.sync_all(True)
    backend.measure.set_limit(backend.measure.counters().allocated_bytes + (300 << 10))
    with pytest.raises(xmem.OutOfMemoryError, match="do not fit on the device"):
        receipt.undo()
    backend.measure.set_limit(None)
    assert (net(x).numpy() == expected).all(), "some of them are back"
    receipt.undo()
    assert furthest(values(net), before) == 0
    receipt.undo()
