"""What a function reaches by itself: modules, streams of random numbers, buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.behind import behind
from xmem.randomness import stream_kinds


@dataclass(frozen=True)
class Reach:
    """What a function can reach by itself.

    Attributes:
        modules: with all that are inside them.
        streams: generators of random numbers.
        buffers: tensors of the modules that ask for no gradients.
        parameters: those that do.
    """

    modules: list[Any]
    streams: list[Any]
    buffers: list[Any]
    parameters: list[Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Reach:
        """Find it."""
        kinds = tuple(stream_kinds())
        modules: dict[int, Any] = {}
        streams: dict[int, Any] = {}
        tensors: dict[int, Any] = {}
        for found in behind(function, (jt.Module, *kinds)):
            if isinstance(found, jt.Module):
                modules.update((id(m), m) for m in found.modules())
                tensors.update((id(p), p) for p in found.parameters())
            else:
                streams[id(found)] = found
        for module in modules.values():
            held = (v for v in module.__dict__.values() if isinstance(v, kinds))
            streams.update((id(v), v) for v in held)
        buffers = [p for p in tensors.values() if p.is_stop_grad()]
        parameters = [p for p in tensors.values() if not p.is_stop_grad()]
        return cls(list(modules.values()), list(streams.values()), buffers, parameters)
