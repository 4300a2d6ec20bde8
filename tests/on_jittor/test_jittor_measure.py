"""The counting allocator inside Jittor."""

import gc

import pytest
from chain import MIB, chain, normal, through, trained

import xmem
from xmem.protocols import CATEGORIES


def allocated(backend):
    gc.collect()
    backend.measure.synchronize()
    return backend.measure.counters().allocated_bytes


def train_step(net, optimizer, x):
    loss = (through(net, x) ** 2).mean()
    optimizer.step(loss)


def make_run(depth=6, width=128, batch=1024):
    import jittor as jt

    net = chain(depth, width)
    return net, jt.optim.Adam(trained(net), 1e-3), normal(batch, width)


def test_allocated_bytes_are_the_sum_over_live_tensors(backend):
    from xmem_jittor import native

    net, optimizer, x = make_run()
    for _ in range(2):
        train_step(net, optimizer, x)
        found = allocated(backend)
        assert found == native.allocator().xmem_jittor_reachable_bytes()
    del net, optimizer, x
    assert allocated(backend) == native.allocator().xmem_jittor_reachable_bytes() < found


def test_views_are_counted_once_and_freed_last(backend):
    import jittor as jt

    before = allocated(backend)
    whole = jt.ones((1024, 256))
    view = whole.reshape((256, 1024)).detach()
    assert allocated(backend) - before == MIB
    del whole
    assert allocated(backend) - before == MIB
    assert view.sum().item() == 1024 * 256
    del view
    assert allocated(backend) == before


def test_categories_sum_to_the_peak_and_find_every_owner(backend):
    net, optimizer, x = make_run()
    train_step(net, optimizer, x)
    weights = sum(p.nbytes for p in trained(net))
    with xmem.measure(model=net, optimizer=optimizer, inputs=x) as m:
        train_step(net, optimizer, x)
    found = m.by_category
    assert sum(found.values()) == m.peak_allocated_bytes
    assert found["parameter"] == weights
    assert found["optimizer"] == 2 * weights
    assert found["input"] == x.nbytes
    assert found["activation"] >= 6 * x.nbytes, "z of each Linear, and what reads it"
    assert [phase.name for phase in m.timeline] == ["backward"]


def test_three_steps_have_one_peak_and_leave_nothing(backend):
    net, optimizer, x = make_run()
    train_step(net, optimizer, x)
    found = set()
    for _ in range(3):
        with xmem.measure(model=net, optimizer=optimizer, inputs=x) as m:
            train_step(net, optimizer, x)
        found.add((m.static_bytes, m.peak_allocated_bytes, m.end_bytes))
    assert len(found) == 1, found


