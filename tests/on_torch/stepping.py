"""Optimizers of all kinds, steps of theirs, and where their states are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from xmem_torch.states_away import Away

import xmem

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
    "Muon": lambda p: optim.Muon([q for q in p if q.dim() == 2]),
    "xmem AdamW": lambda p: xmem.optim.AdamW(p),
    "xmem AdamW 4": lambda p: xmem.optim.AdamW(p, state_bits=4),
    "xmem Lion": lambda p: xmem.optim.Lion(p),
    "xmem Adafactor": lambda p: xmem.optim.Adafactor(p, beta1=0.9),
}


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
