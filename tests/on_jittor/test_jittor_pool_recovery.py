"""Memory that ends in the middle of a lazy graph: what stays, what is put back, what goes on."""

import gc
import random
import warnings

import pytest
from chain import MIB, normal, trained

import xmem
from xmem.errors import XmemWarning

OPTIMIZERS = ("adam", "momentum", "bits")


@pytest.fixture
def pool(backend):
    yield backend.pool
    backend.pool.configure({}, "raise")
    backend.pool.set_limit(None)


def make(backend, name):
    """A small net of all kinds of tensors: weights, statistics, states of an optimizer."""
    import jittor as jt
    from jittor import nn

    jt.set_global_seed(1)
    net = nn.Sequential(
        nn.Conv(3, 8, 3, padding=1), nn.BatchNorm(8), nn.Relu(), nn.Flatten(),
        nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip
    net.train()
    if name == "momentum":
        optimizer = jt.optim.SGD(net.parameters(), 1e-2, momentum=0.9)
    else:
        optimizer = backend.training.make_optimizer("adam", net, learning_rate=1e-2)
    if name == "bits":
        optimizer = xmem.quantize_optimizer(optimizer, bits=8)
    run = net, optimizer, normal(256, 3, 8, 8), jt.array([i % 10 for i in range(256)])
    jt.sync_all(True)  # random numbers are drawn when it runs
    return run


def step(net, optimizer, x, y):
    import jittor as jt
    from jittor import nn

    loss = nn.cross_entropy_loss(net(x), y)
    optimizer.step(loss)
    jt.sync_all(True)
    return loss.item()


def values(net, optimizer):
    from xmem_jittor import recovery

    return [v.numpy().copy() for v in recovery.held_by(net, optimizer)]


def put(net, optimizer, found, counts):
    import jittor as jt
    from xmem_jittor import recovery

    for tensor, value in zip(recovery.held_by(net, optimizer), found, strict=True):
        tensor.update(jt.array(value))
    recovery.put_counts_back(optimizer, counts)
    jt.sync_all(True)


def equal(first, second):
    return sum(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def fails(pool, run, args, limit):
    """Run it under a limit; the loss and all else of the failed step are gone afterwards."""
    pool.set_limit(limit)
    try:
        run(*args)
    except RuntimeError as error:
        return pool.is_out_of_memory(error)
    else:
        return False
    finally:
        pool.set_limit(None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_errors_at_random_points_leave_jittor_usable_and_results_right(backend, pool, name):
    import jittor as jt
    from xmem_jittor import recovery

    run = make(backend, name)
    net, optimizer, *_ = run
    for _ in range(2):
        step(*run)
    saved, counts = values(net, optimizer), recovery.counts_of(optimizer)
    pool.reset_peak()
    expected = [step(*run) for _ in range(3)]
    peak = pool.stats().peak_allocated_bytes
    put(net, optimizer, saved, counts)
    pool.recover()
    for group in optimizer.param_groups:
        group.pop("grads", None)
    rest, alive = pool.stats().allocated_bytes, jt.liveness_info()
    rng, late = random.Random(5), 0
    for trial in range(10):
        part = trial / 10 + 0.1 * rng.random()  # from forward's first request to the last update
        with pool.watch(net, optimizer), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", XmemWarning)
            limit = rest + int(part * (peak - rest))
            assert fails(pool, step, run, limit), (trial, limit, peak)
            pool.recover()
        assert recovery.pending_tensors() == 0
        kept = equal(saved, values(net, optimizer))
        late += bool(warned)
        # The two statistics of BatchNorm may have seen the batch; nothing else has changed.
        assert warned or kept >= len(saved) - 2, (trial, kept, len(saved))
        if not warned:
            assert recovery.counts_of(optimizer) == counts
        put(net, optimizer, saved, counts)
        gc.collect()
        assert (pool.stats().allocated_bytes, jt.liveness_info()) == (rest, alive), trial
    assert late <= 4
    assert [step(*run) for _ in range(3)] == expected


def test_a_step_that_failed_can_be_taken_again(backend, pool):
    run = make(backend, "adam")
    step(*run)
    other = make(backend, "adam")
    step(*other)
    with pool.watch(run[0], run[1]):
        limit = pool.stats().allocated_bytes + MIB // 2
        assert fails(pool, step, run, limit)
        pool.recover()
        step(*run)
    step(*other)
    assert run[1].n_step == other[1].n_step
    found, expected = values(run[0], run[1]), values(other[0], other[1])
    assert equal(found, expected) == len(found)


def test_what_failed_goes_on_where_it_stopped_once_there_is_memory(backend, pool):
    import jittor as jt

    run, other = make(backend, "adam"), make(backend, "adam")
    expected = step(*other)
    loss = jt.nn.cross_entropy_loss(run[0](run[2]), run[3])
    run[1].step(loss)
    for extra in (MIB // 4, MIB // 2, MIB):
        pool.set_limit(pool.stats().allocated_bytes + extra)
        with pytest.raises(RuntimeError) as caught:
            jt.sync_all(True)
        assert pool.is_out_of_memory(caught.value)
    pool.set_limit(None)
    jt.sync_all(True)
    assert loss.item() == expected
    found = values(run[0], run[1])
    assert equal(found, values(other[0], other[1])) == len(found)


def test_an_error_in_a_later_forward_takes_no_step_back(backend, pool):
    run = make(backend, "momentum")
    net, optimizer, x, _ = run
    with pool.watch(net, optimizer), warnings.catch_warnings():
        warnings.simplefilter("error", XmemWarning)
        for _ in range(3):
            step(*run)
        found, count = values(net, optimizer), optimizer.n_step
        gc.collect()
        limit = pool.stats().allocated_bytes + MIB // 8
        assert fails(pool, lambda: net(x).sync(), (), limit)
        pool.recover()
        assert equal(values(net, optimizer), found) == len(found)
        assert optimizer.n_step == count


def unread(net, optimizer, x, y):
    """A step that reads its loss only, so that its updates are pending after it."""
    import jittor as jt
    from xmem_jittor import recovery

    loss = jt.nn.cross_entropy_loss(net(x), y)
    optimizer.step(loss)
    loss.item()
    assert recovery.pending_tensors()


def accumulated(net, optimizer, x, y, scaler):
    import jittor as jt

    with xmem.accumulate(2, optimizer):
        for part in (slice(0, 128), slice(128, 256)):
            xmem.backward(jt.nn.cross_entropy_loss(net(x[part]), y[part]), optimizer)
    jt.sync_all(True)


def scaled(net, optimizer, x, y, scaler):
    import jittor as jt

    loss = jt.nn.cross_entropy_loss(net(x), y)
    xmem.backward(scaler.scale(loss), optimizer)
    scaler.step(optimizer)
    scaler.update()
    jt.sync_all(True)


@pytest.mark.parametrize("loop", [accumulated, scaled])
@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_loops_that_count_and_scale_by_themselves_can_take_their_step_again(
    backend, pool, loop, part
):
    run, other = make(backend, "momentum"), make(backend, "momentum")
    for net in (run[0], other[0]):
        net[1].eval()  # else its statistics see the batch twice
    scalers = xmem.GradScaler(), xmem.GradScaler()
    loop(*other, scalers[1])
    loop(*run, scalers[0])
    gc.collect()
    rest = pool.stats().allocated_bytes
    pool.reset_peak()
    loop(*other, scalers[1])
    limit = rest + int(part * (pool.stats().peak_allocated_bytes - rest))
    pool.set_limit(limit)
    with pytest.raises(xmem.OutOfMemoryError), xmem.oom_guard(model=run[0], optimizer=run[1]):
        loop(*run, scalers[0])
    pool.set_limit(None)
    loop(*run, scalers[0])
    found = values(run[0], run[1])
    assert run[1].n_step == other[1].n_step == 2
    assert equal(found, values(other[0], other[1])) == len(found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_that_are_pending_where_a_block_begins_are_not_of_it(backend, pool, name):
    run, other = make(backend, name), make(backend, name)
    net, optimizer, *_ = run
    for one in (other, run):  # not in turn, since each runs what it finds pending
        unread(*one)
        unread(*one)
        if one is other:
            with pool.watch(*one[:2]):
                expected = values(*one[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error", XmemWarning)
        with pool.watch(net, optimizer):
            gc.collect()
            assert fails(pool, step, run, pool.stats().allocated_bytes + MIB // 4)
            pool.recover()
    assert optimizer.n_step == other[1].n_step == 2
    # BatchNorm's statistics have seen the batch; of all else nothing has changed.
    found = values(net, optimizer)
    assert equal(found, expected) >= len(found) - 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_those_find_no_memory_the_block_does_not_begin_and_nothing_is_lost(
    backend, pool, name
):
    run, other = make(backend, name), make(backend, name)
    unread(*other)
    with pool.watch(*other[:2]):
        expected = values(*other[:2])
    unread(*run)
    gc.collect()
    guard = xmem.oom_guard(model=run[0], optimizer=run[1])
    for extra in (0, 10_000, 20_000):
        pool.set_limit(pool.stats().allocated_bytes + extra)
        with pytest.raises(xmem.OutOfMemoryError, match=r"limit is .* Nothing is lost"), guard:
            pytest.fail("it has begun")
    pool.set_limit(None)
    with guard:
        found = values(run[0], run[1])
    assert equal(found, expected) == len(found)
    assert step(*run) == step(*other)


def test_an_error_that_somebody_caught_before_a_block_is_not_told_of_in_it(backend, pool):
    import jittor as jt

    pool.set_limit(pool.stats().allocated_bytes + 1000)
    with pytest.raises(RuntimeError):
        jt.ones((MIB,)).sync()
    pool.set_limit(None)
    with pytest.raises(RuntimeError, match="reshape") as caught, xmem.oom_guard():
        jt.ones((2, 3)).reshape((5,)).sync()
    assert not isinstance(caught.value, xmem.OutOfMemoryError)


def test_an_error_is_still_told_of_when_a_block_inside_was_opened_first(backend, pool):
    import jittor as jt

    def large():
        try:
            jt.ones((MIB,)).sync()
        except RuntimeError:
            with xmem.oom_guard():
                pool.stats()
            raise

    pool.set_limit(pool.stats().allocated_bytes + 1000)
    with pytest.raises(xmem.OutOfMemoryError), xmem.oom_guard():
        large()


def test_a_warning_that_is_an_error_does_not_hide_that_memory_ran_out(backend, pool):
    import jittor as jt
    from xmem_jittor import recovery

    net = [normal(MIB // 4).start_grad() for _ in range(3)]
    optimizer = jt.optim.Optimizer(net, 0.5)
    jt.sync_all(True)

    def partly():
        optimizer.step(sum((p * p).sum() for p in net))
        jt.sync([net[0]], True, False)
        jt.ones((4 * MIB,)).sync()

    pool.set_limit(pool.stats().allocated_bytes + 8 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            pytest.raises(xmem.OutOfMemoryError),
            xmem.oom_guard(optimizer=optimizer, whole=False),
        ):
            partly()
    assert recovery.pending_tensors() == 0


def test_updates_that_are_through_are_told_of(backend, pool):
    import jittor as jt

    net = [normal(MIB // 4).start_grad() for _ in range(3)]
    optimizer = jt.optim.Optimizer(net, 0.5)
    jt.sync_all(True)
    before = [p.numpy().copy() for p in net]
    with pool.watch(None, optimizer):
        optimizer.step(sum((p * p).sum() for p in net))
        jt.sync([net[0]], True, False)  # one update runs, the others wait
        with pytest.warns(XmemWarning, match=r"1 of 3 tensors .* 2 were put back, 0 wait"):
            pool.recover()
    now = [p.numpy() for p in net]
    assert [equal([a], [b]) for a, b in zip(before, now, strict=True)] == [0, 1, 1]
    assert optimizer.n_step == 1, "some of it was taken"
    assert all(not p.is_stop_grad() for p in net)


def test_several_steps_that_nothing_ran_are_all_put_back(backend, pool):
    import jittor as jt

    p = normal(1000).start_grad().sync()
    optimizer = jt.optim.Optimizer([p], 0.5)
    before = p.numpy().copy()
    with pool.watch(None, optimizer):
        # As Jittor's own backward, without its sync of what came before.
        for _ in range(3):
            [g] = jt.grad((p * p).sum(), [p], retain_graph=False)
            p.update((p - 0.5 * g).stop_fuse())
        pool.recover()
    assert equal([p.numpy()], [before]) == 1


def test_of_several_values_before_the_latest_is_put_back(backend, pool):
    import jittor as jt

    p = normal(1000).start_grad().sync()
    optimizer = jt.optim.Optimizer([p], 0.5)
    slow = jt.wrap_var_addr(p.var_ptr)
    with pool.watch(None, optimizer):
        p.update((p - jt.grad((p * p).sum(), [p])[0]).stop_fuse())
        [g] = jt.grad((p * p).sum(), [p])
        fast = p.sync().numpy().copy()
        p.update((0.5 * (p + slow) - g).stop_fuse())  # reads both
        pool.recover()
    assert equal([p.numpy()], [fast]) == 1


def test_a_callback_that_waits_for_what_failed_is_dropped(backend, pool):
    import jittor as jt

    called = []

    def fetch():
        large = normal(MIB // 4) * 2
        jt.fetch(large.sum(), large + 1, lambda *found: called.append(found))
        jt.sync_all()

    assert fails(pool, fetch, (), pool.stats().allocated_bytes + MIB + 1000)
    pool.recover()
    pool.set_limit(pool.stats().allocated_bytes + MIB // 2)
    jt.sync_all()
    assert not called


def test_eager_mode_survives_an_error_in_a_constructor(backend, pool):
    import jittor as jt

    gc.collect()
    jt.sync_all()
    before = jt.liveness_info()
    jt.flags.lazy_execution = 0
    try:
        for _ in range(20):
            limit = pool.stats().allocated_bytes + MIB
            assert fails(pool, lambda: jt.ones((MIB,)) * 2, (), limit)
        pool.recover()
        assert (jt.ones((3,)) + 1).numpy().tolist() == [2, 2, 2]
    finally:
        jt.flags.lazy_execution = 1
    jt.sync_all()
    assert jt.liveness_info()["hold_vars"] == before["hold_vars"]
    assert jt.liveness_info()["lived_ops"] <= before["lived_ops"] + 1


def test_two_hundred_refused_arrays_leave_nothing(backend, pool):
    import jittor as jt
    import numpy as np

    gc.collect()
    array, before = np.zeros(MIB, "float32"), jt.liveness_info()
    allocated = pool.stats().allocated_bytes
    for _ in range(200):
        assert fails(pool, jt.array, (array,), allocated + MIB)
    assert jt.liveness_info() == before
    assert pool.stats().allocated_bytes == allocated


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, tensor):
        self.tensor, self.me = tensor, self


CALLS = {
    "sync": lambda v: v.sync().item(),
    "numpy": lambda v: v.numpy()[0],
    "item": lambda v: v.item(),
    "data": lambda v: v.data[0],
    "sync_all": lambda v: None if xmem.active().measure.synchronize() else v.item(),
}


@pytest.mark.parametrize("call", CALLS)
def test_trim_and_retry_collects_garbage_and_goes_on(backend, pool, call):
    import jittor as jt

    gc.collect()
    gc.disable()
    try:
        for policy, works in (("raise", False), ("trim_and_retry", True), ("raise", False)):
            pool.configure({}, policy)
            assert pool.in_force()["on_oom"] == policy
            Cycle(jt.ones((MIB // 4,)).sync())
            retried = pool.stats().retry_count
            pool.set_limit(pool.stats().allocated_bytes + 1000)
            wanted = (jt.ones((MIB // 4,)) * 2).stop_fuse().sum()
            if works:
                assert CALLS[call](wanted) == MIB // 2
                assert pool.stats().retry_count == retried + 1
            else:
                with pytest.raises(RuntimeError) as caught:
                    CALLS[call](wanted)
                assert pool.is_out_of_memory(caught.value)
            pool.set_limit(None)
            del wanted
            pool.recover()
    finally:
        gc.enable()


def test_the_retry_takes_its_wrappers_away_and_raises_what_stays(backend, pool):
    import jittor as jt

    names = ("sync", "numpy", "item", "data", "fetch_sync")
    before = [vars(jt.Var)[name] for name in names], jt.sync, jt.sync_all, jt.fetch_sync
    pool.configure({}, "trim_and_retry")
    pool.set_limit(pool.stats().allocated_bytes + 1000)
    with pytest.raises(RuntimeError) as caught:
        jt.ones((MIB,)).sync()
    assert pool.is_out_of_memory(caught.value)
    with pytest.raises(RuntimeError, match="reshape"):
        jt.ones((2, 3)).reshape((5,)).sync()
    pool.configure({}, "raise")
    after = [vars(jt.Var)[name] for name in names], jt.sync, jt.sync_all, jt.fetch_sync
    assert before == after


def test_blocks_that_end_in_any_order_leave_what_others_put_in_the_place_of_grad(backend, pool):
    import jittor as jt
    from xmem_jittor import recovery

    original, net = jt.grad, make(backend, "adam")[0]
    first, second = pool.watch(net, None), pool.watch(net, None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pool.watch(net, None):
        mine = jt.grad = lambda *args, found=jt.grad, **named: found(*args, **named)
    assert jt.grad is mine
    p = normal(3).start_grad()
    assert jt.grad((p * p).sum(), [p])[0].shape == [3]
    second.__exit__(None, None, None)
    assert not recovery.is_following()
    jt.grad = original


def test_a_step_left_in_the_middle_does_not_order_what_comes_later(backend, pool):
    import jittor as jt

    jt.flags.node_order = 1
    pool.recover()
    assert jt.flags.node_order == 0
    assert len(trained(make(backend, "adam")[0])) == 10


@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.7])
def test_masters_and_the_parameters_that_are_rounded_from_them_are_put_back(backend, pool, part):
    import jittor as jt

    net, optimizer, x, y = make(backend, "momentum")
    net[1].eval()
    xmem.cast_model(net, "float16", optimizer=optimizer)
    run = net, optimizer, x.float16().sync(), y
    for _ in range(2):
        step(*run)
    jt.sync_all(True)
    found = values(net, optimizer)
    rest = pool.stats().allocated_bytes
    with pool.watch(net, optimizer), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", XmemWarning)
        assert fails(pool, step, run, rest + int(part * MIB))
        pool.recover()
    now = values(net, optimizer)
    assert warned or equal(now, found) == len(found)
    assert warned or optimizer.n_step == 2
