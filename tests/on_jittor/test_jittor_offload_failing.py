"""A disk without room, and bytes that do not come back: an error in the step, and nothing lost."""

import pytest
from chain import chain, error, gradients, normal, trained
from leaving import MIB, Leaving, live

import xmem
from xmem.conformance.full_disk import files_of_at_most

pytestmark = pytest.mark.filterwarnings("ignore:a value was waited for")


@pytest.mark.parametrize(("bits", "room"), [(None, MIB), (8, MIB // 4)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_full_disk_raises_within_the_step_and_loses_nothing(backend, bits, room, checkpointed):
    import jittor as jt

    net, x = chain(5, 128), normal(1024, 128)
    most = 0.0 if bits is None else 0.02
    receipt = xmem.apply_checkpointing(net, "every") if checkpointed else None
    expected = gradients((net(x) ** 2).mean(), trained(net))
    for waits_for_loss in (False, True):
        with Leaving(bits=bits, min_bytes=64 << 10) as block:
            loss = (net(x) ** 2).mean()
        with files_of_at_most(room):
            found = None if waits_for_loss else jt.grad(loss, trained(net), retain_graph=False)
            with pytest.raises(xmem.OffloadError, match=r"File too large.*Nothing is lost") as told:
                loss.item() if waits_for_loss else jt.sync(found)
            assert isinstance(told.value.__cause__, RuntimeError)
            assert 0 < block.depot.stats.stored_bytes <= room
            found = found or jt.grad(loss, trained(net), retain_graph=False)
            assert error([g.numpy() for g in found], expected) <= most
        stats = block.depot.stats
        assert stats.count == 0 < stats.read_bytes, stats
        assert isinstance(block.depot.failure, xmem.OffloadError)
        with block:  # what is asked of it later stays, and is told no more
            loss = (net(x) ** 2).mean()
        assert error(gradients(loss, trained(net)), expected) <= most
        assert block.depot.stats.written_bytes == stats.written_bytes
        del told, loss, found, block
    assert live(backend)[-2:] == (0, 0)
    if receipt:
        receipt.undo()


def test_an_optimizer_steps_on_after_a_full_disk(backend):
    import jittor as jt

    net, x = chain(4, 128), normal(1024, 128)
    optimizer = jt.optim.SGD(trained(net), 1e4)  # or parameters hardly move
    before = [p.numpy() for p in trained(net)]
    expected = gradients((net(x) ** 2).mean(), trained(net))
    with Leaving(min_bytes=64 << 10):
        loss = (net(x) ** 2).mean()
    with files_of_at_most(MIB // 2):
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        with pytest.raises(xmem.OffloadError, match="File too large"):
            jt.sync_all(True)
        jt.sync_all(True)
    moved = [p.numpy() for p in trained(net)]
    found = [(b - m) / 1e4 for b, m in zip(before, moved, strict=True)]
    assert error(found, expected) <= 1e-3  # the difference of two numbers near each other


def test_bytes_that_are_gone_are_missed(backend):
    import jittor as jt

    net, x = chain(3, 128), normal(1024, 128)
    with Leaving(min_bytes=64 << 10) as block:
        loss = (net(x) ** 2).mean()
    loss.sync()
    for number in range(1, 20):
        block.depot.drop(number)
    found = jt.grad(loss, trained(net), retain_graph=False)
    with pytest.raises(xmem.OffloadError, match="not there under this number"):
        jt.sync(found)
    del loss, found  # which cannot be computed any more


def test_other_errors_of_jittor_stay_what_they_are(backend):
    import jittor as jt

    net, x = chain(2, 64), normal(256, 64)
    with Leaving() as block:
        loss = (net(x) ** 2).mean()
    large = jt.ones((256, 256))
    backend.measure.set_limit(backend.measure.counters().allocated_bytes)
    with pytest.raises(RuntimeError, match="out of memory"):
        large.sync()
    backend.measure.set_limit(None)
    assert block.depot.failure is None
    gradients(loss, trained(net))


def test_executing_calls_are_jittors_own_when_no_depot_lives(backend):
    import gc

    import jittor as jt

    own = (jt.sync, jt.sync_all, jt.fetch_sync, jt.Var.sync, jt.Var.item, vars(jt.Var)["data"])

    def now():
        return (jt.sync, jt.sync_all, jt.fetch_sync, jt.Var.sync, jt.Var.item, vars(jt.Var)["data"])

    net, x = chain(2, 64), normal(256, 64)
    with Leaving():
        loss = (net(x) ** 2).mean()
    assert now() != own
    xmem.pool.configure(on_oom="trim_and_retry")  # others come and go meanwhile
    gradients(loss, trained(net))
    del loss
    gc.collect()
    assert now() != own
    xmem.pool.configure(on_oom="raise")
    assert now() == own


def test_an_error_that_nobody_converted_is_not_taken_for_a_later_one(backend):
    """The function had been looked up before there was a depot."""
    import jittor as jt

    own, net, x = jt.sync, chain(4, 128), normal(1024, 128)
    with Leaving(min_bytes=64 << 10) as block:
        loss = (net(x) ** 2).mean()
    with files_of_at_most(MIB // 2), pytest.raises(RuntimeError, match="could not be stored"):
        own([loss])
    large = jt.ones((256, 256))
    backend.measure.set_limit(backend.measure.counters().allocated_bytes)
    with pytest.raises(RuntimeError, match="out of memory"):
        large.sync()
    backend.measure.set_limit(None)
    assert isinstance(block.depot.failure, xmem.OffloadError)
    gradients(loss, trained(net))
