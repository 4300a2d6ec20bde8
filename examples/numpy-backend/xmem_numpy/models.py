"""Models from declarations: the layers of the `mlp` workload; others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xmem.errors import CapabilityError
from xmem.workloads import spec
from xmem_numpy import tape
from xmem_numpy.tape import Tensor


class Module:
    """A forward function, its parameters and its parts."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        own: Mapping[str, Tensor] | None = None,
        parts: Mapping[str, Module] | None = None,
        *,
        is_block: bool = False,
    ) -> None:
        self.forward = forward
        self.own = dict(own or {})
        self.parts = dict(parts or {})
        self.is_block = is_block

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def parameters(self, path: str = "") -> dict[str, Tensor]:
        """Return the parameters by name."""
        found = {f"{path}{name}": tensor for name, tensor in self.own.items()}
        for name, part in self.parts.items():
            found |= part.parameters(f"{path}{name}.")
        return found

    def blocks(self) -> list[Module]:
        """Return the blocks inside."""
        inner = [b for part in self.parts.values() for b in part.blocks()]
        return [self] if self.is_block else inner


class Models:
    """See `xmem.protocols.Models`, where every method is documented."""

    gaps: dict[str, str] = {}

    def build(self, layer: Any, weights: Mapping[str, np.ndarray], path: str = "") -> Module:
        match layer:
            case spec.Linear():
                weight, bias = (Tensor(weights[f"{path}{n}"].copy()) for n in ("weight", "bias"))
                own = {"weight": weight, "bias": bias}
                return Module(lambda x: tape.linear(x, weight, bias), own)
            case spec.Activation("gelu"):
                return Module(tape.gelu)
            case spec.Block(body):
                inner = self.build(body, weights, f"{path}body.")
                return Module(inner, parts={"body": inner}, is_block=True)
            case spec.Sequential(layers):
                parts = {n: self.build(part, weights, f"{path}{n}.") for n, part in layers}
                return Module(lambda x: _chain(parts, x), parts=parts)
            case _:
                raise CapabilityError(f"the numpy example has no {type(layer).__name__} layer")

    def blocks(self, model: Any) -> list[Any]:
        return list(model.blocks())

    def tensor(self, array: np.ndarray) -> Tensor:
        return Tensor(array.copy())

    def loss(self, kind: str, output: Any, target: Any) -> Any:
        if kind != "mse":
            raise CapabilityError(f"the numpy example has no loss {kind!r}")
        return tape.mean_squared_error(output, target)

    def item(self, loss: Any) -> float:
        return float(loss.data[0])


def _chain(parts: Mapping[str, Module], x: Tensor) -> Tensor:
    for part in parts.values():
        x = part(x)
    return x
