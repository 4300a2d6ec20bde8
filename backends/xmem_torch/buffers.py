"""Buffers and held tensors in a second pass: written once, read as the first pass read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from xmem_torch.tensors import version

# The buffers that a module's forward has been seen to write, by module and mode; normalisation
# layers are left out, their statistics do not enter the output in training.
_written: weakref.WeakKeyDictionary[Any, dict[bool, frozenset[str]]] = weakref.WeakKeyDictionary()
_SMALL_BYTES = 4096  # are copied in any case


@dataclass(frozen=True)
class _Entry:
    """A buffer before the first pass; `copy` is None where writing was not expected."""

    module: Any
    name: str
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def written(self) -> bool:
        now = self.module._buffers.get(self.name)
        return now is not self.buffer or version(self.buffer) != self.version


class Buffers:
    """The buffers that a function writes, as they were before it.

    Which ones it writes shows after the first call in each mode, which therefore copies all of
    them; later calls copy only those, and small ones. A large one that is first written in a later
    call is written once all the same, but read in the second pass as the first pass left it.

    Args:
        modules: those that the function can reach.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._before: list[_Entry] = []
        for module in modules:
            if module._buffers and not isinstance(module, _NormBase):
                names = _written.setdefault(module, {}).get(module.training)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        wanted = names is None or name in names or buffer.nbytes <= _SMALL_BYTES
                        copy = buffer.detach().clone() if wanted else None
                        self._before.append(_Entry(module, name, buffer, version(buffer), copy))
                _written[module].setdefault(module.training, frozenset())

    def first_pass_ended(self) -> None:
        """Let go of the buffers that were not written."""
        self._before = [entry for entry in self._before if entry.written]
        for entry in self._before:
            written = _written[entry.module]
            mode = entry.module.training
            written[mode] = written.get(mode, frozenset()) | {entry.name}

    @property
    def written(self) -> bool:
        """Whether the first pass wrote any; for use after its end."""
        return bool(self._before)

    def wrote(self, module: Any) -> set[str]:
        """Return the buffers of a module that the first pass wrote; for use after its end."""
        return {e.name for e in self._before if e.module is module}

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Let modules read and write copies from before the first pass inside the block."""
        now = [(e.module, e.name, e.module._buffers.get(e.name)) for e in self._before]
        for e in self._before:
            e.module._buffers[e.name] = (e.buffer if e.copy is None else e.copy).detach().clone()
        try:
            yield
        finally:
            for module, name, buffer in now:
                module._buffers[name] = buffer

    def put_back(self) -> None:
        """Undo what has been written since; for use without `first_pass_ended`."""
        for entry in self._before:
            if entry.written and entry.copy is not None:
                with torch.no_grad():
                    entry.buffer.copy_(entry.copy)
                entry.module._buffers[entry.name] = entry.buffer


class Places:
    """The tensors that modules hold, whatever is put in their places afterwards.

    `torch.func.functional_call` puts others there for one call, a hook such as spectral_norm's sets
    an attribute before each call, a forward may keep its state in one.

    Args:
        modules: those that the function can reach.
        attributes: whether one of them may hold a tensor in an attribute of its own.
    """

    def __init__(self, modules: Sequence[Any], *, attributes: bool) -> None:
        registered = [m._parameters for m in modules if m._parameters]
        registered += [m._buffers for m in modules if m._buffers]
        self._held = [(held, held.copy()) for held in registered]
        if attributes:
            for module in modules:
                found = {n: v for n, v in module.__dict__.items() if isinstance(v, torch.Tensor)}
                self._held.append((module.__dict__, found))

    def exchanged(self) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
        """Return where something else is now: (where, what was there by name, the name)."""
        changed = [
            (held, before)
            for held, before in self._held
            if len(held) != len(before) or not all(map(is_, held.values(), before.values()))
        ]
        return [
            (held, before, name)
            for held, before in changed
            for name, tensor in before.items()
            if held.get(name) is not tensor and tensor is not None
        ]

    def first_pass_ended(self) -> None:
        """Let go of the graph behind what the forward itself has replaced."""
        for _, before, name in self.exchanged():
            before[name] = _without_graph(before[name])

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Put the tensors back inside the block."""
        others = [
            (held, before[name], name, held[name])
            for held, before, name in self.exchanged()
            if name in held
        ]
        for held, tensor, name, _ in others:
            held[name] = tensor
        try:
            yield
        finally:
            for held, _, name, now in others:
                held[name] = now


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)
