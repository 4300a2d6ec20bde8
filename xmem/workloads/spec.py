"""Layers as data: what a workload's model is made of, whatever the framework.

A backend's `models.py` turns each layer into the framework's own module. Parameters are named by
their path, with PyTorch's leaf names, e.g. "blocks.3.attention.project.weight".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

ActivationName = Literal["gelu", "relu"]


@dataclass(frozen=True)
class Linear:
    """(..., inputs) -> (..., outputs); weight (outputs, inputs), bias (outputs,).

    Weights start normal with standard deviation gain / sqrt(inputs).
    """

    inputs: int
    outputs: int
    gain: float = 1.0


@dataclass(frozen=True)
class Conv:
    """(batch, inputs, *space) -> (batch, outputs, *space'); weight (outputs, inputs, *kernel)."""

    axes: Literal[2, 3]
    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True


@dataclass(frozen=True)
class ConvTranspose:
    """Upsample by `kernel` = stride; weight (inputs, outputs, *kernel), bias (outputs,)."""

    axes: Literal[2, 3]
    inputs: int
    outputs: int
    kernel: int


@dataclass(frozen=True)
class BatchNorm:
    """Batch normalisation over (batch, *space), momentum 0.1, eps 1e-5; weight starts at gain."""

    axes: Literal[2, 3]
    channels: int
    gain: float = 1.0


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalisation over the last axis, eps 1e-5."""

    width: int


@dataclass(frozen=True)
class GroupNorm:
    """Group normalisation over (channels / groups, *space), eps 1e-5."""

    groups: int
    channels: int


@dataclass(frozen=True)
class Activation:
    """GELU (exact, with erf) or ReLU."""

    name: ActivationName


@dataclass(frozen=True)
class MaxPool:
    """Maximum over windows."""

    axes: Literal[2, 3]
    kernel: int
    stride: int
    padding: int = 0


@dataclass(frozen=True)
class GlobalAveragePool:
    """(batch, channels, *space) -> (batch, channels)."""

    axes: Literal[2, 3]


@dataclass(frozen=True)
class Embedding:
    """Token ids (batch, sequence) -> (batch, sequence, width), plus a learnt position.

    Parameters `token.weight` (vocabulary, width) and `position.weight` (positions, width).
    """

    vocabulary: int
    positions: int
    width: int


@dataclass(frozen=True)
class Attention:
    """Multi-head self-attention over (batch, sequence, width).

    Parameters `project.{weight,bias}` (3 width, width), in the order query, key, value, and
    `output.{weight,bias}` (width, width).
    """

    width: int
    heads: int
    causal: bool


@dataclass(frozen=True)
class Sequential:
    """Layers one after the other, under the given names."""

    layers: tuple[tuple[str, Layer], ...]


@dataclass(frozen=True)
class Residual:
    """x -> body(x) + shortcut(x), the shortcut being x itself where there is none.

    Parameters under `body.` and `shortcut.`.
    """

    body: Layer
    shortcut: Layer | None = None


@dataclass(frozen=True)
class Concat:
    """x -> [x, body(x)] joined along axis 1: a skip connection. Parameters under `body.`."""

    body: Layer


@dataclass(frozen=True)
class Block:
    """What "every block" of a checkpointing layout means here. Parameters under `body.`."""

    body: Layer


Layer: TypeAlias = (
    Linear
    | Conv
    | ConvTranspose
    | BatchNorm
    | LayerNorm
    | GroupNorm
    | Activation
    | MaxPool
    | GlobalAveragePool
    | Embedding
    | Attention
    | Sequential
    | Residual
    | Concat
    | Block
)


@dataclass(frozen=True)
class Parameter:
    """A parameter's shape and how it starts.

    Attributes:
        shape: its shape.
        start: "fan_in" (normal, gain / sqrt(fan_in)), "small" (normal, 0.02),
            "constant" (gain) or "zeros".
        fan_in: inputs per output, for "fan_in".
        gain: factor on the standard deviation, or the constant.
    """

    shape: tuple[int, ...]
    start: Literal["fan_in", "small", "constant", "zeros"]
    fan_in: int = 1
    gain: float = 1.0


def children(layer: Layer) -> tuple[tuple[str, Layer], ...]:
    """Return the layers inside a layer, with the names that parameters carry."""
    match layer:
        case Sequential(layers):
            return layers
        case Residual(body, shortcut) if shortcut is not None:
            return (("body", body), ("shortcut", shortcut))
        case Residual(body) | Concat(body) | Block(body):
            return (("body", body),)
        case _:
            return ()


def parameters(layer: Layer, path: str = "") -> Iterator[tuple[str, Parameter]]:
    """Yield every parameter of a declaration by name, in a fixed order."""
    own = _own_parameters(layer)
    for name, parameter in own:
        yield f"{path}{name}", parameter
    for name, child in children(layer):
        yield from parameters(child, f"{path}{name}.")


def _own_parameters(layer: Layer) -> list[tuple[str, Parameter]]:
    match layer:
        case Linear(inputs, outputs, gain):
            return _affine((outputs, inputs), inputs, outputs, gain)
        case Conv(axes, inputs, outputs, kernel, bias=bias):
            shape = (outputs, inputs) + (kernel,) * axes
            weights = _affine(shape, inputs * kernel**axes, outputs)
            return weights if bias else weights[:1]
        case ConvTranspose(axes, inputs, outputs, kernel):
            return _affine((inputs, outputs) + (kernel,) * axes, inputs, outputs)
        case BatchNorm(_, width, gain):
            return _scale(width, gain)
        case LayerNorm(width) | GroupNorm(_, width):
            return _scale(width, 1.0)
        case Embedding(vocabulary, positions, width):
            return [
                ("token.weight", Parameter((vocabulary, width), "small")),
                ("position.weight", Parameter((positions, width), "small")),
            ]
        case Attention(width):
            project = _affine((3 * width, width), width, 3 * width)
            output = _affine((width, width), width, width)
            return [(f"project.{n}", p) for n, p in project] + [
                (f"output.{n}", p) for n, p in output
            ]
        case _:
            return []


def _scale(width: int, gain: float) -> list[tuple[str, Parameter]]:
    return [
        ("weight", Parameter((width,), "constant", gain=gain)),
        ("bias", Parameter((width,), "zeros")),
    ]


def _affine(
    shape: tuple[int, ...], fan_in: int, outputs: int, gain: float = 1.0
) -> list[tuple[str, Parameter]]:
    return [
        ("weight", Parameter(shape, "fan_in", fan_in, gain)),
        ("bias", Parameter((outputs,), "zeros")),
    ]
