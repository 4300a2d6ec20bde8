"""The monitor on Jittor: exact peaks of what has been executed, and nothing executed for it."""

import time

import pytest
from chain import chain, normal, through, trained

import xmem
from xmem.errors import UsageError
from xmem.monitor import Monitor


def training():
    import jittor as jt

    net = chain(3, 64)
    optimizer = jt.optim.Adam(trained(net), 1e-3)
    x = normal(256, 64)

    def step():
        loss = (through(net, x) ** 2).mean()
        optimizer.step(loss)
        jt.sync_all(True)
        return loss

    for _ in range(2):
        step()
    return net, optimizer, step


def test_the_peak_of_a_line_is_that_of_the_step_to_the_byte(backend, tmp_path):
    _, _, step = training()
    with xmem.measure() as measured:
        step()
    with Monitor(tmp_path / "run.jsonl") as monitor:
        for _ in range(3):
            step()
            record = monitor.step()
            assert record.peak_allocated_bytes == measured.peak_allocated_bytes
            assert record.allocated_bytes == measured.end_bytes


def test_a_measured_block_around_lines_has_its_own_peak(backend, tmp_path):
    _, _, step = training()
    with xmem.measure() as alone:
        step()
    with Monitor(tmp_path / "run.jsonl") as monitor:
        with xmem.measure() as measured:
            step()
            assert monitor.step().peak_allocated_bytes is None
        assert measured.peak_allocated_bytes == alone.peak_allocated_bytes


def test_what_model_and_optimizer_own_is_exact(backend, tmp_path):
    net, optimizer, step = training()
    with Monitor(tmp_path / "run.jsonl", model=net, optimizer=optimizer) as monitor:
        step()
        owned = monitor.step().owned_bytes
    size = sum(4 * p.numel() for p in trained(net))
    assert owned["parameter"] == size
    assert owned["optimizer"] == 2 * size


def test_nothing_is_executed_for_a_line(backend, tmp_path):
    import jittor as jt

    x = normal(1024, 256)
    jt.sync_all(True)
    y = x.exp()
    before = backend.measure.counters().allocated_bytes
    with Monitor(tmp_path / "run.jsonl") as monitor:
        with pytest.raises(UsageError, match=r"Var, and a monitor.*xmem\.log_value"):
            monitor.step(loss=y)
        assert monitor.step().allocated_bytes == before
        y.sync()
        assert monitor.step().allocated_bytes == before + 4 * 1024 * 256


def test_a_line_costs_less_than_fifty_microseconds(backend, tmp_path):
    net, optimizer, step = training()
    step()
    best = 1.0
    with Monitor(tmp_path / "run.jsonl", model=net, optimizer=optimizer) as monitor:
        for _ in range(20):
            started = time.process_time()
            for _ in range(50):
                monitor.step(loss=0.5, lr=1e-3)
            best = min(best, (time.process_time() - started) / 50)
    assert best < 50e-6, f"{best * 1e6:.1f} us"
