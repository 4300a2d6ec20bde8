"""Bits for each layer under an error budget, from measured sensitivity.

Xiaoxuan Liu et al., "GACT: Activation Compressed Training for Generic Network Architectures", ICML
2022: layers differ in how much the rounding of what they save disturbs the gradients, so bits are
given where they matter. GACT estimates sensitivity in running training; here it is measured: a step
with one layer packed at a time, against an exact one. The rounding is unbiased and drawn for each
layer by itself, so squared errors add up, and fall with the square of the number of levels. What is
chosen is run, and chosen anew with a smaller budget if its error is larger than expected.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xmem.codec import levels, packed_bytes
from xmem.compressing import Compression
from xmem.errors import UsageError
from xmem.steps import LossFunction, check_step

if TYPE_CHECKING:
    from xmem.backend import Backend

KEPT = 32
"""Stands for bits where a layer stays uncompressed."""

_PROBE: int = 4
_ROUNDS = 4
_SEEDS = (1, 2)

Gradients = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class LayerBits(Mapping[str, int]):
    """Bits by layer: what `xmem.compress_activations(bits=...)` takes.

    Attributes:
        bits: by the layer's path; 32: it stays uncompressed.
        error: of the gradients, measured in a step: the L2 norm of what they are off, relative to
            their own.
        error_budget: what was asked for.
        raw_bytes: what these layers save for backward.
        packed_bytes: what that takes with these bits.
    """

    bits: Mapping[str, int]
    error: float
    error_budget: float
    raw_bytes: int
    packed_bytes: int

    def __getitem__(self, layer: str) -> int:
        return self.bits[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.bits)

    def __len__(self) -> int:
        return len(self.bits)


@dataclass(frozen=True)
class Layer:
    """What is known of a layer.

    Attributes:
        path: its name.
        elements: how many values it saves.
        raw_bytes: what they take.
        error: of the gradients when it alone is packed in 4 bits.
    """

    path: str
    elements: int
    raw_bytes: int
    error: float

    def bytes_at(self, bits: int) -> int:
        """Return what it saves in so many bits."""
        return self.raw_bytes if bits == KEPT else packed_bytes(self.elements, bits)

    def squared_error_at(self, bits: int) -> float:
        """Return the expected square of its error in so many bits."""
        if bits == KEPT:
            return 0.0
        return (self.error * levels(_PROBE, 0) / levels(bits, 0)) ** 2


def choose_bits(
    backend: Backend,
    model: Any,
    batch: Any,
    loss_fn: LossFunction,
    *,
    error: float,
    min_bytes: int | str,
    skip: Any = (),
) -> LayerBits:
    """Choose bits for the layers of a model; see `xmem.choose_bits`."""
    check_step(backend, model, loss_fn, "xmem.choose_bits")
    if not isinstance(error, (int, float)) or not 0 < error < math.inf:
        raise UsageError(f"error={error!r}; give the error that gradients may have, e.g. 0.01")
    asked = (min_bytes, skip, model)

    def gradients(bits: Any, seed: int) -> tuple[Gradients, Compression]:
        block = Compression(backend, bits, *asked, seed)
        with block.silent():
            step = backend.plans.step(model, batch, loss_fn, gradients=True)
        return step.gradients, block

    exact: Gradients = backend.plans.step(model, batch, loss_fn, gradients=True).gradients
    _, seen = gradients(8, _SEEDS[0])
    layers = [
        Layer(path, elements, raw_bytes, _distance(gradients({path: _PROBE}, _SEEDS[0])[0], exact))
        for path, (elements, raw_bytes) in seen.sizes.items()
    ]
    if not layers:
        raise UsageError(
            f"no layer of {type(model).__name__} saves {min_bytes} or more for backward; lower"
            " min_bytes, or take a larger batch"
        )
    allowed = error
    for _ in range(_ROUNDS):
        bits = assign(layers, allowed)
        found = max(_distance(gradients(bits, seed)[0], exact) for seed in _SEEDS)
        if found <= error:
            break
        allowed *= 0.9 * error / found
    else:
        bits, found = dict.fromkeys(seen.sizes, KEPT), 0.0
    return LayerBits(
        bits,
        found,
        error,
        sum(layer.raw_bytes for layer in layers),
        sum(layer.bytes_at(bits[layer.path]) for layer in layers),
    )


def assign(layers: list[Layer], error: float) -> dict[str, int]:
    """Return bits by layer: as few bytes as the expected error allows.

    Starts from all layers uncompressed and takes the step that saves most bytes for the squared
    error that it adds, until none fits; the choices of a layer are convex in both, so this is
    optimal up to the last step.
    """
    bits = {layer.path: KEPT for layer in layers}
    left = error**2
    while True:
        steps = [
            (saved / max(added, 1e-30), layer.path, fewer, added)
            for layer in layers
            for fewer in (8, 4, 2)
            if fewer < bits[layer.path]
            for saved in [layer.bytes_at(bits[layer.path]) - layer.bytes_at(fewer)]
            for added in [layer.squared_error_at(fewer) - layer.squared_error_at(bits[layer.path])]
            if saved > 0 and added <= left
        ]
        if not steps:
            return bits
        _, path, fewer, added = max(steps)
        bits[path] = fewer
        left -= added


def _distance(found: Gradients, exact: Gradients) -> float:
    """Return how far gradients are off, relative; infinite where they are not finite."""
    off = sum(float(np.sum((found[n].astype(np.float64) - exact[n]) ** 2)) for n in exact)
    norm = sum(float(np.sum(exact[n].astype(np.float64) ** 2)) for n in exact)
    if not math.isfinite(off):
        return math.inf
    return math.sqrt(off / norm) if norm else math.sqrt(off)


_chosen: weakref.WeakKeyDictionary[Any, dict[Any, LayerBits]] = weakref.WeakKeyDictionary()


def remembered(backend: Backend, model: Any, batch: Any, loss_fn: LossFunction, **how: Any) -> Any:
    """Return what was chosen for a model before, or choose."""
    kept = _chosen.setdefault(model, {})
    key = tuple(sorted((name, repr(value)) for name, value in how.items()))
    if key not in kept:
        kept[key] = choose_bits(backend, model, batch, loss_fn, **how)
    return kept[key]
