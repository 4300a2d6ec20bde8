"""Buffers in a second pass: written once, and read as the first pass read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

# The buffers that a module's forward has been seen to write, by module; normalisation layers are
# left out, their statistics do not enter the output in training.
_written: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()


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
        return now is not self.buffer or self.buffer._version != self.version


class Buffers:
    """The buffers that a function writes, as they were before it.

    Which ones it writes shows after the first call, which therefore copies all of them; later
    calls copy only those. One that is first written in a later call is written once all the same,
    but read in the second pass as the first pass left it.

    Args:
        modules: those that the function can reach.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._before: list[_Entry] = []
        for module in modules:
            if module._buffers and not isinstance(module, _NormBase):
                names = _written.get(module)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        wanted = names is None or name in names
                        copy = buffer.detach().clone() if wanted else None
                        self._before.append(_Entry(module, name, buffer, buffer._version, copy))
                _written.setdefault(module, frozenset())

    def first_pass_ended(self) -> None:
        """Let go of the buffers that were not written."""
        self._before = [entry for entry in self._before if entry.written]
        for entry in self._before:
            _written[entry.module] |= {entry.name}

    def wrote(self, module: Any, name: str) -> bool:
        """Say whether the first pass wrote a buffer; for use after its end."""
        return any(e.module is module and e.name == name for e in self._before)

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


@contextmanager
def statistics_untouched(modules: Sequence[Any]) -> Iterator[None]:
    """Let no normalisation layer that runs in the block update its running statistics.

    Momentum 0 keeps the averages, and a missing counter is not counted up; batch statistics are
    used all the same. Restored at the end of the block and not after each layer: recomputation
    may end early, by an exception inside a layer.

    Args:
        modules: those that are known to run; others are met on the way.
    """
    changed: dict[Any, tuple[float | None, Any]] = {}

    def freeze(module: Any, _: Any = None) -> None:
        if (
            isinstance(module, _NormBase)
            and module.training
            and module.track_running_stats
            and module not in changed
        ):
            changed[module] = (module.momentum, module.num_batches_tracked)
            module.momentum = 0.0
            module.num_batches_tracked = None

    for module in modules:
        freeze(module)
    handle = register_module_forward_pre_hook(freeze)
    try:
        yield
    finally:
        handle.remove()
        for module, (momentum, counter) in changed.items():
            module.momentum = momentum
            module.num_batches_tracked = counter
