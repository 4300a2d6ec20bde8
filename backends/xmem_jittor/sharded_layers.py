"""Linear layers by columns and rows, on Jittor (1.3.11).

Mohammad Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019. What passes between the parts is one all-reduce a pass, a lazy operation of
`messages`, so forward and backward stay one graph. A backward that is built to be looked at only
(`trial.py`) communicates nothing, or other ranks would have to run it.

A layer says how to make it whole again (`ShardedLinear`); parameters say so by `shares`, which also
keeps Jittor from averaging gradients of different parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jittor as jt
from jittor import nn

from xmem.distributed.counting import note
from xmem.distributed.layer_plans import Layer, check_sizes, chosen
from xmem.distributing import Dim
from xmem.errors import CompositionError, UsageError
from xmem.receipts import Receipt
from xmem_jittor import messages, methods, ranks, shares
from xmem_jittor.checkpoint import Checkpoint
from xmem_jittor.data_parallel import equalize, is_parallel
from xmem_jittor.trial import trying


class ShardedLinear(jt.Module):
    """A linear layer that keeps this rank's part of the weight.

    Attributes:
        dim: "out": the rows of the weight are shared out, and the bias; "in": its columns.
        parts: how many parts there are.
        part: which of them this is; the rank.
        in_features: of the whole layer.
        out_features: of the whole layer.
        cuts: the axis along which all ranks' parts of a parameter make the whole, by name; a
            parameter that is not in it ("bias" of an "in" layer) is whole on every rank.
        weight: (out_features / parts, in_features) or (out_features, in_features / parts).
        bias: (out_features / parts,) or (out_features,), or None.
    """

    def __init__(self, layer: Any, dim: Dim, part: int, parts: int) -> None:
        self.dim: Dim = dim
        self.parts = parts
        self.part = part
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.cuts = {"weight": 0, "bias": 0} if dim == "out" else {"weight": 1}
        if layer.bias is None:
            self.cuts.pop("bias", None)
        self.weight = self._part_of("weight", layer.weight)
        self.bias = self._part_of("bias", layer.bias)
        if hasattr(layer, "is_train"):
            self.is_train = layer.is_train
        self._mark()

    def _part_of(self, name: str, whole: Any) -> Any:
        if whole is None:
            return None
        with jt.flag_scope(no_grad=0):
            value = whole.detach()
            axis = self.cuts.get(name)
            if axis is not None:
                width = value.shape[axis] // self.parts
                rows = slice(self.part * width, (self.part + 1) * width)
                value = value[rows] if axis == 0 else value[:, rows]
            # A copy, so that the whole can go; also of what stays whole, as the layer may live on.
            copy = messages.view(messages.joined([value.stop_grad()]), value.shape).sync()
            return copy.stop_grad() if whole.is_stop_grad() else copy.start_grad()

    def _mark(self) -> None:
        """Note on the parameters what they are; a copy of a layer has no notes."""
        for name in ("weight", "bias"):
            parameter = getattr(self, name)
            if parameter is None or shares.of(parameter) is not None:
                continue
            axis = self.cuts.get(name)
            shape = list(parameter.shape)
            if axis is not None:
                shape[axis] *= self.parts
            kind: Any = "equal" if axis is None else "part"
            share = shares.Share(kind, tuple(shape), str(parameter.dtype), axis=axis)
            shares.mark(parameter, share)

    def execute(self, x: Any) -> Any:
        """(..., in_features) -> (..., out_features / parts), or the other way round."""
        self._mark()
        if self.dim == "out":
            # The class's own, looked up in each call: autocast replaces it while it is in force.
            return nn.Linear.execute(self, _Entering()(x))
        if x.shape[-1] * self.parts != self.in_features:
            raise UsageError(
                f"an 'in' layer takes this rank's part of its {self.in_features} inputs, (...,"
                f" {self.in_features // self.parts}), and got {tuple(x.shape)}. Let it follow an"
                " 'out' layer, with nothing but elementwise functions between"
            )
        y = _Leaving()(nn.matmul_transpose(x, self.weight))
        return y if self.bias is None else y + self.bias.cast(y.dtype)

    def extra_repr(self) -> str:
        """Show sizes, and which part this is."""
        sizes = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.dim} {self.part} of {self.parts}"


class _Entering(jt.Function):
    """Nothing forward; backward, the gradients from all parts are added up."""

    def execute(self, x: Any) -> Any:
        """Hand it on."""
        return x.detach()

    def grad(self, gradient: Any) -> Any:
        """Add up."""
        return _sum(gradient)


class _Leaving(jt.Function):
    """Forward, the outputs of all parts are added up; nothing backward."""

    def execute(self, y: Any) -> Any:
        """Add up."""
        return _sum(y.detach())

    def grad(self, gradient: Any) -> Any:
        """Hand it on."""
        return gradient


def _sum(x: Any) -> Any:
    """Add up over ranks."""
    x = x.stop_fuse()
    if trying():
        return messages.gate(x)
    note("all_reduce", x.nbytes, ranks.size())
    return messages.all_reduce(x, "sum")


def shard_linear(layer: Any, dim: Dim) -> Any:
    """Return the layer that keeps this rank's part; the layer itself where there is one rank."""
    if not _is_linear(layer):
        raise UsageError(
            f"{type(layer).__name__} is no jt.nn.Linear, or its execute is replaced: those that can"
            " be cut are plain ones"
        )
    check_sizes(Layer("", layer.in_features, layer.out_features), dim, ranks.size())
    if ranks.size() == 1:
        return layer
    _refuse_shares(layer)
    equalize(layer.parameters())
    sharded = ShardedLinear(layer, dim, ranks.rank(), ranks.size())
    methods.hold(sharded)
    return sharded