def test_a_gradient_that_is_tagged_late_moves_in_the_peak(backend):
    import jittor as jt

    measure = backend.measure
    allocated(backend)
    measure.tag_untagged("other")
    measure.reset_peak()
    first = jt.ones((MIB // 4,))
    scratch = jt.ones((MIB // 2,))
    jt.sync([first, scratch], True)
    del scratch
    later = jt.ones((MIB // 8,)).sync()
    peak = measure.peak_by_category()
    tagged = measure.tag("gradient", [first, later])
    moved = measure.peak_by_category()
    assert (tagged.tensors, tagged.size_bytes, tagged.untracked_bytes) == (2, 3 * MIB // 2, 0)
    assert moved["gradient"] == MIB, "what was born after the peak was not in it"
    assert moved["temporary"] == peak["temporary"] - MIB
    assert sum(moved.values()) == sum(peak.values()) == measure.counters().peak_allocated_bytes


def test_gradients_that_are_forgotten_before_the_end_are_still_named(backend):
    import jittor as jt

    net, _, x = make_run(depth=1, width=1024, batch=4)
    optimizer = xmem.active().training.make_optimizer("sgd", net, learning_rate=0.1)
    with xmem.measure(model=net, optimizer=optimizer, inputs=x) as m:
        xmem.backward((net(x) ** 2).mean(), optimizer)
        jt.sync(optimizer.param_groups[0]["grads"], True)
        xmem.zero_grad(optimizer)
    assert m.by_category["gradient"] >= 1024 * 1024 * 4, m.by_category


def test_activations_are_what_forward_leaves_for_backward(backend):
    import jittor as jt

    net, x = chain(8, 128), normal(1024, 128)
    with xmem.measure(model=net, inputs=x) as m:
        jt.sync(jt.grad((through(net, x) ** 2).mean(), trained(net), retain_graph=False), True)
    kept = {"plain": m.by_category["activation"]}
    with xmem.measure(model=net, inputs=x) as m:
        y = through(net, x, xmem.checkpoint)
        jt.sync(jt.grad((y**2).mean(), trained(net), retain_graph=False), True)
        del y
    kept["checkpointed"] = m.by_category["activation"]
    # Linear's output and GELU's in each block but the last, whose ends meet backward's kernels.
    assert kept["plain"] == pytest.approx(14 * x.nbytes, abs=1024), kept
    # The inputs of all blocks but the first, and the output.
    assert kept["checkpointed"] == pytest.approx(8 * x.nbytes, abs=1024), kept


def test_a_limit_refuses_and_jittor_goes_on(backend):
    net, optimizer, x = make_run()
    train_step(net, optimizer, x)
    before = allocated(backend)
    refused = backend.measure.counters().out_of_memory_count
    backend.measure.set_limit(before + 3 * x.nbytes)
    with pytest.raises(RuntimeError, match=r"out of memory: \d+ bytes requested, \d+ allocated"):
        [train_step(net, optimizer, x), backend.measure.synchronize()]
    assert backend.measure.counters().out_of_memory_count == refused + 1
    backend.measure.set_limit(None)
    train_step(net, optimizer, x)
    assert allocated(backend) == before
    assert all(abs(p.numpy()).max() < 10 for p in trained(net))


def test_peak_reserved_is_at_least_the_peak(backend):
    net, optimizer, x = make_run()
    with xmem.measure(model=net, optimizer=optimizer, inputs=x) as m:
        train_step(net, optimizer, x)
    assert m.peak_reserved_bytes >= m.peak_allocated_bytes


def test_what_watch_replaces_is_there_again(backend):
    import jittor as jt

    original = jt.grad
    with backend.measure.watch(None, None, lambda _: None):
        assert jt.grad is not original
    assert jt.grad is original
    with pytest.raises(KeyError), backend.measure.watch(None, None, lambda _: None):
        raise KeyError
    assert jt.grad is original


def test_modules_and_inputs_may_be_nested(backend):
    first, second = chain(1, 16), chain(1, 16)
    x, y = normal(2, 16), normal(3, 16)
    owned = backend.measure.owned([first, {"b": second}], None, {"x": x, "more": (y, 3)})
    assert len(owned["parameter"]) == 4
    assert [v.shape[0] for v in owned["input"]] == [2, 3]
    assert set(owned) <= set(CATEGORIES)
    assert not any(backend.measure.owned(None, None, None).values())


@pytest.mark.parametrize(
    ("name", "broken"),
    [("use_sfrl_allocator", 0), ("use_nfef_allocator", 1), ("use_stat_allocator", 2)],
)
def test_allocators_that_give_wrong_results_are_refused(backend, name, broken):
    import jittor as jt

    with jt.flag_scope(**{name: broken}), pytest.raises(xmem.MeasurementError, match=name):
        backend.measure.counters()


def test_another_pool_than_ours_is_refused(backend):
    import jittor as jt

    with jt.flag_scope(use_stat_allocator=1), pytest.raises(xmem.MeasurementError, match="pool"):
        backend.measure.counters()


def test_an_optimizers_parameters_are_known_without_the_model(backend):
    net, optimizer, _ = make_run(depth=2, width=8)
    assert len(backend.measure.owned(None, optimizer, None)["parameter"]) == 4
    assert len(backend.measure.owned(net, optimizer, None)["parameter"]) == 4


def test_settings_name_what_moves_memory(backend):
    found = backend.measure.settings()
    assert found["onednn"] == "True"
    assert found["lazy_execution"] == "1"
    assert all(isinstance(value, str) for value in found.values())
