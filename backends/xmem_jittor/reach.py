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
    """

    modules: list[Any]
    streams: list[Any]
    buffers: list[Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Reach:
        """Find it."""
        kinds = tuple(stream_kinds())
        modules: dict[int, Any] = {}
        streams: dict[int, Any] = {}
        buffers: dict[int, Any] = {}
        for found in behind(function, (jt.Module, *kinds)):
            if isinstance(found, jt.Module):
                modules.update((id(m), m) for m in found.modules())
                buffers.update((id(p), p) for p in found.parameters() if p.is_stop_grad())
            else:
                streams[id(found)] = found
        for module in modules.values():
            held = (v for v in module.__dict__.values() if isinstance(v, kinds))
            streams.update((id(v), v) for v in held)
        return cls(list(modules.values()), list(streams.values()), list(buffers.values()))
