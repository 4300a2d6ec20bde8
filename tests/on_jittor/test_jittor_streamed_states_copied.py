"""Copies of an optimizer whose states are in a depot."""

import copy
import gc
import weakref

import numpy as np
import pytest
from chain import chain, normal, trained

import xmem


@pytest.mark.parametrize("kind", ["Adam", "xmem AdamW"])
def test_a_copy_is_a_plain_optimizer_with_the_same_states(backend, kind):
    import jittor as jt
    from xmem_jittor import moving
    from xmem_jittor.streamed_states import is_streamed

    def stepped(model, optimizer):
        xmem.backward((model(x) ** 2).mean(), optimizer)
        xmem.optimizer_step(optimizer)
        jt.sync_all(True)
        return [p.numpy() for p in trained(model)]

    net, x = chain(2, 64), normal(16, 64)
    make = jt.optim.Adam if kind == "Adam" else xmem.optim.AdamW
    optimizer = make(trained(net), 1e-3)
    stepped(net, optimizer)
    receipt = xmem.offload_optimizer(optimizer, "disk", block="16KiB")
    away = moving.streamed().pieces
    assert away > 0
    twin_net, twin = copy.deepcopy((net, optimizer))
    assert not is_streamed(twin)
    assert moving.streamed().pieces == away
    before = [p.numpy() for p in trained(net)]
    found = stepped(twin_net, twin)
    assert all((p.numpy() == b).all() for p, b in zip(trained(net), before, strict=True))
    for f, e in zip(found, stepped(net, optimizer), strict=True):
        np.testing.assert_allclose(f, e, rtol=0, atol=1e-7)
    known = weakref.ref(optimizer)
    receipt.undo()
    del optimizer, receipt
    gc.collect()
    assert known() is None
    stepped(twin_net, twin)
