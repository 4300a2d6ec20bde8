"""The pool over a process's life: before `use`, threads, forks, loaders, broken flags, exit."""

import os
import subprocess
import sys
import textwrap

import pytest

START = """
    import gc, os, signal, threading
    import numpy as np
    import xmem
"""


def run(script, **environment):
    """Run a script in a process of its own; returns what it printed and its exit status."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(START) + textwrap.dedent(script)],
        env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return ran.stdout + ran.stderr, ran.returncode


def test_tensors_from_before_keep_their_values_and_their_pool_is_trimmed_too():
    said, status = run("""
        from xmem_jittor import environment
        environment.prepare("cpu")
        jt = environment.import_jittor()
        before = [jt.randn(300, 300).sync() for _ in range(5)]
        values = [v.numpy().copy() for v in before]
        pool = xmem.use("jittor", device="cpu").pool
        assert all(np.array_equal(v.numpy(), a) for v, a in zip(before, values))
        mixed = (before[0] + jt.array(values[1])).numpy()
        assert np.array_equal(mixed, values[0] + values[1])
        assert pool.stats().allocated_bytes < 300 * 300 * 4, "they are not ours"
        held = jt.get_mem_info().total_cpu_used
        del before
        pool.trim()
        assert held - jt.get_mem_info().total_cpu_used >= 2**20
        assert not pool.stats().out_of_memory_count
        print("fine")
    """)
    assert (said.count("fine"), status) == (1, 0), said


def test_threads_may_make_arrays_and_read_the_pool():
    said, status = run("""
        pool = xmem.use("jittor", device="cpu").pool
        import jittor as jt
        errors = []
        def work(k):
            try:
                for _ in range(100):
                    x = jt.array(np.full((1000 + k,), k, "float32"))
                    assert ((x + 1).numpy() == k + 1).all()
                    pool.stats(), pool.segments(), pool.history(), pool.trim()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors
        stats = pool.stats()
        asked = sum(b.requested_bytes for s in pool.segments() for b in s.blocks)
        assert asked == stats.allocated_bytes < 100
        print("fine")
    """)
    assert (said.count("fine"), status) == (1, 0), said


def test_forks_and_loaders_that_fork_work():
    said, status = run("""
        pool = xmem.use("jittor", device="cpu").pool
        import jittor as jt
        from jittor.dataset import Dataset
        stop = threading.Event()
        def trim():
            while not stop.is_set(): pool.trim()
        busy = threading.Thread(target=trim)  # a child must not inherit the pool locked
        busy.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                x = jt.array(np.ones(10, "float32"))
                pool.trim()
                right = x.numpy().sum() == 10 and pool.stats().allocated_bytes > 0
                os._exit(0 if right else 3)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        busy.join()
        class Numbers(Dataset):
            def __init__(self):
                super().__init__()
                self.set_attrs(total_len=64, batch_size=8, num_workers=2)
            def __getitem__(self, i):
                return np.full((16, 16), i, "float32"), i
        numbers, bytes_after = Numbers(), set()
        for _ in range(3):
            seen = []
            for x, i in numbers:
                assert (x.numpy()[:, 0, 0] == i.numpy()).all()
                seen += i.numpy().tolist()
            assert sorted(seen) == list(range(64))
            bytes_after.add(pool.stats().allocated_bytes)
        assert len(bytes_after) == 1, bytes_after
        print("fine")
    """)
    assert (said.count("fine"), status) == (1, 0), said


def test_a_process_ends_cleanly_with_live_tensors_a_limit_and_a_failed_graph():
    said, status = run("""
        pool = xmem.use("jittor", device="cpu").pool
        import jittor as jt
        pool.configure({"huge_pages": False, "large_block_size": 2**23}, "trim_and_retry")
        held = [jt.randn(1000, 100).sync() for _ in range(5)]
        pool.set_limit(pool.stats().allocated_bytes + 1000)
        failed = held[0] * 2 + held[1]
        try:
            failed.sync()
        except RuntimeError as error:
            assert pool.is_out_of_memory(error)
            print("fine")
    """)
    assert (said.count("fine"), status) == (1, 0), said


@pytest.mark.parametrize(
    ("flag", "value"),
    [("use_sfrl_allocator", "0"), ("use_nfef_allocator", "1"), ("use_stat_allocator", "2")],
)
def test_broken_allocators_in_the_environment_are_refused_with_the_reason(flag, value):
    said, status = run(
        """
        try:
            xmem.use("jittor", device="cpu")
        except xmem.errors.MeasurementError as error:
            print(error)
        """,
        **{flag: value},
    )
    assert f"{flag}={value}" in said, said
    assert "silently wrong" in said
    assert status == 0
