"""Buffers in a second pass: written once, and read as the first pass read them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

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


class _Known(dict[type, bool]):
    """Whether a type is a tensor's; asking PyTorch each time takes ten times as long."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, torch.Tensor)
        return self[kind]


_TENSORS = _Known()


class Places:
    """The tensors that modules hold, whatever is put in their places afterwards.

    `torch.func.functional_call` puts others there for one call, a hook such as spectral_norm's sets
    an attribute before each call, a forward may keep its state in one.

    Args:
        modules: those that the function can reach.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._held = [
            (held, name, tensor)
            for module in modules
            for held in (module._parameters, module._buffers, module.__dict__)
            for name, tensor in held.items()
            if _TENSORS[type(tensor)]
        ]

    def first_pass_ended(self) -> None:
        """Let go of the graph behind what the forward itself has replaced."""
        self._held = [
            (held, name, tensor if held.get(name) is tensor else _without_graph(tensor))
            for held, name, tensor in self._held
        ]

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Put the tensors back inside the block."""
        others = [
            (held, name, held[name], tensor)
            for held, name, tensor in self._held
            if name in held and held[name] is not tensor
        ]
        for held, name, _, tensor in others:
            held[name] = tensor
        try:
            yield
        finally:
            for held, name, now, _ in others:
                held[name] = now


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


# Layers whose statistics are left alone now, with how many blocks ask for it and what to put back.
_frozen: dict[Any, tuple[int, float | None, Any]] = {}
_lock = threading.Lock()


def _freeze(module: Any) -> None:
    with _lock:
        count, momentum, counter = _frozen.get(
            module, (0, module.momentum, module.num_batches_tracked)
        )
        _frozen[module] = (count + 1, momentum, counter)
        module.momentum, module.num_batches_tracked = 0.0, None


def _thaw(module: Any) -> None:
    with _lock:
        count, momentum, counter = _frozen.pop(module)
        if count > 1:
            _frozen[module] = (count - 1, momentum, counter)
        else:
            module.momentum, module.num_batches_tracked = momentum, counter


@contextmanager
def statistics_untouched(modules: Sequence[Any]) -> Iterator[None]:
    """Let no normalisation layer that runs in the block update its running statistics.

    Momentum 0 keeps the averages, and a missing counter is not counted up; batch statistics are
    used all the same. Restored at the end of the block and not after each layer: recomputation
    may end early, by an exception inside a layer. PyTorch's hook is for all threads, so layers that
    another one runs are passed over.

    Args:
        modules: those that are known to run; others are met on the way.
    """
    changed: dict[Any, None] = {}
    thread = threading.get_ident()

    def freeze(module: Any, _: Any = None) -> None:
        if (
            isinstance(module, _NormBase)
            and module.training
            and module.track_running_stats
            and module not in changed
            and threading.get_ident() == thread
        ):
            changed[module] = None
            _freeze(module)

    for module in modules:
        freeze(module)
    handle = register_module_forward_pre_hook(freeze)
    try:
        yield
    finally:
        handle.remove()
        for module in changed:
            _thaw(module)
