"""The conformance workloads as Jittor modules.

Jittor's own modules wherever they are right and fast enough. What differs: attention, residual
and concatenation, which Jittor has no module for; 3D convolution on a CPU (see `Conv3d`); the
losses, since `nn.cross_entropy_loss` moves classes to the last axis of 4-dimensional outputs only,
and `nn.mse_loss` of 262144 numbers is off by 8e-5 (see `_mean`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jittor as jt
import numpy as np
from jittor import nn

from xmem.errors import UsageError, unknown
from xmem.workloads import spec as declared
from xmem_jittor.kinds import Kind, apply

_MASKED = -6e4  # fits into float16, and the softmax of it is exactly 0


class Residual(nn.Module):
    """x -> body(x) + shortcut(x)."""

    def __init__(self, body: Any, shortcut: Any | None) -> None:
        self.body = body
        self.shortcut = shortcut

    def execute(self, x: Any) -> Any:
        """Add what the body makes of x to x or its shortcut."""
        return self.body(x) + (x if self.shortcut is None else self.shortcut(x))


class Concat(nn.Module):
    """x -> [x, body(x)] along axis 1."""

    def __init__(self, body: Any) -> None:
        self.body = body

    def execute(self, x: Any) -> Any:
        """Join x and what the body makes of it."""
        return jt.concat([x, self.body(x)], dim=1)


class Block(nn.Module):
    """A `Block` of the declaration."""

    def __init__(self, body: Any) -> None:
        self.body = body

    def execute(self, x: Any) -> Any:
        """Run the body."""
        return self.body(x)


class GlobalAveragePool(nn.Module):
    """(batch, channels, *space) -> (batch, channels)."""

    def execute(self, x: Any) -> Any:
        """Average over space."""
        return x.mean(dims=list(range(2, x.ndim)))


class Embedding(nn.Module):
    """Token ids -> vectors, plus a learnt position."""

    def __init__(self, vocabulary: int, positions: int, width: int) -> None:
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)

    def execute(self, ids: Any) -> Any:
        """Look up ids (batch, sequence)."""
        return self.token(ids) + self.position.weight[: ids.shape[1]]


class Attention(nn.Module):
    """Multi-head self-attention over (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        self.heads = heads
        self.causal = causal
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def execute(self, x: Any) -> Any:
        """Attend within each sequence."""
        batch, length, width = x.shape
        size = width // self.heads
        parts = self.project(x).reshape((batch, length, 3, self.heads, size))
        parts = parts.transpose((2, 0, 3, 1, 4))  # (3, batch, heads, sequence, size)
        query, key, value = parts[0], parts[1], parts[2]
        scores = nn.matmul(query, key.transpose((0, 1, 3, 2))) * (1 / math.sqrt(size))
        if self.causal:
            allowed = jt.index(scores.shape, 2) >= jt.index(scores.shape, 3)
            scores = jt.ternary(allowed, scores, jt.full_like(scores, _MASKED))
        mixed = nn.matmul(nn.softmax(scores, dim=-1), value)
        return self.output(mixed.transpose((0, 2, 1, 3)).reshape((batch, length, width)))


class GroupNorm(nn.GroupNorm):
    """Group normalisation whose averages are exact for volumes too.

    `nn.GroupNorm` takes one average over 65536 numbers for 2 channels of 32^3, which is 2e-5 off
    (see `_mean`); after five steps of the 3D U-Net the loss is 6e-5 off.
    """

    def execute(self, x: Any) -> Any:
        """Normalise (batch, channels, *space)."""
        return apply(Kind("group_norm"), self._normalised, [x, self.weight, self.bias])

    def _normalised(self, x: Any, weight: Any, bias: Any) -> Any:
        batch, channels = x.shape[:2]
        grouped = x.reshape((batch, self.num_groups, channels // self.num_groups, *x.shape[2:]))
        mean = _mean(grouped, 2).unsqueeze(2)
        variance = (_mean(grouped * grouped, 2).unsqueeze(2) - mean * mean).maximum(0.0)
        scale = weight.reshape((1, self.num_groups, -1)) / jt.sqrt(variance + self.eps)
        shift = bias.reshape((1, self.num_groups, -1)) - mean * scale
        space = list(range(3, grouped.ndim))
        y = grouped * scale.broadcast(grouped, space) + shift.broadcast(grouped, space)
        return y.reshape(x.shape)


class Conv3d(nn.Conv3d):
    """3D convolution as a sum of 2D convolutions, one for each slice of the kernel.

    On a CPU Jittor 1.3.11 has oneDNN for 2D only and runs `nn.conv3d` as one generic loop: 0.26 s
    forward and backward for 8 to 8 channels over 32^3 on one core.
    """

    def execute(self, x: Any) -> Any:
        """Convolve (batch, channels, depth, height, width)."""
        if jt.flags.use_cuda or jt.compile_extern.mkl_ops is None:
            return super().execute(x)
        y = self._pointwise(x) if self._is_pointwise() else self._by_slices(x)
        return y if self.bias is None else y + self.bias.broadcast(y, [0, 2, 3, 4])

    def _is_pointwise(self) -> bool:
        return self.kernel_size == self.stride == (1, 1, 1) and self.padding == (0, 0, 0)

    def _pointwise(self, x: Any) -> Any:
        batch, channels, depth, height, width = x.shape
        flat = x.reshape((batch, channels, depth * height, width))
        y = nn.conv2d(flat, self.weight.reshape((*self.weight.shape[:2], 1, 1)))
        return y.reshape((batch, -1, depth, height, width))

    def _by_slices(self, x: Any) -> Any:
        batch, channels, depth, height, width = x.shape
        slices, step, margin = self.kernel_size[0], self.stride[0], self.padding[0]
        padded = depth + 2 * margin
        # Depth joins the batch; outside of the volume reindex reads zeros.
        images = x.reindex(
            [batch, padded, channels, height, width], ["i0", "i2", f"i1-{margin}", "i3", "i4"]
        ).reshape((batch * padded, channels, height, width))
        depths = (padded - slices) // step + 1
        last = step * (depths - 1) + 1
        parts = []
        for index in range(slices):
            y = nn.conv2d(images, self.weight[:, :, index], None, self.stride[1:], self.padding[1:])
            y = y.reshape((batch, padded, *y.shape[1:]))
            parts.append(y[:, index : index + last : step])
        total = functools.reduce(operator.add, parts)
        return total.transpose((0, 2, 1, 3, 4))


class Models:
    """Build the workloads; see `xmem.protocols.Models`."""

    def __init__(self) -> None:
        self.gaps: Mapping[str, str] = {}

    def build(self, spec: declared.Layer, weights: Mapping[str, np.ndarray[Any, Any]]) -> Any:
        """Return a module in training mode with the given weights."""
        model = _module(spec)
        model.train()
        _load(model, weights)
        return model

    def blocks(self, model: Any) -> list[Any]:
        """Return the modules that a `Block` became, in the order of the declaration."""
        return [module for module in model.modules() if isinstance(module, Block)]

    def tensor(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a tensor that asks for no gradient; `jt.array` would make int64 int32."""
        make = jt.array64 if array.dtype == np.int64 else jt.array
        return make(array).stop_grad()

    def loss(self, kind: str, output: Any, target: Any) -> Any:
        """Return the scalar loss, computed in float32."""
        return apply(Kind("loss", raises=True), lambda v: _loss(kind, v, target), [output])

    def item(self, loss: Any) -> float:
        """Return a scalar's value; waits for it and for what was asked for before."""
        return float(loss.item())


def _loss(kind: str, output: Any, target: Any) -> Any:
    output = output.float32()
    match kind:
        case "mse":
            return _mean((output - target).sqr(), 1).mean()
        case "cross_entropy":
            return _cross_entropy(output, target, axis=output.ndim - 1)
        case "cross_entropy_channels":
            return _cross_entropy(output, target, axis=1)
        case _:
            known = ("mse", "cross_entropy", "cross_entropy_channels")
            raise UsageError(unknown("loss", kind, known))


def _cross_entropy(output: Any, target: Any, *, axis: int) -> Any:
    shifted = output - output.max([axis], keepdims=True).detach()
    picked = jt.index(output.shape, axis) == target.broadcast(output, [axis])
    return _mean(shifted.exp().sum(axis).log() - (shifted * picked).sum(axis), 1).mean()


def _mean(values: Any, axes: int) -> Any:
    """Average over all but the first axes, one axis after the other.

    Over several at once Jittor 1.3.11 adds into a single float32: 8e-5 off for 262144 numbers.
    """
    while values.ndim > axes:
        values = values.mean(values.ndim - 1)
    return values


def _load(model: Any, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
    trained = {name: p for name, p in model.named_parameters() if not p.is_stop_grad()}
    if trained.keys() != weights.keys():
        raise UsageError(
            f"weights and model disagree: only in the model"
            f" {sorted(trained.keys() - weights.keys())}, only in the weights"
            f" {sorted(weights.keys() - trained.keys())}"
        )
    for name, p in trained.items():
        if tuple(p.shape) != weights[name].shape:
            raise UsageError(
                f"{name} has shape {tuple(p.shape)} in the model and {weights[name].shape} in the"
                " weights"
            )
        p.assign(jt.array(weights[name]))


def _module(layer: declared.Layer) -> Any:
    match layer:
        case declared.Sequential(layers):
            return nn.Sequential(OrderedDict((name, _module(inner)) for name, inner in layers))
        case declared.Residual(body, shortcut):
            return Residual(_module(body), None if shortcut is None else _module(shortcut))
        case declared.Concat(body):
            return Concat(_module(body))
        case declared.Block(body):
            return Block(_module(body))
        case _:
            return _leaf(layer)


def _leaf(layer: declared.Layer) -> Any:
    match layer:
        case declared.Linear(inputs, outputs):
            return nn.Linear(inputs, outputs)
        case declared.Conv(axes, inputs, outputs, kernel, stride, padding, bias):
            make = nn.Conv if axes == 2 else Conv3d
            return make(inputs, outputs, kernel, stride, padding, bias=bias)
        case declared.ConvTranspose(axes, inputs, outputs, kernel):
            make = nn.ConvTranspose if axes == 2 else nn.ConvTranspose3d
            return make(inputs, outputs, kernel, stride=kernel)
        case declared.BatchNorm(_, channels):
            return nn.BatchNorm(channels)
        case declared.LayerNorm(width):
            return nn.LayerNorm(width)
        case declared.GroupNorm(groups, channels):
            return GroupNorm(groups, channels)
        case declared.Activation("gelu"):
            return nn.GELU()
        case declared.Activation("relu"):
            return nn.ReLU()
        case declared.MaxPool(axes, kernel, stride, padding):
            make = nn.Pool if axes == 2 else nn.Pool3d
            return make(kernel, stride, padding, op="maximum")
        case declared.GlobalAveragePool():
            return GlobalAveragePool()
        case declared.Embedding(vocabulary, positions, width):
            return Embedding(vocabulary, positions, width)
        case declared.Attention(width, heads, causal):
            return Attention(width, heads, causal=causal)
        case _:
            raise UsageError(f"no Jittor module for {type(layer).__name__}")
