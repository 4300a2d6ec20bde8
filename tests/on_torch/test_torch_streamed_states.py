"""Optimizer states in a depot on PyTorch: bits, bytes, failures, and what else uses optimizers."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from on_torch.stepping import (
    KINDS,
    assert_same,
    away,
    offload,
    on_device,
    parameters,
    step,
    values,
)

import xmem
from xmem.errors import CompositionError, UsageError

optim = torch.optim
TESTS = [
    Path(__file__).parents[1],
    Path(__file__).parents[2],
    Path(__file__).parents[2] / "backends",
]
SOME = ["AdamW", "AdamW fused amsgrad", "SGD fused", "xmem AdamW", "xmem Adafactor"]


@pytest.fixture(autouse=True)
def _active() -> Iterator[None]:
    xmem.use("torch")
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("xmem-states")]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_streamed_states_are_the_plain_ones_bit_for_bit(kind: str) -> None:
    plain, streamed = KINDS[kind](parameters()), KINDS[kind](parameters())
    offload(streamed)
    for number in range(6):
        step(plain, number)
        step(streamed, number)
    assert away(streamed)
    assert_same(plain, streamed)


@pytest.mark.parametrize("to", ["disk", "host"])
@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused amsgrad", "xmem AdamW"])
@pytest.mark.filterwarnings("ignore:.*on a CPU the device's memory")
def test_a_hundred_steps_are_the_plain_ones_bit_for_bit(kind: str, to: str) -> None:
    plain, streamed = KINDS[kind](parameters()), KINDS[kind](parameters())
    offload(streamed, to=to, block=256 << 10)
    for number in range(100):
        step(plain, number)
        step(streamed, number)
    assert away(streamed)
    assert_same(plain, streamed)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SparseAdam(p),
        lambda p: optim.Adagrad(p, 0.1),
        lambda p: optim.SGD(p, 0.1, momentum=0.9),
    ],
    ids=["SparseAdam", "Adagrad", "SGD"],
)
def test_sparse_gradients_step_as_without_it(make: Any) -> None:
    made = []
    for streams in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(3000, 32, sparse=True)
        optimizer = make([table.weight])
        if streams:
            receipt = offload(optimizer)
        for number in range(20):
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, 3000, (50,), generator=generator)
            table(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append(table.weight)
    assert torch.equal(*made)
    assert bool(away(optimizer)) is not isinstance(optimizer, optim.SGD)  # its buffer is sparse
    receipt.undo()
    assert not away(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_parameters_of_other_types_step_as_without_it(kind: str, dtype: torch.dtype) -> None:
    made = []
    for streams in (False, True):
        optimizer = KINDS[kind]([torch.nn.Parameter(p.to(dtype)) for p in parameters()])
        if streams:
            offload(optimizer, block=64 << 10)
        for number in range(4):
            for p, q in zip(optimizer.param_groups[0]["params"], parameters(), strict=True):
                p.grad = (q * (number + 1)).to(dtype).detach()
            optimizer.step()
        made.append(optimizer)
    assert_same(*made)


@pytest.mark.parametrize("kind", SOME)
def test_states_on_the_device_are_at_most_a_tenth(kind: str) -> None:
    shapes = [(1024, 512), (512, 256), (512, 256), (512,)]
    optimizer = KINDS[kind]([torch.nn.Parameter(torch.randn(s)) for s in shapes])
    plain = KINDS[kind]([torch.nn.Parameter(torch.randn(s)) for s in shapes])
    step(plain, 0)
    states = sum(v.nbytes for v in values(plain.state_dict()).values() if torch.is_tensor(v))
    block = states // 16
    offload(optimizer, block=block)
    peaks = []
    for number in range(3):
        step_bytes = 4096  # step counters, and one temporary of the smallest kind
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 0.1 * number)
        with xmem.measure() as m:
            optimizer.step()
        peaks.append(m.peak_above_static_bytes)
    temporaries = block if kind == "AdamW" else 0  # its rule's own: two of a part's size
    if kind == "xmem Adafactor":
        temporaries = 16384
    assert max(peaks) <= block + temporaries + step_bytes, (peaks, block, states)
    assert on_device(optimizer) <= 64, (on_device(optimizer), states)
    assert block <= 0.1 * states


def test_states_that_are_there_are_moved_and_undo_brings_them_back() -> None:
    plain, streamed = KINDS["AdamW"](parameters()), KINDS["AdamW"](parameters())
    step(plain, 0)
    step(streamed, 0)
    before = on_device(streamed)
    receipt = offload(streamed)
    assert (receipt.technique, receipt.applied_to) == ("offload_optimizer", 5)
    assert on_device(streamed) < 0.01 * before, (on_device(streamed), before)
    step(plain, 1)
    step(streamed, 1)
    receipt.undo()
    receipt.undo()
    assert type(streamed) is optim.AdamW
    assert not away(streamed)
    step(plain, 2)
    step(streamed, 2)
    assert_same(plain, streamed)


def test_state_dicts_go_both_ways() -> None:
    plain, streamed, fresh = (KINDS["AdamW"](parameters()) for _ in range(3))
    step(plain, 0)
    offload(streamed)
    for p, q in zip(
        plain.param_groups[0]["params"], streamed.param_groups[0]["params"], strict=True
    ):
        q.data.copy_(p)
    streamed.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert on_device(streamed) < 100
    step(plain, 1)
    step(streamed, 1)
    assert_same(plain, streamed)
    fresh.load_state_dict(streamed.state_dict())
    assert not away(fresh)


def test_a_state_in_other_strides_is_taken_as_it_is() -> None:
    made = []
    for streams in (False, True):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(32, 16, 3, 3).to(memory_format=torch.channels_last))
        optimizer = KINDS["AdamW"]([p])
        if streams:
            offload(optimizer, block=16 << 10)
        step(optimizer, 0)
        state = optimizer.state_dict()
        for entry in state["state"].values():
            entry.update({name: value.contiguous() for name, value in entry.items()})
        optimizer.load_state_dict(state)
        step(optimizer, 1)
        made.append(optimizer)
    assert_same(*made)


RESUMED = """
import sys, torch, xmem
from on_torch.stepping import KINDS, offload, parameters, step
xmem.use("torch")
optimizer = KINDS[sys.argv[1]](parameters())
if sys.argv[2] == "streamed":
    offload(optimizer)
