"""Fake tensors in the places of a model's, an optimizer's and a batch's (PyTorch 2.13).

`FakeTensorMode.from_tensor` makes them: shapes, types and which of them share memory, no data.
Modules stay the same objects, with their hooks and replaced forwards; the tensors that they hold,
and those that an optimizer has in its groups and states, are exchanged for the time of a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from xmem.containers import leaves, rebuilt
from xmem.errors import CapabilityError
from xmem_torch.attributes import Attributes


def mode_of(tensors: Iterable[Any]) -> Any:
    """Return the FakeTensorMode of tensors that are fake already, or a new one.

    Raises:
        CapabilityError: they are of several modes.
    """
    found = {id(t.fake_mode): t.fake_mode for t in tensors if isinstance(t, FakeTensor)}
    if len(found) > 1:
        raise CapabilityError(
            "the model, its batch and its optimizer are fake tensors of several FakeTensorModes,"
            " which do not go together: make them under one"
        )
    [mode] = found.values() or [FakeTensorMode(allow_non_fake_inputs=True)]
    return mode


class Fakes:
    """Makes fakes, one for each tensor.

    Args:
        mode: what they belong to.
        device: where those of tensors without data (device "meta") are said to be.
    """

    def __init__(self, mode: Any, device: str) -> None:
        self._mode = mode
        self._device = device
        self._made: dict[int, tuple[Any, Any]] = {}  # the tensor too, so that its id stays its own

    def of(self, tensor: Any) -> Any:
        """Return the fake of a tensor."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
        return self._made[id(tensor)][1]

    def _make(self, tensor: Any) -> Any:
        if tensor.device.type == "meta":
            with self._mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
                )
            parameter = isinstance(tensor, torch.nn.Parameter)
            return (
                torch.nn.Parameter(fake, tensor.requires_grad)
                if parameter
                else fake.requires_grad_(tensor.requires_grad)
            )
        if isinstance(tensor, FakeTensor):
            fake = tensor.detach()
        else:
            # without its gradient and the graph behind it, which would be made fake, too
            fake = self._mode.from_tensor(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def inside(self, tree: Any) -> Any:
        """Return nested lists, tuples and dicts with fakes in the places of tensors."""
        if isinstance(tree, torch.Tensor):
            return self.of(tree)
        return rebuilt(tree, self.inside)

    def forget(self) -> None:
        """Let go of all fakes, which then live where they have been put."""
        self._made.clear()

    @contextmanager
    def in_modules(self, modules: Sequence[Any]) -> Iterator[None]:
        """Exchange what modules hold for the time of a block."""
        held = [d for m in modules for d in (m._parameters, m._buffers)]
        before = [dict(d) for d in held]
        attributes = Attributes(modules)
        try:
            for places in held:
                for name, tensor in places.items():
                    if tensor is not None:
                        places[name] = self.of(tensor)
            for module in modules:
                for name, value in list(vars(module).items()):
                    if isinstance(value, torch.Tensor):
                        vars(module)[name] = self.of(value)
            yield
        finally:
            attributes.put_back()
            for places, was in zip(held, before, strict=True):
                places.clear()
                places.update(was)

    @contextmanager
    def in_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Exchange what an optimizer holds for the time of a block."""
        groups, state = optimizer.param_groups, optimizer.state
        faked: dict[Any, Any] = defaultdict(dict)
        for key, value in state.items():
            faked[self.inside(key)] = self.inside(value)
        kept = [dict(group) for group in groups]
        try:
            optimizer.state = faked
            for group in groups:
                group.update({name: self.inside(value) for name, value in group.items()})
            yield
        finally:
            optimizer.state = state
            for group, was in zip(groups, kept, strict=True):
                group.clear()
                group.update(was)


def held_by(modules: Iterable[Any]) -> list[Any]:
    """Return the tensors that modules hold: parameters, buffers, plain attributes."""
    places = [d for m in modules for d in (m._parameters, m._buffers, vars(m))]
    return [v for d in places for v in d.values() if isinstance(v, torch.Tensor)]


def state_of(optimizer: Any) -> list[Any]:
    """Return the tensors in an optimizer's state and groups, parameters aside."""
    settings = [v for group in optimizer.param_groups for n, v in group.items() if n != "params"]
    return leaves([list(optimizer.state.values()), settings], torch.Tensor)
