"""Tensors between the whole, on rank 0, and what each rank keeps of it (PyTorch 2.13).

Three things may be kept: all of it; a part that a DTensor describes (`fully_shard`); or a part of a
layer that was cut along an axis (`xmem_torch.sharded_layers`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from xmem.distributed.counting import note
from xmem.distributed.world import current
from xmem.errors import CompositionError
from xmem_torch import ranks
from xmem_torch.local_parts import is_spread
from xmem_torch.sharded_layers import ShardedLinear, parts_in


@dataclass(frozen=True)
class Told:
    """A value of a state: a tensor that is sent by itself, or anything small.

    Attributes:
        shape: of such a tensor, or None.
        dtype: its type.
        value: anything else.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    value: Any = None

    @property
    def is_sent(self) -> bool:
        """Whether it is sent by itself."""
        return self.shape is not None


class Cuts:
    """Along which axis parameters of a model are cut, by name and by parameter.

    Raises:
        CompositionError: the model is a stage of a pipeline.
    """

    def __init__(self, module: Any) -> None:
        self._names: dict[str, int] = {}
        self._parameters: dict[int, int] = {}
        for path, layer in module.named_modules(remove_duplicate=False):
            if isinstance(layer, ShardedLinear):
                for name, axis in layer.cuts.items():
                    self._names[f"{path}.{name}" if path else name] = axis
                    self._parameters[id(getattr(layer, name))] = axis
        if parts_in(module.parameters()) - self._parameters.keys():
            raise CompositionError(
                f"{type(module).__name__} is a stage of a pipeline, and other ranks have other"
                " ones: save and load each by itself, state_dict() and load_state_dict() of the"
                " stage"
            )

    def of_name(self, name: str) -> int | None:
        """Return the axis of what a model's state has under a name."""
        return self._names.get(name)

    def of_state(self, parameter: Any, value: Any) -> int | None:
        """Return the axis of what an optimizer keeps for a parameter."""
        axis = self._parameters.get(id(parameter))
        is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        return axis if is_like else None

    def of_parameter(self, parameter: Any) -> int | None:
        """Return the axis of a parameter."""
        return self._parameters.get(id(parameter))

    def whole_shape(self, parameter: Any) -> tuple[int, ...]:
        """Return the sizes of a whole parameter."""
        return whole_shape(parameter, self._parameters.get(id(parameter)))

    def check(self, parameter: Any, name: str, value: Any) -> None:
        """Refuse a state of a part that is no part of the whole's.

        Raises:
            CompositionError: says which.
        """
        cut = id(parameter) in self._parameters or is_spread(parameter)
        shape = tuple(getattr(value, "shape", ()))  # of a tensor, or what stands for one
        if not cut or math.prod(shape) <= 1:
            return
        if shape != tuple(parameter.shape):
            raise CompositionError(
                f"the optimizer keeps {name!r} of shape {shape} for this rank's part"
                f" of a parameter, of shape {tuple(parameter.shape)}: parts of such states (in few"
                " bits, or factored) do not make the whole's. Save the model alone, or use an"
                " optimizer of torch.optim with plain states"
            )


def described(entry: dict[str, Any]) -> dict[str, Told]:
    """Say of each value of a parameter's states how it is sent."""
    return {
        name: Told(tuple(value.shape), value.dtype)
        if isinstance(value, torch.Tensor) and value.dim()
        else Told(value=value)
        for name, value in entry.items()
    }


def gathered(value: Any, axis: int | None) -> Any:
    """Return the whole on rank 0; None elsewhere, and of what is no tensor itself."""
    if not isinstance(value, torch.Tensor):
        return value
    rank, size = current().rank, current().size
    if is_spread(value):
        note("all_gather", value.nbytes, size)
        whole = value.full_tensor()
        return whole if rank == 0 else None
    if axis is None or size == 1:
        return value
    own = value.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
    note("reduce", own.nbytes * size, size)
    dist.gather(own, parts, dst=0)
    return torch.cat(parts, axis) if parts else None


def whole_shape(tensor: Any, axis: int | None) -> tuple[int, ...]:
    """Return the sizes of the whole of a tensor that may be cut along an axis."""
    sizes = list(tensor.shape)
    if axis is not None:
        sizes[axis] *= current().size
    return tuple(sizes)


def load(value: Any, target: torch.Tensor, axis: int | None) -> None:
    """Write rank 0's whole into what each rank keeps of it."""
    if axis is None and not is_spread(target) and target.is_contiguous():
        if current().rank == 0:
            target.copy_(value)
        _broadcast(target)
        return
    whole = _spread_out(value, whole_shape(target, axis), target.dtype)
    place: Any = target.to_local() if is_spread(target) else target
    place.copy_(_part(whole, target, axis))


def dealt(value: Any, kind: Told, parameter: Any, cuts: Cuts) -> Any:
    """Return what a rank keeps of a parameter's state, in memory of its own."""
    if kind.shape is None:
        return copy.deepcopy(kind.value)
    whole = _spread_out(value, kind.shape, kind.dtype)
    if kind.shape != cuts.whole_shape(parameter):
        return whole.clone() if value is not None else whole
    part = _part(whole, parameter, cuts.of_parameter(parameter))
    if not is_spread(parameter):
        return part.clone() if part is not whole or value is not None else part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.clone(),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def told(value: Any) -> Any:
    """Return rank 0's value, anything small, on every rank."""
    box = [value]
    if current().size > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def send(value: Any, to: int) -> None:
    """Send a tensor that `described` says is sent."""
    if isinstance(value, torch.Tensor) and value.dim():
        note("send", value.nbytes, current().size)
        dist.send(value.detach().to(ranks.device()).contiguous(), to)


def receive(kind: Told, source: int) -> Any:
    """Return what was sent, or what was said of it already."""
    if kind.shape is None:
        return kind.value
    tensor = torch.empty(kind.shape, dtype=kind.dtype, device=ranks.device())
    dist.recv(tensor, source)
    return tensor


def _spread_out(value: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    """Return rank 0's tensor on every rank."""
    if value is None:
        whole = torch.empty(shape, dtype=dtype, device=ranks.device())
    else:
        whole = value.detach().to(device=ranks.device(), dtype=dtype).contiguous()
    _broadcast(whole)
    return whole


def _broadcast(tensor: torch.Tensor) -> None:
    if current().size > 1:
        note("broadcast", tensor.nbytes, current().size)
        dist.broadcast(tensor, 0)


def _part(whole: torch.Tensor, like: Any, axis: int | None) -> torch.Tensor:
    """Return this rank's part of a whole, as another tensor is one; perhaps a view."""
    if is_spread(like):
        from torch.distributed.tensor import distribute_tensor

        spread = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return spread.to_local()
    if axis is None:
        return whole
    return whole.chunk(current().size, axis)[current().rank]
