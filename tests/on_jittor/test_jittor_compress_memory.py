"""What compressed activations keep on Jittor: exact bytes, nothing after a step, all undone."""

import gc

import numpy as np
import pytest
from chain import (
    MIB,
    chain,
    error,
    gradients,
    normal,
    peak_above_static_bytes,
    trained,
    transformer,
)

import xmem


def stepped(net, x, **options):
    import jittor as jt

    if options:
        with xmem.compress_activations(**options):
            loss = (net(x) ** 2).mean()
    else:
        loss = (net(x) ** 2).mean()
    return jt.grad(loss, trained(net), retain_graph=False)


def peaks(backend, net, x, times=3, **options):
    return [
        peak_above_static_bytes(backend.measure, lambda: stepped(net, x, **options)) / MIB
        for _ in range(times)
    ]


@pytest.fixture(scope="module")
def standard(backend):
    import jittor as jt

    jt.set_global_seed(0)
    np.random.seed(0)
    net, x = chain(), normal(4096, 256)
    plain = peaks(backend, net, x)
    assert plain[-1] == pytest.approx(192.25, abs=0.01), plain
    return net, x, [g.numpy() for g in stepped(net, x)]


# One activation is 4 MiB. What a layer reads of GELU is made of GELU's input again, so of the 48
# tensors that backward reads 24 are packed; gradients of parameters take 6 MiB.
@pytest.mark.parametrize(("bits", "most", "furthest"), [(8, 39.5, 0.01), (4, 28, 0.12)])
def test_the_standard_chain(backend, standard, bits, most, furthest):
    net, x, expected = standard
    found = [g.numpy() for g in stepped(net, x, bits=bits)]
    shown = peaks(backend, net, x, bits=bits)
    assert len(set(shown)) == 1, shown
    assert shown[-1] <= most, shown
    errors = [error([f], [e]) for f, e in zip(found, expected, strict=True)]
    assert max(errors) <= furthest, errors


def test_the_standard_chain_checkpointed_and_packed(backend, standard):
    net, x, expected = standard
    receipt = xmem.apply_checkpointing(net, "every")
    try:
        found = [g.numpy() for g in stepped(net, x, bits=8)]
        shown = peaks(backend, net, x, bits=8)
    finally:
        receipt.undo()
    assert shown[-1] <= 39.4, shown
    assert max(error([f], [e]) for f, e in zip(found, expected, strict=True)) <= 0.01


def test_a_transformer_keeps_a_third_of_its_activations(backend):
    import jittor as jt

    jt.set_global_seed(0)
    net, x = transformer(6), normal(4, 128, 256)
    gradient_mib = sum(p.nbytes for p in trained(net)) / MIB
    plain = peaks(backend, net, x)[-1] - gradient_mib
    packed = peaks(backend, net, x, bits=8)[-1] - gradient_mib
    assert packed <= 0.4 * plain, (packed, plain)


def test_convolutions_and_relu(backend):
    from jittor import nn

    layers = [m for _ in range(10) for m in (nn.Conv(32, 32, 3, padding=1), nn.ReLU())]
    net, x = nn.Sequential(*layers), normal(8, 32, 32, 32)
    plain = peaks(backend, net, x)[-1]
    packed = peaks(backend, net, x, bits=8)[-1]
    assert packed <= 0.45 * plain, (packed, plain)


def live(backend):
    import jittor as jt

    gc.collect()
    jt.sync_all(True)
    counts = jt.liveness_info()
    return backend.measure.counters().allocated_bytes, counts["hold_vars"], counts["lived_vars"]


def test_twenty_steps_leave_nothing(backend):
    import jittor as jt
    from jittor import nn

    net = nn.Sequential(*chain(3, 32), nn.BatchNorm1d(32), nn.Dropout(0.2, is_train=True))
    x = normal(64, 32)
    optimizer = jt.optim.Adam(trained(net), 1e-3)
    seen = []
    for _ in range(23):
        with xmem.compress_activations(min_bytes=0):
            loss = (net(x) ** 2).mean()
        optimizer.step(loss)
        del loss
        seen.append(live(backend))
    assert len(set(seen[3:])) == 1, seen


def test_a_forward_without_backward_leaves_nothing(backend):
    net, x = chain(3, 64), normal(256, 64)
    seen = []
    for _ in range(4):
        with xmem.compress_activations(min_bytes=0):
            loss = (net(x) ** 2).mean()
        loss.sync()
        del loss
        seen.append(live(backend))
    assert len(set(seen[1:])) == 1, seen


@pytest.mark.filterwarnings("ignore:a value was waited for")
def test_the_loss_may_be_waited_for_before_backward(backend):
    import jittor as jt

    net, x = chain(4, 64), normal(256, 64)
    expected = gradients((net(x) ** 2).mean(), trained(net))
    with xmem.compress_activations(min_bytes=0):
        loss = (net(x) ** 2).mean()
    loss.sync()
    found = [g.numpy() for g in jt.grad(loss, trained(net), retain_graph=False)]
    assert max(error([f], [e]) for f, e in zip(found, expected, strict=True)) <= 0.02


