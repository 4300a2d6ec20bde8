"""Linear layers by columns and rows, on PyTorch (2.13).

Mohammad Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019. Not DTensor's ColwiseParallel and RowwiseParallel: with them a model has some
parameters that are DTensors and others that are plain, and of what people train with that breaks
fused and foreach optimizers, gradient clipping, the loss scaler, 8-bit optimizer states and the
measuring of bytes ("got mixed torch.Tensor and DTensor"). Here a part is a plain parameter, under
the name that the whole one had; peaks are the same.

What reads parameters must know which of them are parts: `parts_in`. A layer says how to make it
whole again (`ShardedLinear`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import functional

from xmem.distributed.counting import note
from xmem.distributed.layer_plans import Layer, check_sizes, chosen
from xmem.distributing import Dim
from xmem.errors import CompositionError, UsageError
from xmem.receipts import Receipt
from xmem_torch import communication, ranks
from xmem_torch.communication import counted
from xmem_torch.masters import master_of

# Modules whose parameters, by name, are this rank's alone: sharded layers, stages of a pipeline.
_holders: WeakSet[Any] = WeakSet()


class ShardedLinear(torch.nn.Module):
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

    def __init__(self, layer: torch.nn.Linear, dim: Dim, part: int, parts: int) -> None:
        super().__init__()
        self.dim: Dim = dim
        self.parts = parts
        self.part = part
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.cuts = {"weight": 0, "bias": 0} if dim == "out" else {"weight": 1}
        if layer.bias is None:
            self.cuts.pop("bias", None)
        for name in ("weight", "bias"):
            self.register_parameter(name, self._part_of(name, getattr(layer, name)))
        self.train(layer.training)
        _holders.add(self)

    def _part_of(self, name: str, whole: Any) -> Any:
        if whole is None:
            return None
        data = whole.detach()
        if name in self.cuts:
            data = data.chunk(self.parts, self.cuts[name])[self.part]
        # A copy, so that the whole can go; also of what stays whole, as the layer may live on.
        copy = data.clone(memory_format=torch.contiguous_format)
        return torch.nn.Parameter(copy, requires_grad=whole.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features / parts), or the other way round."""
        _holders.add(self)  # also a copy of a layer comes by here
        if self.dim == "out":
            return functional.linear(_Entering.apply(x), self.weight, self.bias)
        if x.shape[-1] * self.parts != self.in_features:
            raise UsageError(
                f"an 'in' layer takes this rank's part of its {self.in_features} inputs, (...,"
                f" {self.in_features // self.parts}), and got {tuple(x.shape)}. Let it follow an"
                " 'out' layer, with nothing but elementwise functions between"
            )
        y = _Leaving.apply(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Show sizes, and which part this is."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self.dim} {self.part} of {self.parts}"


class _Entering(torch.autograd.Function):
    """Nothing forward; backward, the gradients from all parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _sum(gradient)


class _Leaving(torch.autograd.Function):
    """Forward, the outputs of all parts are added up; nothing backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        result = _sum(y)
        if result is y:
            ctx.mark_dirty(y)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Add up over ranks, in the tensor's own memory where that is dense."""
    own = tensor if tensor.is_contiguous() else tensor.contiguous()
    note("all_reduce", own.nbytes, ranks.size())
    with counted("all_reduce of a sharded layer", 0 if own is tensor else own.nbytes):
        result: torch.Tensor = communication.all_reduce(own, "sum").wait()
    return own if result.data_ptr() == own.data_ptr() else result


def shard_linear(layer: Any, dim: Dim) -> Any:
    """Return the layer that keeps this rank's part; the layer itself where there is one rank."""
    if not _is_linear(layer):
        raise UsageError(
            f"{type(layer).__name__} is no torch.nn.Linear, or has hooks: those that can be cut are"
            " plain ones"
        )
    check_sizes(Layer("", layer.in_features, layer.out_features), dim, ranks.size())
    if ranks.size() == 1:
        return layer
    _take_from_first(layer)
    return ShardedLinear(layer, dim, ranks.rank(), ranks.size())


def shard(model: Any, plan: Mapping[str, Dim]) -> Receipt:
    """Shard the layers of a model in place; a layer in several places stays one."""
    if hasattr(model, "no_sync"):
        raise CompositionError(
            f"{type(model).__name__} averages gradients over ranks, and ranks with different parts"
            " have nothing to average. Give the plain model to tensor_parallel"
        )
    places = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if path]
    layers = [_described(path, m, places) for path, m in places if _is_linear(m)]
    others = {path: type(m).__name__ for path, m in places if not _is_linear(m)}
    dims = chosen(plan, layers, others, ranks.size())
    if ranks.size() == 1:
        return Receipt("tensor_parallel", "torch", len(dims), tuple(dims))
    _take_from_first(model)
    _share_random_numbers()
    found = dict(places)
    made: dict[int, ShardedLinear] = {}
    saved = 0
    for path, dim in dims.items():
        layer = found[path]
        if id(layer) not in made:
            made[id(layer)] = ShardedLinear(layer, dim, ranks.rank(), ranks.size())
            saved += _bytes(layer) - _bytes(made[id(layer)])
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made[id(layer)])
    return Receipt("tensor_parallel", "torch", len(made), tuple(dims), expected_saving_bytes=saved)


def hold(module: Any) -> None:
    """Let all parameters of a module be this rank's alone: of a stage of a pipeline."""
    _holders.add(module)


def parts_in(parameters: Iterable[Any]) -> set[int]:
    """Return the ids of those that only this rank has, so that others have other ones beside it.

    The rest are the same on every rank.
    """
    if not _holders:
        return set()
    found = set()
    for holder in list(_holders):
        cuts = holder.cuts if isinstance(holder, ShardedLinear) else None
        for name, parameter in holder.named_parameters():
            if cuts is None or name in cuts:
                found |= {id(parameter), id(master_of(parameter))}
    return found & {id(parameter) for parameter in parameters}


def _is_linear(module: Any) -> bool:
    """Say whether a module is a linear layer and nothing more."""
    plain = type(module) is torch.nn.Linear
    return (
        plain
        and not any(
            vars(module)[name]
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        )
        and "forward" not in vars(module)
    )


def _described(path: str, layer: Any, places: list[tuple[str, Any]]) -> Layer:
    shares = [
        f"{where}.{name}"
        for where, module in places
        for name, parameter in module._parameters.items()
        if module is not layer and parameter is layer.weight
    ]
    return Layer(path, layer.in_features, layer.out_features, shares[0] if shares else "")


def _bytes(module: Any) -> int:
    return sum(p.nbytes for p in module.parameters())


def _take_from_first(module: Any) -> None:
    """Give every rank rank 0's values."""
    for tensor in (*module.parameters(), *module.buffers()):
        note("broadcast", tensor.nbytes, ranks.size())
        communication.assign(tensor, communication.broadcast(tensor, 0).wait())


def _share_random_numbers() -> None:
    """Let the streams of all ranks go on from rank 0's, so that dropout agrees."""
    state = torch.get_rng_state()
    torch.set_rng_state(communication.broadcast(state, 0).wait())
    if ranks.device() == "cuda":
        state = torch.cuda.get_rng_state().cuda()
        torch.cuda.set_rng_state(communication.broadcast(state, 0).wait().cpu())