def shard(model: Any, plan: Mapping[str, Dim]) -> Receipt:
    """Shard the layers of a model in place; a layer in several places stays one."""
    if is_parallel(model):
        raise CompositionError(
            f"{type(model).__name__} averages gradients over ranks, and ranks with different parts"
            " have nothing to average. Call tensor_parallel without data_parallel"
        )
    places = list(_places(model, ""))
    layers = [_described(path, m, places) for path, _, _, m in places if _is_linear(m)]
    others = {path: type(m).__name__ for path, _, _, m in places if not _is_linear(m)}
    dims = chosen(plan, layers, others, ranks.size())
    if ranks.size() == 1:
        return Receipt("tensor_parallel", "jittor", len(dims), tuple(dims))
    _refuse_shares(model)
    equalize(model.parameters())
    _share_random_numbers()
    made: dict[int, ShardedLinear] = {}
    kept: list[Any] = []  # so that no id comes twice
    saved = 0
    for path, parent, name, layer in places:
        if path not in dims:
            continue
        if id(layer) not in made:
            made[id(layer)] = ShardedLinear(layer, dims[path], ranks.rank(), ranks.size())
            saved += _bytes(layer) - _bytes(made[id(layer)])
            kept.append(layer)
        _put(parent, name, made[id(layer)])
    for parameter in model.parameters():
        if shares.of(parameter) is None:
            shape = tuple(parameter.shape)
            shares.mark(parameter, shares.Share("equal", shape, str(parameter.dtype)))
    methods.hold(model)
    return Receipt("tensor_parallel", "jittor", len(made), tuple(dims), expected_saving_bytes=saved)


def _places(module: Any, above: str) -> list[tuple[str, Any, str, Any]]:
    """Return path, parent, name and module of all modules inside one, outer ones first."""
    found = []
    for name, child in Checkpoint().children(module):
        path = f"{above}.{name}" if above else str(name)
        found.append((path, module, name, child))
        found += _places(child, path)
    return found


def _put(parent: Any, name: str, layer: Any) -> None:
    if isinstance(parent, nn.Sequential):
        parent.layers[name] = layer
    else:
        setattr(parent, name, layer)


def _is_linear(module: Any) -> bool:
    """Say whether a module is a linear layer and nothing more."""
    return type(module) is nn.Linear and "execute" not in vars(module)


def _described(path: str, layer: Any, places: list[tuple[str, Any, str, Any]]) -> Layer:
    shared = [
        f"{where}.{name}"
        for where, _, _, module in places
        for name, value in vars(module).items()
        if module is not layer and isinstance(value, jt.Var) and value is layer.weight
    ]
    return Layer(path, layer.in_features, layer.out_features, shared[0] if shared else "")


def _refuse_shares(module: Any) -> None:
    if shares.kinds(module.parameters()):
        raise CompositionError(
            f"{type(module).__name__} is shared out over the ranks already. Shard a plain model"
        )


def _bytes(module: Any) -> int:
    return sum(p.nbytes for p in module.parameters())


def _share_random_numbers() -> None:
    """Let the streams of all ranks begin anew, alike, so that dropout agrees."""
    seeds = ranks.exchange(str(jt.get_seed()).encode())
    jt.set_seed((int(seeds[0]) * 1000003 + 1) % 2**31)
