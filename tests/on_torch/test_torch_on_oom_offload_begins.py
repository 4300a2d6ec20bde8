"""Where `on_oom="offload"` begins and ends, and what others make of it."""

import gc
import os
import threading
import warnings

import pytest
import torch
from on_torch.gpt import forward_and_backward
from on_torch.limited import limit_for, model_and_ids, moved, put_back, saved_by, step
from on_torch.pooling import MB, allocated, old_objects_apart, pool
from torch import nn

import xmem
from xmem.conformance.full_disk import files_of_at_most
from xmem.errors import CompositionError, OffloadError, UsageError, XmemWarning

__all__ = ["old_objects_apart", "pool", "put_back"]


def test_hooks_nest(pool):
    limit = allocated(pool) + 300 * MB
    with torch.autograd.graph.save_on_cpu():
        with pytest.raises(CompositionError, match="outside of the block"):
            xmem.pool.configure(limit=limit, on_oom="offload")
        assert xmem.pool.settings["on_oom"] == "raise"
        assert xmem.pool.limit is None
    xmem.pool.configure(limit=limit, on_oom="offload")
    with torch.autograd.graph.save_on_cpu():
        with pytest.raises(CompositionError, match="outside of the block"):
            xmem.pool.configure(on_oom="raise")
        assert xmem.pool.settings["on_oom"] == "offload"
    found = []

    def leave():
        with pytest.raises(CompositionError, match="thread"):
            xmem.pool.configure(on_oom="raise")
        found.append(True)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert found


def test_settings_are_shown_and_refused_before_anything_changes(pool, tmp_path):
    limit = allocated(pool) + 300 * MB
    with pytest.raises(UsageError, match="no effect without on_oom='offload'"):
        xmem.pool.configure(offload_to="host")
    with pytest.raises(UsageError, match="offload_to"):
        xmem.pool.configure(offload_to="tape", on_oom="offload")
    with pytest.raises(UsageError, match="for offload_to='disk'"):
        xmem.pool.configure(offload_to="host", offload_directory=tmp_path, on_oom="offload")
    with pytest.raises(OffloadError, match="missing"):
        xmem.pool.configure(offload_directory=tmp_path / "missing", on_oom="offload", limit=limit)
    assert xmem.pool.limit is None
    assert xmem.pool.settings["on_oom"] == "raise"
    xmem.pool.configure(offload_directory=tmp_path, on_oom="offload", limit=limit)
    found = xmem.pool.settings
    assert (found["offload_to"], found["offload_directory"]) == ("disk", str(tmp_path))


def test_what_left_comes_back_after_the_policy_has_ended(pool, tmp_path):
    xmem.pool.configure(limit=allocated(pool) + 100 * MB, on_oom="offload")
    first, w = saved_by(4)
    pool._control._late.make_room(0, 100 * MB)
    xmem.pool.configure(offload_directory=tmp_path)
    second, v = saved_by(4)
    pool._control._late.make_room(0, 100 * MB)
    assert moved() >= 16 * MB
    xmem.pool.configure(limit=None, on_oom="raise")
    gc.collect()
    (first + second).backward()
    assert w.grad == v.grad == pytest.approx(torch.e * MB)


def test_a_forked_child_moves_nothing(pool):
    xmem.pool.configure(limit=allocated(pool) + 100 * MB, on_oom="offload")
    loss, _ = saved_by(4)
    child = os.fork()
    if not child:
        os._exit(pool._control._late.make_room(0, 100 * MB) != 0)
    assert os.waitpid(child, 0)[1] == 0
    assert pool._control._late.make_room(0, 100 * MB) == 8 * MB
    loss.backward()


def test_what_a_thread_that_has_ended_began_can_be_ended_and_begun_anew(pool):
    limit = allocated(pool) + 100 * MB

    def begin():
        xmem.pool.configure(limit=limit, on_oom="offload")

    for ending in ("raise", "offload"):
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        xmem.pool.configure(on_oom=ending)
        loss, _ = saved_by(4)
        freed = pool._control._late.make_room(0, 100 * MB)
        assert freed == (8 * MB if ending == "offload" else 0)
        loss.backward()


def test_configure_goes_on_after_a_full_disk_and_in_a_forked_child(pool):
    """Both have a scratch file that takes nothing; asking for it again makes another one."""
    xmem.pool.configure(limit=allocated(pool) + 300 * MB, on_oom="offload")
    late = pool._control._late
    old, _ = saved_by(4)
    with files_of_at_most(MB):
        assert late.make_room(0, 100 * MB) == 0
    assert isinstance(pool._control.failure, OffloadError)
    xmem.pool.configure(on_oom="offload")
    assert pool._control.failure is None
    loss, w = saved_by(4)
    assert late.make_room(0, 100 * MB) == 8 * MB
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # those of the parent are not here
        xmem.pool.configure(on_oom="offload")
        own, v = saved_by(4)
        freed = late.make_room(0, 100 * MB)
        own.backward()
        os._exit(freed != 8 * MB or v.grad != pytest.approx(torch.e * MB))
    assert os.waitpid(child, 0)[1] == 0
    (old + loss).backward()
    assert w.grad == pytest.approx(torch.e * MB)


def test_a_diagnosis_names_it_where_it_is_not_in_force(pool):
    model, ids = model_and_ids()
    plain = step(model, ids)

    def advice():
        with pytest.raises(xmem.OutOfMemoryError) as caught, xmem.oom_guard(model=model):
            forward_and_backward(model, ids, ids)
        return {one.call for one in caught.value.diagnosis.advice}

    xmem.pool.configure(limit=limit_for(plain[2], 0.5))
    assert 'xmem.pool.configure(on_oom="offload")' in advice()
    xmem.pool.configure(limit=limit_for(plain[2], 0.01), on_oom="offload")
    assert 'xmem.pool.configure(on_oom="offload")' not in advice()


def test_without_a_limit_it_warns():
    with pytest.warns(XmemWarning, match="without a limit"):
        xmem.pool.configure(on_oom="offload")


def test_a_larger_batch_is_found(pool):
    def make_step(batch_size):
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        x = torch.randn(batch_size, 64)

        def step():
            net.zero_grad()
            net(x).square().mean().backward()

        return step

    asked = {"budget": "8MiB", "isolate": False, "multiple_of": 256}
    plain = xmem.find_batch_size(make_step, **asked)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XmemWarning)  # the search sets the limits
        xmem.pool.configure(on_oom="offload")
    found = xmem.find_batch_size(make_step, **asked)
    assert found.size >= 1.5 * plain.size, (found.size, plain.size)
