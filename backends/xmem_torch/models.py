"""The conformance workloads on PyTorch, built from torch.nn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from xmem.errors import CapabilityError
from xmem.workloads import spec

_BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_CONV = {2: nn.Conv2d, 3: nn.Conv3d}
_CONV_TRANSPOSE = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_MAX_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}


class Residual(nn.Module):
    """x -> body(x) + shortcut(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add."""
        kept = x if self.shortcut is None else self.shortcut(x)
        added: torch.Tensor = self.body(x) + kept
        return added


class Concat(nn.Module):
    """x -> [x, body(x)] along axis 1."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Join."""
        return torch.cat([x, self.body(x)], dim=1)


class Block(nn.Module):
    """What "every block" means in these models."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the body."""
        y: torch.Tensor = self.body(x)
        return y


class GlobalAveragePool(nn.Module):
    """(batch, channels, *space) -> (batch, channels)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Average."""
        return x.flatten(2).mean(2)


class Embedding(nn.Module):
    """Token ids (batch, sequence) -> (batch, sequence, width)."""

    def __init__(self, vocabulary: int, positions: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Add the positions' vectors to the tokens'."""
        y: torch.Tensor = self.token(ids) + self.position.weight[: ids.shape[1]]
        return y


class Attention(nn.Module):
    """Multi-head self-attention over (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        batch, sequence, width = x.shape
        split = self.project(x).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return y


class Models:
    """Builds workloads; see `xmem.protocols.Models`."""

    gaps: Mapping[str, str] = {}

    def __init__(self, device: str) -> None:
        self._device = device

    def build(self, spec: Any, weights: Mapping[str, np.ndarray[Any, Any]]) -> Any:
        """Build without initialising, then load the weights by name, strictly."""
        with torch.device("meta"):
            model = _module(spec)
        # to_empty would leave the buffers of normalisation layers undefined
        model.to_empty(device=self._device)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.reset_running_stats()
        state = dict(model.named_parameters())
        if state.keys() != weights.keys():
            raise ValueError(
                f"the weights do not fit: {sorted(state.keys() ^ weights.keys())} in one only"
            )
        with torch.no_grad():
            for name, parameter in state.items():
                parameter.copy_(torch.from_numpy(weights[name]))
        return model.train()

    def blocks(self, model: Any) -> list[Any]:
        """Return the Block modules."""
        return [m for m in model.modules() if isinstance(m, Block)]

    def tensor(self, array: np.ndarray[Any, Any]) -> Any:
        """Copy; integers become int64, which PyTorch's losses ask for."""
        dtype = torch.int64 if np.issubdtype(array.dtype, np.integer) else torch.float32
        # not torch.tensor(): on a CPU its memory would be NumPy's
        return torch.empty(array.shape, dtype=dtype, device=self._device).copy_(
            torch.from_numpy(np.ascontiguousarray(array))
        )

    def loss(self, kind: str, output: Any, target: Any) -> Any:
        """Average over all targets, in float32."""
        if kind == "mse":
            return functional.mse_loss(output.float(), target)
        if kind == "cross_entropy":
            return functional.cross_entropy(output.float().flatten(0, -2), target.flatten())
        if kind == "cross_entropy_channels":
            return functional.cross_entropy(output.float(), target)
        raise CapabilityError(f"the torch backend has no loss {kind!r}")

    def item(self, loss: Any) -> float:
        """Read the value."""
        return float(loss.detach())


def _module(layer: spec.Layer) -> nn.Module:
    match layer:
        case spec.Sequential(layers):
            chain = nn.Sequential()
            for name, inner in layers:
                chain.add_module(name, _module(inner))
            return chain
        case spec.Residual(body, shortcut):
            return Residual(_module(body), None if shortcut is None else _module(shortcut))
        case spec.Concat(body):
            return Concat(_module(body))
        case spec.Block(body):
            return Block(_module(body))
        case spec.Linear(inputs, outputs, _):
            return nn.Linear(inputs, outputs)
        case spec.Activation(name):
            return {"gelu": nn.GELU, "relu": nn.ReLU}[name]()
        case spec.LayerNorm(width):
            return nn.LayerNorm(width)
        case spec.Embedding(vocabulary, positions, width):
            return Embedding(vocabulary, positions, width)
        case spec.Attention(width, heads, causal):
            return Attention(width, heads, causal=causal)
        case _:
            return _spatial(layer)


def _spatial(layer: spec.Layer) -> nn.Module:
    match layer:
        case spec.Conv(axes, inputs, outputs, kernel, stride, padding, bias):
            return _CONV[axes](inputs, outputs, kernel, stride, padding, bias=bias)
        case spec.ConvTranspose(axes, inputs, outputs, kernel):
            return _CONV_TRANSPOSE[axes](inputs, outputs, kernel, kernel)
        case spec.BatchNorm(axes, channels, _):
            return _BATCH_NORM[axes](channels)
        case spec.GroupNorm(groups, channels):
            return nn.GroupNorm(groups, channels)
        case spec.MaxPool(axes, kernel, stride, padding):
            return _MAX_POOL[axes](kernel, stride, padding)
        case spec.GlobalAveragePool():
            return GlobalAveragePool()
        case _:
            raise CapabilityError(f"the torch backend cannot build {type(layer).__name__}")
