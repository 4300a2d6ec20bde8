"""Optimizer states in a depot on PyTorch: bits, bytes, failures, and what else uses optimizers."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from xmem_torch.states_away import Away

import xmem
from xmem.errors import CompositionError, OffloadError, UsageError

optim = torch.optim
SHAPES = [(64, 517), (517,), (16, 8, 3, 3), (1,), (13,), (140, 301)]
BLOCK = 200 << 10  # the two largest parameters are stepped in parts
KINDS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "SGD foreach nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam amsgrad": lambda p: optim.Adam(p, 1e-3, amsgrad=True),
    "Adam foreach": lambda p: optim.Adam(p, 1e-3, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, 1e-3),
    "AdamW fused amsgrad": lambda p: optim.AdamW(p, 1e-3, fused=True, amsgrad=True),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2),
    "Adagrad fused": lambda p: optim.Adagrad(p, 1e-2, fused=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "ASGD": lambda p: optim.ASGD(p),
    "Rprop": lambda p: optim.Rprop(p),
    "Adafactor": lambda p: optim.Adafactor(p),
    "xmem AdamW": lambda p: xmem.optim.AdamW(p),
    "xmem AdamW 4": lambda p: xmem.optim.AdamW(p, state_bits=4),
    "xmem Lion": lambda p: xmem.optim.Lion(p),
    "xmem Adafactor": lambda p: xmem.optim.Adafactor(p, beta1=0.9),
}
SOME = ["AdamW", "AdamW fused amsgrad", "SGD fused", "xmem AdamW", "xmem Adafactor"]


@pytest.fixture(autouse=True)
def _active() -> Iterator[None]:
    xmem.use("torch")
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("xmem-states")]


def parameters() -> list[Any]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def step(optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def offload(optimizer: Any, **options: Any) -> Any:
    return xmem.offload_optimizer(optimizer, **{"to": "disk", "block": BLOCK, **options})


def values(state: Any) -> dict[tuple[Any, str], Any]:
    return {(n, name): v for n, held in state["state"].items() for name, v in held.items()}


def assert_same(one: Any, other: Any) -> None:
    a, b = values(one.state_dict()), values(other.state_dict())
    assert a.keys() == b.keys()
    for key, value in a.items():
        same = torch.equal(value, b[key]) if torch.is_tensor(value) else value == b[key]
        assert same, key
    for group, own in zip(one.param_groups, other.param_groups, strict=True):
        for p, q in zip(group["params"], own["params"], strict=True):
            assert torch.equal(p, q), tuple(p.shape)


def away(optimizer: Any) -> list[Away]:
    return [v for held in optimizer.state.values() for v in held.values() if isinstance(v, Away)]


def on_device(optimizer: Any) -> int:
    held = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    parts = [part.held for one in away(optimizer) for part in one.parts if part.held is not None]
    return sum(v.nbytes for v in [*held, *parts])


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_streamed_states_are_the_plain_ones_bit_for_bit(kind: str) -> None:
    plain, streamed = KINDS[kind](parameters()), KINDS[kind](parameters())
    offload(streamed)
    for number in range(6):
        step(plain, number)
        step(streamed, number)
    assert away(streamed)
    assert_same(plain, streamed)


@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused amsgrad", "xmem AdamW"])
def test_a_hundred_steps_are_the_plain_ones_bit_for_bit(kind: str) -> None:
    plain, streamed = KINDS[kind](parameters()), KINDS[kind](parameters())
    offload(streamed, block=256 << 10)
    for number in range(100):
        step(plain, number)
        step(streamed, number)
    assert_same(plain, streamed)


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


@pytest.mark.parametrize("kind", ["AdamW fused amsgrad", "xmem AdamW"])
def test_a_full_disk_loses_nothing_and_training_goes_on(kind: str) -> None:
    plain, streamed = KINDS[kind](parameters()), KINDS[kind](parameters())
    receipt = offload(streamed, block=32 << 10)
    step(plain, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        with pytest.raises(OffloadError, match="Nothing is lost"):
            step(streamed, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
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
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        with pytest.raises(OffloadError):
            offload(optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
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


def test_what_cannot_be_streamed_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="all parameters at once"):
        offload(optim.LBFGS(parameters()))
    with pytest.raises(UsageError, match="no optimizer"):
        offload(torch.nn.Linear(2, 2))
    with pytest.raises(CompositionError, match="differentiable"):
        offload(optim.Adam(parameters(), differentiable=True))
    with pytest.raises(UsageError, match="block=0"):
        offload(KINDS["AdamW"](parameters()), block=0)
    optimizer = KINDS["AdamW"](parameters())
    offload(optimizer)
    with pytest.raises(UsageError, match="already"):
        offload(optimizer)
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
