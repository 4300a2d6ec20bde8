"""The monitor on PyTorch: exact peaks, nothing read, and no step made slower."""

import time

import pytest
import torch
from torch import nn

import xmem
from xmem.errors import UsageError
from xmem.monitor import Monitor


def training(width=128):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(64, width)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    step()
    return model, optimizer, step


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
    model, optimizer, step = training()
    with Monitor(tmp_path / "run.jsonl", model=model, optimizer=optimizer) as monitor:
        step()
        owned = monitor.step().owned_bytes
    size = sum(p.nbytes for p in model.parameters())
    states = sum(v.nbytes for s in optimizer.state.values() for v in s.values())
    assert owned == {"parameter": size, "optimizer": states}


def test_a_tensor_is_refused_and_its_value_taken(backend, tmp_path):
    _, _, step = training()
    with Monitor(tmp_path / "run.jsonl") as monitor:
        loss = step()
        for tensor in (loss, loss.detach()):
            with pytest.raises(UsageError, match=r"torch\.Tensor.*xmem\.log_value"):
                monitor.step(loss=tensor)
        assert monitor.step(loss=xmem.log_value(loss)).values["loss"] == loss.item()


def test_a_line_costs_less_than_fifty_microseconds(backend, tmp_path):
    model, optimizer, step = training()
    step()
    best = 1.0
    with Monitor(tmp_path / "run.jsonl", model=model, optimizer=optimizer) as monitor:
        for _ in range(20):
            started = time.process_time()
            for _ in range(50):
                monitor.step(loss=0.5, lr=1e-3)
            best = min(best, (time.process_time() - started) / 50)
    assert best < 50e-6, f"{best * 1e6:.1f} us"