@pytest.mark.filterwarnings("ignore:a value was waited for")
def test_a_loss_that_is_looked_at_before_backward_costs_no_bytes(backend):
    """As users do who log it; plain training keeps more then, too."""
    import jittor as jt

    net, x = chain(12, 256), normal(2048, 256)

    def step(*, looked_at):
        with xmem.compress_activations():
            loss = (net(x) ** 2).mean()
        if looked_at:
            loss.item()
        return jt.grad(loss, trained(net), retain_graph=False)

    lazy, looked = (
        [
            peak_above_static_bytes(backend.measure, lambda: step(looked_at=flag))  # noqa: B023
            for _ in range(3)
        ][-1]
        for flag in (False, True)
    )
    assert looked <= 1.05 * lazy, (looked, lazy)


def test_all_is_undone_at_the_end_and_on_an_exception(backend):
    import jittor as jt
    from jittor import nn

    before = jt.Module.__call__, nn.softmax, jt.Var.softmax
    net, x = chain(2, 32), normal(16, 32)
    with xmem.compress_activations(min_bytes=0):
        assert jt.Module.__call__ is not before[0]
        net(x)
    assert (jt.Module.__call__, nn.softmax, jt.Var.softmax) == before

    class Broken(nn.Module):
        def execute(self, x):
            raise ArithmeticError(x.shape)

    y = net(x)
    held = y.id
    with pytest.raises(ArithmeticError), xmem.compress_activations(min_bytes=0):
        Broken()(y)
    assert (jt.Module.__call__, nn.softmax, jt.Var.softmax) == before
    assert y.id == held


def test_layers_are_named_skipped_and_given_bits_of_their_own(backend):
    from jittor import nn

    net, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), normal(256, 64)
    with xmem.compress_activations(bits={"1": 8, "2": 4}, min_bytes=0, model=net) as block:
        net(x)
    assert block.layers == {"1": 8, "2": 4}
    with xmem.compress_activations(skip=["1", net[2]], min_bytes=0) as block:
        net(x)
    assert set(block.layers) == {"3"}
    assert block.kept_bytes["skipped"] == 2 * 256 * 64 * 4
    with (
        pytest.warns(xmem.XmemWarning, match="applied to nothing.*below 1.00 MiB"),
        xmem.compress_activations(min_bytes="1MiB"),
    ):
        net(x)


def test_what_cannot_be_combined_is_refused(backend):
    import jittor as jt

    net, x = chain(2, 32), normal(16, 32)

    def entering(x):
        with xmem.compress_activations():
            return net(x)

    with pytest.raises(xmem.CompositionError, match="inside a checkpointed"):
        xmem.checkpoint(entering, x)
    with xmem.compress_activations(min_bytes=0):
        loss = (net(x) ** 2).mean()
    gradient = jt.grad(loss, trained(net)[0])
    with pytest.raises((xmem.CompositionError, RuntimeError), match="second derivatives"):
        jt.grad((gradient**2).sum(), trained(net)[2])


def test_a_planned_model_is_refused(backend):
    class Planned:
        recomputes = True

        def __call__(self, x):
            return x

    net, x = chain(2, 32), normal(16, 32)
    net[1].execute = Planned()
    with (
        pytest.raises(xmem.CompositionError, match="a planned model was called inside"),
        xmem.compress_activations(),
    ):
        net(x)


def test_under_autocast_halves_are_packed(backend):
    net, x = chain(4, 64), normal(256, 64)
    found = []
    for compressed in (False, True):
        if compressed:
            with xmem.compress_activations(min_bytes=0) as block, xmem.autocast():
                loss = (net(x).float32() ** 2).mean()
        else:
            with xmem.autocast():
                loss = (net(x).float32() ** 2).mean()
        found.append(gradients(loss, trained(net)))
    assert max(error([f], [e]) for f, e in zip(*reversed(found), strict=True)) <= 0.03
    assert block.packed_bytes <= 0.55 * block.raw_bytes  # 8 of 16 bits
    assert block.raw_bytes > 0


def test_micro_batches_add_up(backend):
    import jittor as jt

    net, x = chain(2, 64), normal(128, 64)
    optimizer = jt.optim.SGD(trained(net), 0.1)
    xmem.backward((net(x) ** 2).mean(), optimizer)
    expected = backend.training.gradients(net, optimizer)
    xmem.zero_grad(optimizer)
    with xmem.accumulate(2):
        for part in (x[:64], x[64:]):
            with xmem.compress_activations(min_bytes=0):
                loss = (net(part) ** 2).mean()
            xmem.backward(loss, optimizer)
    found = backend.training.gradients(net, optimizer)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert error([gradient], [expected[name]]) <= 0.02
