"""Training in half precision throughout, with float32 masters in the optimizer (PyTorch 2.13).

A parameter stays the same object and gets half data; the master takes over the float32 storage and
the parameter's place in the optimizer. `register_post_accumulate_grad_hook` moves each gradient to
the master as soon as it is made, so that half gradients never add up; after a step the parameters
are the masters, rounded. Whoever changes a parameter in place (`load_state_dict`) changes its
master with the next step.

Gradients are the optimizer's: `model.zero_grad()` and torch's own clipping of `model.parameters()`
do not reach them. Normalisation layers with running statistics keep their weights in float32 too,
which PyTorch's kernels ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from xmem.errors import CompositionError, UsageError
from xmem.records import Cast
from xmem_torch.left import HALF_TYPES

# The master of each parameter that has one.
_masters: Any = WeakTensorKeyDictionary()

_DATA_PARALLEL = (
    "DistributedDataParallel reduces the gradients of the half parameters, which float32 masters"
    " take away before it is done. Train with xmem.autocast there, or cast without optimizer="
)


def master_of(parameter: Any) -> Any:
    """Return the float32 master of a parameter; the parameter itself where it has none."""
    return _masters.get(parameter, parameter) if len(_masters) else parameter


def check_gradients(optimizer: Any) -> None:
    """Refuse to go on without any gradient.

    Raises:
        UsageError: no parameter of the optimizer has one.
    """
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "no parameter of the optimizer has a gradient: call xmem.backward(loss, optimizer)"
            " first, and zero_grad only after the step"
        )


def cast_model(model: Any, dtype: torch.dtype, optimizer: Any) -> Cast:
    """Cast a model and give its optimizer masters; see `xmem.protocols.Precision.cast_model`."""
    _check(model, optimizer)
    parameters, buffers = _to_cast(model)
    tensors = [*parameters.values(), *buffers.values()]
    masters = None if optimizer is None else _Masters(model, optimizer, parameters.values())
    for tensor in tensors:
        _turn(tensor, dtype)
    if masters is not None:
        masters.begin()
    undos = [lambda: _restore(tensors, dtype, masters)]
    return Cast(
        (*parameters, *buffers),
        sum(t.numel() * (torch.float32.itemsize - dtype.itemsize) for t in tensors),
        0 if masters is None else masters.size_bytes,
        lambda: undos.pop()() if undos else None,
    )


def _restore(tensors: Iterable[Any], dtype: torch.dtype, masters: _Masters | None) -> None:
    if masters is not None:
        masters.end()
    for tensor in tensors:
        if tensor.dtype == dtype:
            _turn(tensor, torch.float32)


def _turn(tensor: Any, dtype: torch.dtype) -> None:
    """Give a tensor data of another type, and its gradient too."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    tensor.grad = None if gradient is None else gradient.to(dtype)


def _check(model: Any, optimizer: Any) -> None:
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
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{type(optimizer).__name__} is no torch.optim.Optimizer")
    own = set(map(id, model.parameters()))
    foreign = [p for p in _parameters_of(optimizer) if id(p) not in own]
    if foreign:
        raise UsageError(
            f"the optimizer has {len(foreign)} parameters that are not the model's, the first of"
            f" shape {tuple(foreign[0].shape)}: pass the optimizer of this model's parameters"
        )


def _named_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _parameters_of(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


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


class _Masters:
    """The float32 masters of a model's parameters, in their places in an optimizer.

    Attributes:
        size_bytes: what the masters take.
    """

    def __init__(self, model: Any, optimizer: Any, parameters: Iterable[Any]) -> None:
        self._model = model
        self._optimizer = optimizer
        held = set(map(id, _parameters_of(optimizer)))
        self._parameters = [p for p in parameters if id(p) in held]
        self._masters = [torch.nn.Parameter(p.data, p.requires_grad) for p in self._parameters]
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        self.size_bytes = sum(master.nbytes for master in self._masters)
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Put the masters in their places, and follow gradients and steps."""
        self._exchange(self._parameters, self._masters)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            _masters[parameter] = master
            hook = functools.partial(_move_gradient, master)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._hooks += [
            self._optimizer.register_step_pre_hook(lambda *_: self._take_up()),
            self._optimizer.register_step_post_hook(lambda *_: self._round()),
            self._model.register_forward_pre_hook(_refuse_data_parallel),
        ]
        self._versions = [p._version for p in self._parameters]

    def end(self) -> None:
        """Give the parameters the masters' data and gradients, and their places back."""
        self._take_up()
        for hook in self._hooks:
            hook.remove()
        self._exchange(self._masters, self._parameters)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            del _masters[parameter]
            parameter.data, parameter.grad = master.data, master.grad

    def _exchange(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        instead = dict(zip(map(id, old), new, strict=True))
        for group in self._optimizer.param_groups:
            group["params"][:] = [instead.get(id(p), p) for p in group["params"]]
        state = self._optimizer.state
        for before, after in zip(old, new, strict=True):
            if before in state:
                state[after] = state.pop(before)

    def _take_up(self) -> None:
        """Let a master follow a parameter that has been changed in place since the last step."""
        with torch.no_grad():
            for parameter, master, version in zip(
                self._parameters, self._masters, self._versions, strict=True
            ):
                if parameter._version != version:
                    master.copy_(parameter)

    def _round(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)
        self._versions = [p._version for p in self._parameters]


def _move_gradient(master: Any, parameter: Any) -> None:
    gradient, parameter.grad = parameter.grad.detach(), None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)


def _refuse_data_parallel(*_: Any) -> None:
    if DistributedDataParallel._active_ddp_module is not None:
        raise CompositionError(_DATA_PARALLEL)