found = torch.load(sys.argv[3])
for p, value in zip(optimizer.param_groups[0]["params"], found["parameters"], strict=True):
    p.data.copy_(value)
optimizer.load_state_dict(found["optimizer"])
for number in (3, 4, 5):
    step(optimizer, number)
p = optimizer.param_groups[0]["params"]
torch.save({"parameters": p, "optimizer": optimizer.state_dict()}, sys.argv[4])
"""


@pytest.mark.parametrize("kind", ["AdamW fused amsgrad", "xmem AdamW"])
def test_another_process_goes_on_from_a_state(kind: str, tmp_path: Path) -> None:
    plain, streamed = KINDS[kind](parameters()), KINDS[kind](parameters())
    offload(streamed)
    for number in range(3):
        step(plain, number)
        step(streamed, number)
    p = streamed.param_groups[0]["params"]
    torch.save({"parameters": p, "optimizer": streamed.state_dict()}, tmp_path / "saved")
    for number in (3, 4, 5):
        step(plain, number)
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, TESTS))}
    command = [sys.executable, "-c", RESUMED, kind, "streamed", "saved", "found"]
    subprocess.run(command, cwd=tmp_path, env=where, check=True, timeout=120)
    found = torch.load(tmp_path / "found")
    for value, own in zip(found["parameters"], plain.param_groups[0]["params"], strict=True):
        assert torch.equal(value, own)
    expected = values(plain.state_dict())
    for key, value in values(found["optimizer"]).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[key])), key


def test_copies_and_pickles_are_plain_with_all_states() -> None:
    streamed = KINDS["Adam foreach"](parameters())
    offload(streamed)
    step(streamed, 0)
    for made in (copy.deepcopy(streamed), pickle.loads(pickle.dumps(streamed))):
        assert type(made) is optim.Adam
        assert not away(made)
        assert_same(made, streamed)


def test_schedulers_hooks_closures_and_new_groups_go_on() -> None:
    made = []
    for streams in (False, True):
        optimizer = KINDS["SGD"](parameters())
        first = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if streams:
            offload(optimizer)
        second = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        for number in range(4):

            def closure(number: int = number, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                held = [p for group in optimizer.param_groups for p in group["params"]]
                loss = sum(((p - number) ** 2).sum() for p in held)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                first.step()
                second.step()
            if number == 1:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5, 7))]})
        assert seen == ["before", "after"] * 4
        made.append(optimizer)
    assert_same(*made)


def test_scaler_clipping_and_accumulation_give_the_plain_results() -> None:
    made = []
    for streams in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 7))
        optimizer = optim.AdamW(model.parameters(), fused=True)
        if streams:
            offload(optimizer, block=8 << 10)
        scaler = xmem.GradScaler(init_scale=16.0)
        for number in range(4):
            batch = torch.full((3, 40), 0.1 + number)
            loss = model(batch * (float("inf") if number == 2 else 1)).square().sum()
            xmem.backward(scaler.scale(loss), optimizer)
            scaler.unscale_(optimizer)
            xmem.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            xmem.zero_grad(optimizer)
        made.append(optimizer)
    assert_same(*made)


@pytest.mark.parametrize("kind", ["AdamW", "xmem AdamW"])
@pytest.mark.parametrize("first", ["offload", "in backward"])
def test_states_stream_where_parameters_step_in_backward(kind: str, first: str) -> None:
    made = []
    for streams in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 7))
        optimizer = KINDS[kind](model.parameters())
        if streams and first == "offload":
            offload(optimizer, block=8 << 10)
        xmem.optimizer_in_backward(model, optimizer)
        if streams and first != "offload":
            offload(optimizer, block=8 << 10)
        for number in range(3):
            model(torch.full((3, 40), 0.1 + number)).square().sum().backward()
        made.append((model, optimizer))
    assert away(made[1][1])
    assert_same(made[0][1], made[1][1])


def test_an_optimizer_is_quantized_before_or_after() -> None:
    made = []
    for order in ("plain", "before", "after"):
        optimizer = KINDS["AdamW"](parameters())
        step(optimizer, 0)
        if order == "after":
            offload(optimizer)
        xmem.quantize_optimizer(optimizer)
        if order == "before":
            offload(optimizer)
        step(optimizer, 1)
        made.append(optimizer)
        assert bool(away(optimizer)) == (order != "plain")
    assert_same(made[0], made[1])
    assert_same(made[0], made[2])


@pytest.mark.parametrize("order", ["masters first", "offload first"])
def test_float32_masters_step_as_without_it(order: str) -> None:
    made = []
    for streams in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 7))
        optimizer = KINDS["AdamW"](model.parameters())
        if streams and order == "offload first":
            offload(optimizer, block=8 << 10)
        xmem.cast_model(model, "bfloat16", optimizer=optimizer)
        if streams and order != "offload first":
            offload(optimizer, block=8 << 10)
        for number in range(4):
            batch = torch.full((3, 40), 0.1 + number, dtype=torch.bfloat16)
            xmem.backward(model(batch).square().sum(), optimizer)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
        made.append((model, optimizer))
    assert away(made[1][1])
    assert_same(made[0][1], made[1][1])
    for p, q in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
        assert torch.equal(p, q)


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("quantized", [False, True])
def test_undo_brings_back_and_closes_the_file(quantized: bool) -> None:
    optimizer = KINDS["AdamW"](parameters())
    before = files()
    receipt = offload(optimizer)
    step(optimizer, 0)
    if quantized:
        xmem.quantize_optimizer(optimizer)
        step(optimizer, 1)
    assert files() == before + 1
    receipt.undo()
    assert not away(optimizer)
    assert files() == before
    step(optimizer, 2)


def test_a_state_that_is_away_says_so() -> None:
    optimizer = optim.Adagrad(parameters())
    offload(optimizer)
    with pytest.raises(AttributeError, match=r"'share_memory_' of a state that is away \(xmem"):
        optimizer.share_memory()


def test_what_cannot_be_streamed_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="all parameters at once"):
        offload(optim.LBFGS(parameters()))
    with pytest.raises(UsageError, match="no optimizer"):
        offload(torch.nn.Linear(2, 2))
    with pytest.raises(CompositionError, match="differentiable"):
        offload(optim.Adam(parameters(), differentiable=True))
    with pytest.raises(UsageError, match="no size yet"):
        offload(optim.Adam(torch.nn.LazyLinear(3).parameters()))
    with pytest.raises(UsageError, match="block=0"):
        offload(KINDS["AdamW"](parameters()), block=0)
    optimizer = KINDS["AdamW"](parameters())
    offload(optimizer)
    with pytest.raises(UsageError, match="already"):
        offload(optimizer)
    model = torch.nn.Linear(40, 30)
    optimizer = KINDS["AdamW"](model.parameters())
    receipt = offload(optimizer)
    with pytest.raises(CompositionError, match="undo"):
        xmem.predict(model, torch.ones(3, 40), lambda m, x: m(x).sum(), optimizer=optimizer)
    receipt.undo()
    xmem.predict(model, torch.ones(3, 40), lambda m, x: m(x).sum(), optimizer=optimizer)
    with pytest.warns(xmem.errors.XmemWarning, match="keeps no states"):
        offload(optim.SGD(parameters(), 0.1))


def test_depots_go_with_their_optimizer() -> None:
    import weakref

    optimizer = KINDS["AdamW"](parameters())
    offload(optimizer)
    step(optimizer, 0)
    depot = weakref.ref(vars(optimizer)["_xmem_streaming"].depot)
    stored = depot().stats.stored_bytes  # type: ignore[union-attr]
    for number in range(1, 4):
        step(optimizer, number)
    assert depot().stats.stored_bytes == stored  # type: ignore[union-attr]
    del optimizer
    gc.collect()
    assert depot() is None
