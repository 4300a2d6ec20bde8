"""Steps of streamed optimizer states on PyTorch that fail: on full disks, and half way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from on_torch.stepping import KINDS, assert_same, away, offload, on_device, parameters, step, values

import xmem
from xmem.conformance.full_disk import files_of_at_most
from xmem.errors import OffloadError

optim = torch.optim


@pytest.mark.parametrize("kind", ["AdamW fused amsgrad", "xmem AdamW"])
def test_a_full_disk_loses_nothing_and_training_goes_on(kind: str) -> None:
    plain, streamed = KINDS[kind](parameters()), KINDS[kind](parameters())
    receipt = offload(streamed, block=32 << 10)
    step(plain, 0)
    with files_of_at_most(64 << 10), pytest.raises(OffloadError, match="Nothing is lost"):
        step(streamed, 0)
    assert on_device(streamed) > 0
    assert_same(plain, streamed)
    for number in (1, 2):
        step(plain, number)
        step(streamed, number)
    assert_same(plain, streamed)
    receipt.undo()
    assert_same(plain, streamed)


def test_a_full_disk_at_the_beginning_leaves_the_optimizer_plain() -> None:
    optimizer = KINDS["AdamW"](parameters())
    step(optimizer, 0)
    expected = copy.deepcopy(optimizer)
    with files_of_at_most(64 << 10), pytest.raises(OffloadError):
        offload(optimizer)
    assert type(optimizer) is optim.AdamW
    assert not away(optimizer)
    assert_same(expected, optimizer)


def test_a_step_that_fails_keeps_all_states() -> None:
    optimizer = KINDS["AdamW"](parameters())
    offload(optimizer)
    step(optimizer, 0)
    last = optimizer.param_groups[0]["params"][-2]
    last.grad = torch.sparse_coo_tensor([[1]], [1.0], (13,))
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert on_device(optimizer) < 100
    assert len(values(optimizer.state_dict())) == 18
    step(optimizer, 1)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_a_first_step_that_fails_between_parts_leaves_no_half_of_a_state(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xmem_torch.states_streaming import Streaming

    optimizer = KINDS[kind](parameters())
    offload(optimizer, block=64 << 10)
    plainly, calls = Streaming._plainly, []

    def fails(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        plainly(self, *args)

    monkeypatch.setattr(Streaming, "_plainly", fails)
    with pytest.raises(MemoryError):
        step(optimizer, 0)
    monkeypatch.undo()
    for number in (1, 2):
        step(optimizer, number)
    assert all(part.is_stored for one in away(optimizer) for part in one.parts)
    assert len(values(optimizer.state_dict())) == len(values(stepped(kind).state_dict()))


def stepped(kind: str) -> Any:
    optimizer = KINDS[kind](parameters())
    step(optimizer, 0)
    return optimizer


def test_hooks_behind_a_step_run_also_where_the_disk_is_full() -> None:
    optimizer = KINDS["AdamW"](parameters())
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    offload(optimizer)
    with files_of_at_most(64 << 10), pytest.raises(OffloadError):
        step(optimizer, 0)
    assert seen == [1]


@contextmanager
def full(is_full: bool) -> Iterator[None]:
    """Have a full disk, which is told of, or none."""
    if not is_full:
        yield
        return
    with files_of_at_most(4 << 10), pytest.raises(OffloadError, match="Nothing is lost"):
        yield


def layers() -> Any:
    torch.manual_seed(3)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(40, 300), linear(300, 7), torch.nn.Tanh(), linear(7, 500))


def loss_of(model: Any, number: int) -> Any:
    return model(torch.full((3, 40), 0.1 + number)).square().mean()


@pytest.mark.parametrize("kind", ["AdamW", "xmem AdamW"])
@pytest.mark.parametrize(
    ("away", "inside"),
    [("states", True), ("parameters", True), ("both", True), ("states", False), ("both", False)],
)
def test_all_parameters_have_been_stepped_when_a_full_disk_is_told_of(
    kind: str, away: str, inside: bool
) -> None:
    made, receipts = [], []
    for streams in (False, True):
        model = layers()
        optimizer = KINDS[kind](model.parameters())
        if streams and away != "parameters":
            receipts.append(offload(optimizer, block=8 << 10))
        if streams and away != "states":
            receipts.append(xmem.offload_parameters(model, "disk"))
        if inside:
            xmem.optimizer_in_backward(model, optimizer)
        for number in range(4):
            loss = loss_of(model, number)
            with full(streams and number == 0):
                loss.backward()
                if not inside:
                    optimizer.step()
            if not inside:
                optimizer.zero_grad()
        for receipt in receipts:
            receipt.undo()
        made.append(optimizer)
    assert_same(*made)


def test_bytes_that_do_not_come_back_in_backward_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    optimizer = KINDS["AdamW"](model.parameters())
    offload(optimizer, block=8 << 10)
    xmem.optimizer_in_backward(model, optimizer)
    loss_of(model, 0).backward()
    depot = vars(optimizer)["_xmem_streaming"].depot
    error = OffloadError(None, "gone", directory=None)
    monkeypatch.setattr(type(depot), "get", lambda *_: (_ for _ in ()).throw(error))
    loss = loss_of(model, 1)
    with pytest.raises(OffloadError, match="gone"):
        loss.backward()
    monkeypatch.undo()
    model.zero_grad()
    loss_of(model, 2).backward()
