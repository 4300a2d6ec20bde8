"""`on_oom="offload"`: what does not fit leaves the device until backward needs it."""

import ctypes
import gc

import numpy as np
import pytest
from chain import MIB, chain, error, normal, trained, transformer

import xmem
from xmem.conformance.full_disk import files_of_at_most
from xmem.errors import OffloadError, XmemWarning


@pytest.fixture(autouse=True)
def put_back(backend):
    yield
    xmem.pool.configure(limit=None, on_oom="raise")
    xmem.pool.configure(offload_to="disk", offload_directory=None)


def stepped(net, x):
    """Return a step's loss and gradients as NumPy arrays, and its peak above what there was."""
    import jittor as jt

    gc.collect()
    jt.sync_all(True)
    xmem.pool.reset_peak()
    before = xmem.pool.stats().allocated_bytes
    loss = (net(x) ** 2).mean()
    asked = [loss, *jt.grad(loss, trained(net), retain_graph=False)]
    jt.sync(asked)
    peak = xmem.pool.stats().peak_allocated_bytes - before
    return [v.numpy() for v in asked], peak


def limit_of(size):
    import jittor as jt

    gc.collect()
    jt.sync_all(True)
    return xmem.pool.stats().allocated_bytes + int(size)


def moved():
    return xmem.pool.stats().offloaded_bytes


def noted():
    """How many pieces of memory are noted, and how many of them are away."""
    from xmem_jittor import native

    found = (ctypes.c_longlong * 4)()
    native.allocator().xmem_jittor_late_stats(found)
    return found[0], found[1]


def same(first, second):
    return all(np.array_equal(f, s) for f, s in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def standard(backend):
    """A chain, with what plain training gives, and how much it takes where all is noted."""
    net, x = chain(), normal(2048, 256)
    plain, plain_peak = stepped(net, x)
    xmem.pool.configure(limit="1TiB", on_oom="offload")
    before, retries = moved(), xmem.pool.stats().retry_count
    found, peak = stepped(net, x)
    assert moved() == before, "a step that fits has moved something"
    assert noted() == (0, 0)
    assert xmem.pool.stats().retry_count == retries
    xmem.pool.configure(limit=None, on_oom="raise")
    assert same(found, plain)
    return net, x, plain, plain_peak, peak


def test_a_step_that_fits_moves_nothing_and_takes_no_more(standard):
    *_, plain_peak, peak = standard
    assert peak <= plain_peak, (peak, plain_peak)


@pytest.mark.parametrize("to", ["disk", "host"])
def test_a_step_that_needs_more_than_the_limit_runs_and_is_equal(standard, tmp_path, to):
    net, x, plain, _, peak = standard
    where = {"offload_directory": tmp_path} if to == "disk" else {}
    most = int(peak / 1.6)
    xmem.pool.configure(limit=limit_of(most), on_oom="offload", offload_to=to, **where)
    assert xmem.pool.settings["offload_to"] == to
    for _ in range(2):
        before = moved()
        found, reached = stepped(net, x)
        assert same(found, plain)
        assert reached <= most, (reached, most)
        # What had to leave, one tensor of 2 MiB and the margin more.
        assert peak - most <= moved() - before <= peak - most + 2 * MIB + xmem.pool.limit // 64
        assert noted() == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_fifth_of_the_plain_peak_is_enough_for_a_chain(standard):
    """Gradients of parameters (6 MiB) and what a layer needs at once (4 of 2 MiB): 0.15 of it."""
    net, x, plain, plain_peak, _ = standard
    xmem.pool.configure(limit=limit_of(plain_peak / 5), on_oom="offload")
    found, reached = stepped(net, x)
    assert same(found, plain)
    assert reached <= plain_peak / 5, (reached, plain_peak)


def test_tensors_that_several_layers_read_leave_once_all_have_read_them(backend):
    net, x = transformer(depth=4, width=128), normal(4, 128, 128)
    plain, plain_peak = stepped(net, x)
    xmem.pool.configure(limit="1TiB", on_oom="offload")
    _, peak = stepped(net, x)
    least = 0.6 * peak  # gradients of parameters are 0.19 of it
    xmem.pool.configure(limit=limit_of(least))
    before = moved()
    found, reached = stepped(net, x)
    assert moved() > before
    assert error(found, plain) <= 1e-6
    assert reached <= least, (reached, peak, plain_peak)
    assert noted() == (0, 0)


def test_what_python_holds_stays(backend):
    """Six of the twelve tensors that backward reads; to let go of them would free nothing."""
    import jittor as jt
    from jittor import nn

    net, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)]), normal(2048, 256)

    def run():
        gc.collect()
        jt.sync_all(True)
        xmem.pool.reset_peak()
        before, y, held = xmem.pool.stats().allocated_bytes, x, []
        for layer in net:
            y = layer(y)
            held += [y] if len(held) < 6 else []
        loss = (y**2).mean()
        asked = [loss, *jt.grad(loss, trained(net), retain_graph=False), *held]
        jt.sync(asked)
        peak = xmem.pool.stats().peak_allocated_bytes - before
        return [v.numpy() for v in asked], peak

    plain, _ = run()
    xmem.pool.configure(limit="1TiB", on_oom="offload")
    _, peak = run()
    xmem.pool.configure(limit=limit_of(peak - 6 * MIB))
    before = moved()
    found, _ = run()
    assert same(found, plain)
    assert 6 * MIB <= moved() - before <= 10 * MIB, moved() - before


