"""Models cast to half precision throughout, with masters (`masters.py`) or without (PyTorch 2.13).

Gradients are the optimizer's. The zero_grad of the model and of all inside it clears them too; that
of a module around the model, and torch's own clipping of `model.parameters()`, do not reach them.
Normalisation layers with running statistics keep their weights in float32 too, which PyTorch's
kernels ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from xmem.errors import CompositionError, UsageError
from xmem.records import Cast
from xmem_torch.left import HALF_TYPES
from xmem_torch.masters import Masters, master_of, parameters_of, put

_DATA_PARALLEL = (
    "DistributedDataParallel reduces the gradients of the half parameters, which float32 masters"
    " take away before it is done. Train with xmem.autocast there, or cast without optimizer="
)


def cast_model(model: Any, dtype: torch.dtype, optimizer: Any) -> Cast:
    """Cast a model and give its optimizers masters; see `xmem.protocols.Precision.cast_model`.

    The half copies are made before anything changes: only that may run out of memory.
    """
    optimizers = _several(optimizer)
    _check(model, optimizers)
    parameters, buffers = _to_cast(model)
    tensors = [*parameters.values(), *buffers.values()]
    before = [(t, t.data, t.grad) for t in tensors]
    masters = [Masters(model, o, parameters.values()) for o in optimizers]
    halves = [t.data.to(dtype) for t in tensors]
    held = ExitStack()
    try:
        for each in masters:
            each.begin()
        gradients = [None if t.grad is None else t.grad.to(dtype) for t in tensors]
        for tensor, half, gradient in zip(tensors, halves, gradients, strict=True):
            put(tensor, half, gradient)
        if masters:
            held.callback(model.register_forward_pre_hook(_refuse_data_parallel).remove)
            for module in model.modules():
                held.callback(_clear_masters_too(module))
    except BaseException:
        held.close()
        for each in masters:
            each.withdraw()
        for tensor, data, gradient in before:
            put(tensor, data, gradient)
        raise
    undos = [lambda: _restore(tensors, dtype, masters, held)]
    return Cast(
        (*parameters, *buffers),
        sum(t.numel() * (torch.float32.itemsize - dtype.itemsize) for t in tensors),
        sum(each.size_bytes for each in masters),
        lambda: undos.pop()() if undos else None,
    )


def _restore(
    tensors: Iterable[Any], dtype: torch.dtype, masters: Iterable[Masters], held: ExitStack
) -> None:
    held.close()
    for each in masters:
        each.end()
    for tensor in tensors:
        if tensor.dtype == dtype:
            gradient = tensor.grad
            put(tensor, tensor.data.float(), None if gradient is None else gradient.float())


def _several(optimizer: Any) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    if not isinstance(optimizer, (list, tuple)):
        return (optimizer,)
    if not optimizer:
        raise UsageError("there are no optimizers: leave optimizer= out to cast without masters")
    return tuple(optimizer)


def _check(model: Any, optimizers: Sequence[Any]) -> None:
    for name, tensor in _named_tensors(model):
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(f"{name!r} has no shape yet: run the model once before casting it")
        if tensor.dtype in HALF_TYPES:
            raise UsageError(
                f"{name!r} is in {str(tensor.dtype).removeprefix('torch.')} already: cast a float32"
                " model, or undo its receipt first"
            )
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise CompositionError(
            "the model is in DistributedDataParallel, whose buckets are of float32: cast it before"
            f" it is wrapped. {_DATA_PARALLEL}"
        )
    own = set(map(id, model.parameters()))
    seen: set[int] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"{type(optimizer).__name__} is no torch.optim.Optimizer")
        foreign = [p for p in parameters_of(optimizer) if id(p) not in own]
        if foreign:
            raise UsageError(
                f"the optimizer has {len(foreign)} parameters that are not the model's, the first"
                f" of shape {tuple(foreign[0].shape)}: pass the optimizer of this model's"
                " parameters"
            )
        held = set(map(id, parameters_of(optimizer)))
        if held & seen:
            raise UsageError(
                "two of the optimizers have the same parameter, which can have one master only"
            )
        seen |= held


def _named_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _to_cast(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the float32 parameters and buffers by name, without those that have to stay."""
    stay = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
        for tensor in (*module._parameters.values(), *module._buffers.values())
    }

    def cast(named: Iterator[tuple[str, Any]]) -> dict[str, Any]:
        return {n: t for n, t in named if t.dtype == torch.float32 and id(t) not in stay}

    return cast(model.named_parameters()), cast(model.named_buffers())


@dataclass
class _ZeroGrad:
    """The zero_grad of a module whose parameters may have masters.

    An object and not a closure, so that it is copied and pickled with its module: a copy's
    parameters have no masters.
    """

    module: Any
    before: Any

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        module = self.module
        plain = functools.partial(type(module).zero_grad, module)
        (self.before or plain)(*args, **kwargs)
        masters = [m for p in module.parameters() if (m := master_of(p)) is not p]
        if masters:
            of_them = torch.nn.ParameterList(masters)
            of_them.zero_grad(*args, **kwargs)


def _clear_masters_too(module: Any) -> Callable[[], None]:
    """Let a module's zero_grad reach masters; returns the undo."""
    before = module.__dict__.get("zero_grad")
    module.__dict__["zero_grad"] = _ZeroGrad(module, before)

    def undo() -> None:
        del module.__dict__["zero_grad"]
        if before is not None:
            module.__dict__["zero_grad"] = before

    return undo


def _refuse_data_parallel(*_: Any) -> None:
    if DistributedDataParallel._active_ddp_module is not None:
        raise CompositionError(_DATA_PARALLEL)
