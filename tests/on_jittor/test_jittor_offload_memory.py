"""What leaves for backward on Jittor: bytes on the device. Times: benchmarks/offload.py."""

import gc

import pytest
from chain import MIB, chain, normal, peak_above_static_bytes, trained, transformer
from leaving import Leaving

import xmem
from xmem.conformance.full_disk import files_of_at_most


def stepped(net, x, **options):
    import jittor as jt

    if options:
        with Leaving(min_bytes=64 << 10, **options):
            loss = (net(x) ** 2).mean()
    else:
        loss = (net(x) ** 2).mean()
    return jt.grad(loss, trained(net), retain_graph=False)


def peaks(backend, net, x, times=2, **options):
    return [
        peak_above_static_bytes(backend.measure, lambda: stepped(net, x, **options)) / MIB
        for _ in range(times)
    ]


@pytest.fixture(scope="module")
def standard(backend):
    import jittor as jt
    import numpy as np

    jt.set_global_seed(0)
    np.random.seed(0)
    net, x = chain(), normal(4096, 256)
    plain = peaks(backend, net, x)
    assert plain[-1] == pytest.approx(192.25, abs=0.01), plain
    return net, x, [g.numpy() for g in stepped(net, x)]


# Gradients of parameters take 6 MiB, an activation 4: the gradient that comes, GELU's input, and
# Linear's, which is made of the GELU's before it, are there at once.
@pytest.mark.parametrize("options", [{"to": "disk"}, {"to": "host"}, {"to": "disk", "bits": 8}])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_standard_chain(backend, standard, options, checkpointed):
    import numpy as np

    net, x, expected = standard
    receipt = xmem.apply_checkpointing(net, "every") if checkpointed else None
    try:
        found = [g.numpy() for g in stepped(net, x, **options)]
        shown = peaks(backend, net, x, **options)
    finally:
        if receipt:
            receipt.undo()
    assert len(set(shown)) == 1, shown
    assert shown[-1] <= 22, (shown, 192.25)
    if "bits" not in options:
        for f, e in zip(found, expected, strict=True):
            np.testing.assert_array_equal(f, e)


def test_the_peak_of_a_transformer_grows_by_its_gradients_only(backend):
    import jittor as jt

    jt.set_global_seed(0)
    x, shown = normal(16, 32, 32), {}
    for depth in (6, 24):
        net = transformer(depth, 32)
        held = sum(p.nbytes for p in trained(net)) / MIB
        alone = peaks(backend, net, x, to="disk")[-1] - held
        receipt = xmem.apply_checkpointing(net, "every")
        both = peaks(backend, net, x, to="disk")[-1] - held
        checkpointed = peaks(backend, net, x)[-1] - held
        receipt.undo()
        shown[depth] = alone, both, checkpointed
    for kind in (0, 1):
        assert shown[24][kind] <= shown[6][kind] * 1.02, shown
    # Without it the inputs stay, 64 KiB a block; where backward gives them back, gradients come.
    assert shown[24][2] > shown[6][2] * 1.1, shown


def test_what_cannot_be_stored_keeps_no_more_memory_than_plain_training(backend):
    """All of it is on the device then, once."""
    import jittor as jt

    net, x = chain(6), normal(1024, 256)
    plain = peaks(backend, net, x)[-1]
    block = Leaving(min_bytes=64 << 10)

    def step():
        with block:
            loss = (net(x) ** 2).mean()
        return jt.grad(loss, trained(net), retain_graph=False)

    jt.sync(stepped(net, x, to="disk"))  # compiles, which needs files too
    found = step()
    with files_of_at_most(64 << 10), pytest.raises(xmem.OffloadError):
        jt.sync(found)
    del found
    gc.collect()
    kept = peak_above_static_bytes(backend.measure, step) / MIB
    assert kept <= plain, (kept, plain)