def test_regions_that_are_recomputed_let_their_inputs_leave(backend):
    net, x = chain(depth=16), normal(2048, 256)
    plain, _ = stepped(net, x)
    receipt = xmem.apply_checkpointing(net, "every", blocks=list(net))
    _, peak = stepped(net, x)
    most = 0.6 * peak
    xmem.pool.configure(limit=limit_of(most), on_oom="offload")
    before = moved()
    found, reached = stepped(net, x)
    receipt.undo()
    assert moved() > before
    assert error(found, plain) <= 1e-6
    assert reached <= most, (reached, peak)
    assert noted() == (0, 0)


def test_when_nothing_more_can_be_moved_the_error_says_what_was_and_training_goes_on(standard):
    net, x, plain, *_ = standard
    xmem.pool.configure(limit=limit_of(8 * MIB), on_oom="offload")
    before = moved()
    with pytest.raises(RuntimeError, match=r"moved \d+ bytes; nothing more") as caught:
        stepped(net, x)
    assert moved() > before
    assert str(moved()) in str(caught.value)
    with pytest.raises(xmem.OutOfMemoryError) as caught, xmem.oom_guard(model=net):
        stepped(net, x)
    assert "on_oom=offload" not in {a.technique for a in caught.value.diagnosis.advice}
    del caught
    gc.collect()
    assert noted() == (0, 0)
    xmem.pool.configure(limit=None, on_oom="raise")
    xmem.active().pool.recover()
    assert same(stepped(net, x)[0], plain)


def test_a_full_disk_loses_nothing_and_is_the_reason_of_the_error(standard):
    net, x, plain, _, peak = standard
    xmem.pool.configure(limit=limit_of(peak / 1.6), on_oom="offload")
    with files_of_at_most(3 * MIB):
        with pytest.raises(RuntimeError, match="File too large") as caught:
            stepped(net, x)
        assert isinstance(caught.value.__cause__, OffloadError)
        del caught
        with pytest.raises(xmem.OutOfMemoryError) as caught, xmem.oom_guard(model=net):
            stepped(net, x)
        assert isinstance(caught.value.__cause__, OffloadError)
        del caught
    gc.collect()
    assert noted() == (0, 0)
    xmem.pool.configure(limit=None, on_oom="raise")
    assert same(stepped(net, x)[0], plain)


def test_what_failed_for_memory_goes_on_when_there_is_more(standard):
    """Some tensors are away when it fails; they come back."""
    import jittor as jt

    net, x, plain, *_ = standard
    xmem.pool.configure(limit=limit_of(8 * MIB), on_oom="offload")
    loss = (net(x) ** 2).mean()
    asked = [loss, *jt.grad(loss, trained(net), retain_graph=False)]
    with pytest.raises(RuntimeError, match="out of memory"):
        jt.sync(asked)
    assert noted()[1] > 0
    xmem.pool.configure(limit=None, on_oom="raise")
    jt.sync(asked)
    assert same([v.numpy() for v in asked], plain)
    assert noted() == (0, 0)


def test_a_planned_model_keeps_what_its_plan_says(backend):
    import jittor as jt

    net, x = chain(depth=4), normal(512, 256)
    plain, _ = stepped(net, x)
    profile = xmem.profile(net, x, lambda net, x: (net(x) ** 2).mean())
    receipt = xmem.plan(profile, budget="1GiB").apply(net)
    xmem.pool.configure(limit="1TiB", on_oom="offload")
    found, _ = stepped(net, x)
    receipt.undo()
    assert error(found, plain) <= 1e-6
    jt.sync_all(True)


def test_all_is_undone(backend):
    import jittor as jt
    from xmem_jittor import keeping, ran_out

    before = jt.Module.__call__, jt.sync, jt.Var.numpy
    with pytest.warns(XmemWarning, match="without a limit"):
        xmem.pool.configure(on_oom="offload")
    assert jt.Module.__call__ is not before[0]
    assert keeping.packs() is not None
    xmem.pool.configure(on_oom="raise")
    assert (jt.Module.__call__, jt.sync, jt.Var.numpy) == before
    assert keeping.packs() is None
    assert ran_out.policy() == "raise"


def test_a_directory_that_is_missing_changes_nothing(backend, tmp_path):
    with pytest.raises(OffloadError, match="missing"):
        xmem.pool.configure(offload_directory=tmp_path / "missing", on_oom="offload", limit=1)
    assert xmem.pool.limit is None
    assert xmem.pool.settings["on_oom"] == "raise"


def test_a_diagnosis_names_it_where_it_is_not_in_force(standard):
    net, x, _, plain_peak, _ = standard
    xmem.pool.configure(limit=limit_of(plain_peak / 2))
    with pytest.raises(xmem.OutOfMemoryError) as caught, xmem.oom_guard(model=net):
        stepped(net, x)
    assert 'xmem.pool.configure(on_oom="offload")' in {
        a.call for a in caught.value.diagnosis.advice
    }
