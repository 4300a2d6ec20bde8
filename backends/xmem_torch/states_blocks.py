"""Which parameters step together, and which of them in parts (PyTorch 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from xmem.codec import packed_bytes
from xmem.offload import blocks
from xmem_torch import few_bits, states
from xmem_torch.left import HALF_TYPES
from xmem_torch.states_away import Away, Part, is_dense
from xmem_torch.streamed_parameters import are_away

Place = few_bits.Place

ELEMENTWISE: Mapping[type, Callable[[Mapping[str, Any]], int]] = {
    torch.optim.SGD: lambda group: int(bool(group["momentum"])),
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.Rprop: lambda group: 2,
}
"""Rules that treat each element alone, and how many states of a parameter's size they keep."""


_PLAIN = (torch.nn.Parameter, torch.Tensor)


@dataclass
class Job:
    """What is on the device at once.

    Attributes:
        places: whole parameters, or one.
        nbytes: of their states.
        bounds: of the elements that are stepped, where it is not all.
        first, last: whether they are the parameter's first, or last.
        changed: what is to be stored.
        mapped: states that are used where they are stored.
    """

    places: Sequence[Place]
    nbytes: int = 0
    bounds: tuple[int, int] | None = None
    first: bool = True
    last: bool = True
    changed: list[Part] = field(default_factory=list)
    mapped: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Blocks:
    """What goes together.

    Attributes:
        kind: the optimizer's class without offload.
        limit: of the bytes of states that step together.
    """

    kind: type
    limit: int

    def jobs(self, optimizer: Any, places: Sequence[Place]) -> list[Job]:
        """Return what a step of parameters does, one after the other."""
        sizes = [self.size(optimizer, place) for place in places]
        # Parameters that are away come in with their states.
        coming = [p.nbytes if are_away([p]) else 0 for _, p, _ in places]
        loads = [size + more for size, more in zip(sizes, coming, strict=True)]
        jobs = []
        for group in blocks.grouped(loads, self.limit):
            bounds = self.bounds(optimizer, places[group[0]])
            if len(group) > 1 or len(bounds) == 2 or not self.is_elementwise(places[group[0]]):
                jobs.append(Job([places[i] for i in group], sum(sizes[i] for i in group)))
                continue
            last = len(bounds) - 2
            jobs += [
                Job([places[group[0]]], 0, (start, stop), index == 0, index == last)
                for index, (start, stop) in enumerate(pairwise(bounds))
            ]
        return jobs

    def bounds(self, optimizer: Any, place: Place) -> tuple[int, ...]:
        """Return where the parts of a parameter's states begin, and the end."""
        for value in optimizer.state.get(place[1], {}).values():
            if isinstance(value, Away):
                return value.bounds
        p = place[1]
        if not self.is_elementwise(place):
            return (0, p.numel())
        return blocks.parts(p.numel(), self.size(optimizer, place), self.limit)

    def is_elementwise(self, place: Place) -> bool:
        """Say whether a parameter may be stepped in parts."""
        p, g = place[1], place[1].grad
        if self.kind not in ELEMENTWISE or not _is_plain(p) or not is_dense(p) or p.is_complex():
            return False
        # PyTorch rounds half numbers otherwise at the ends of what threads and vectors take.
        if p.dtype in HALF_TYPES and p.device.type == "cpu":
            return False
        return g is None or (_is_plain(g) and g.stride() == p.stride() and g.dtype == p.dtype)

    def too_large(self, optimizer: Any) -> list[int]:
        """Return the bytes of states that are larger than a block, and are there at once."""
        found = []
        for place in places_of(optimizer):
            size = self.size(optimizer, place)
            on_device = place[1].device.type != "cpu" or self.kind in ELEMENTWISE
            if size > self.limit and not self.is_elementwise(place) and on_device:
                found.append(size)
        return found

    def size(self, optimizer: Any, place: Place) -> int:
        """Return the bytes of a parameter's states, also of those that are still to be made."""
        group, p, _ = place
        state = optimizer.state.get(p)
        if state:
            return sum(v.nbytes for v in state.values() if isinstance(v, Away) or goes(v))
        like = p.grad if p.grad is not None and _is_plain(p.grad) else p
        if like.numel() <= 1:
            return 0
        if issubclass(self.kind, few_bits.Optimizer):
            bits = states.bits_for(like, group["state_bits"], group["min_elements"])
            count = like.numel()
            each = 4 * count if bits == 32 else packed_bytes(count, bits)
            return each * len(self.kind.moments) * (group.get("beta1", 0) is not None)
        counted = ELEMENTWISE.get(self.kind)
        return like.nbytes * (1 if counted is None else counted(group))


def goes(value: Any) -> bool:
    """Say whether a value of a state is worth moving, and can be: counters stay."""
    return isinstance(value, torch.Tensor) and _is_plain(value) and value.numel() > 1


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def places_of(optimizer: Any) -> list[Place]:
    """Return all parameters with their groups and numbers."""
    pairs = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    return [(group, p, index) for index, (group, p) in enumerate(pairs)]
