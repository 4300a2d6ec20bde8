"""What recomputed regions keep on Jittor: exact bytes, and nothing after a step."""

import gc

import pytest
from chain import (
    MIB,
    chain,
    counted,
    error,
    gradients,
    normal,
    peak_above_static_bytes,
    trained,
    transformer,
)

import xmem

# What the standard chain needs above its static bytes, in MiB, by the number of segments.
MOST = {24: 105, 12: 65, 6: 57, 4: 65, 2: 105}


def stepped(net, x, *, retain_graph=False):
    import jittor as jt

    return jt.grad((net(x) ** 2).mean(), trained(net), retain_graph=retain_graph)


def peaks(backend, net, x, times=3, **options):
    return [
        peak_above_static_bytes(backend.measure, lambda: stepped(net, x, **options)) / MIB
        for _ in range(times)
    ]


@pytest.fixture(scope="module")
def plain_chain(backend):
    import jittor as jt

    jt.set_global_seed(0)
    net, x = chain(), normal(4096, 256)
    shown = peaks(backend, net, x)
    assert len(set(shown)) == 1, shown
    assert shown[0] == pytest.approx(192.25, abs=0.01), shown
    return net, x, [g.numpy() for g in stepped(net, x)]


@pytest.mark.parametrize("segments", MOST)
def test_the_standard_chain_in_segments(backend, plain_chain, segments):
    net, x, expected = plain_chain
    receipt = xmem.apply_checkpointing(net, segments)
    counts = counted([block[0] for block in net])
    try:
        found = [g.numpy() for g in stepped(net, x)]
        assert counts == [2] * 24
        shown = peaks(backend, net, x)
    finally:
        receipt.undo()
        for block in net:
            del block[0].execute
    assert len(set(shown)) == 1, shown
    assert shown[0] <= MOST[segments], shown
    assert error(found, expected) <= 1e-6


def test_a_kept_graph_keeps_gradients_between_regions_and_no_insides(backend, plain_chain):
    net, x, _ = plain_chain
    receipt = xmem.apply_checkpointing(net, 6)
    shown = peaks(backend, net, x, retain_graph=True)
    receipt.undo()
    # jt.grad keeps the graph unless it is told not to; without regions that takes 382 MiB.
    assert shown[-1] <= 61, shown


def test_without_lazy_execution_regions_save_all_the_same_and_say_so(backend, monkeypatch):
    import jittor as jt
    from xmem_jittor import notices

    monkeypatch.setattr(notices, "_eager_told", False)
    jt.set_global_seed(0)
    net, x = chain(8), normal(1024, 256)
    with jt.flag_scope(lazy_execution=0):
        expected = [g.numpy() for g in stepped(net, x)]
        plain = peaks(backend, net, x)[-1]
        receipt = xmem.apply_checkpointing(net, 2)
        with pytest.warns(xmem.XmemWarning, match="lazy_execution is 0"):
            found = [g.numpy() for g in stepped(net, x)]
        shown = peaks(backend, net, x)[-1]
        assert jt.flags.lazy_execution == 0
        receipt.undo()
    assert shown <= 0.35 * plain, (shown, plain)
    assert error(found, expected) <= 1e-6


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_transformer_keeps_a_fifth_of_its_activations(backend, dropout):
    import jittor as jt

    jt.set_global_seed(0)
    net, x = transformer(dropout=dropout), normal(4, 128, 256)
    gradient_mib = sum(p.nbytes for p in trained(net)) / MIB
    plain = peaks(backend, net, x)[-1] - gradient_mib
    expected = gradients((net(x) ** 2).mean(), trained(net))
    xmem.apply_checkpointing(net, "every")
    found = gradients((net(x) ** 2).mean(), trained(net))
    kept = peaks(backend, net, x)[-1] - gradient_mib
    assert kept <= 0.2 * plain, (kept, plain)
    if not dropout:
        assert error(found, expected) <= 1e-6


def live(backend):
    import jittor as jt

    gc.collect()
    jt.sync_all(True)
    counts = jt.liveness_info()
    return backend.measure.counters().allocated_bytes, counts["hold_vars"], counts["lived_ops"]


def test_a_hundred_steps_leave_nothing(backend):
    import jittor as jt
    from jittor import nn

    net = nn.Sequential(*chain(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.2, is_train=True))
    x = normal(64, 32)
    xmem.apply_checkpointing(net, 2, blocks=list(net)[:6])
    optimizer = jt.optim.Adam(trained(net), 1e-3)
    seen = []
    for step in range(103):
        y = x
        for block in list(net)[:6]:
            y = block(y)
        y = xmem.checkpoint(net[7], xmem.checkpoint(net[6], y))
        optimizer.step((y**2).mean())
        del y
        if step in (2, 102):
            seen.append(live(backend))
    assert seen[0] == seen[1]


def test_regions_do_not_change_what_an_optimizer_keeps(backend):
    import jittor as jt

    seen = []
    for layout in (None, 2):
        net, x = chain(4, 32), normal(64, 32)
        if layout:
            xmem.apply_checkpointing(net, layout)
        optimizer = jt.optim.Adam(trained(net), 1e-3)
        before = live(backend)[0]
        for _ in range(3):
            optimizer.step((net(x) ** 2).mean())
        seen.append(live(backend)[0] - before)
        del net, optimizer
    assert seen[0] == seen[1]


def test_what_is_recomputed_and_not_asked_for_is_given_up_by_the_next_forward(backend):
    import jittor as jt

    net, x = chain(4, 256), normal(1024, 256)
    xmem.apply_checkpointing(net, 1)
    loss = (net(x) ** 2).mean()
    [found] = jt.grad(loss, [net[3][0].weight], retain_graph=True)
    found.sync()
    held = live(backend)[0]
    again = (net(x) ** 2).mean()
    del again
    assert held - live(backend)[0] > MIB
    del loss
