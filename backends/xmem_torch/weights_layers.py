"""Layers that compute with packed weights (PyTorch 2.13): `torch.autograd.Function`s on a CPU.

A linear layer unpacks some rows of its weight at a time, 4 MiB, and multiplies with them; few rows
of inputs are multiplied by a kernel that unpacks row by row. A convolution unpacks its weight, an
embedding the rows that are looked up. Nothing unpacked is kept: backward unpacks again for the
gradient of the inputs. Second derivatives are refused.

Whoever reads `weight` gets a tensor that has just been unpacked; what is written into it is lost.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from xmem.casting import current
from xmem.errors import CapabilityError
from xmem.native import weights as kernels
from xmem.weights_format import Packing, packing_for
from xmem_torch.left import note

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FEW = 4
"""Rows of inputs up to which the kernel that unpacks row by row is faster (0.10 against 0.16 ms for
one row and 1024 x 1024; even at five)."""
_AT_A_TIME_BYTES = 4 << 20


def packed_from(weight: Any, packing: Packing) -> tuple[Any, float]:
    """Return a weight's packed bytes (rows, row_bytes), and the relative error."""
    values = weight.detach().contiguous()
    packed = torch.empty((packing.rows, packing.row_bytes), dtype=torch.uint8)
    lost, whole = kernels.pack(values.data_ptr(), DTYPES[values.dtype], packing, packed.data_ptr())
    return packed, (lost / whole) ** 0.5 if whole else 0.0


def unpacked(rows: Any, packing: Packing, dtype: Any) -> Any:
    """Return packed rows (n, row_bytes) as values (n, columns)."""
    if rows.device.type != "cpu":
        raise CapabilityError(
            f"packed weights compute on a CPU, and these are on {rows.device}. Call"
            " xmem.dequantize(model) before you move it"
        )
    values = torch.empty((rows.shape[0], packing.columns), dtype=_native(dtype))
    _unpack_into(values, rows, packing)
    return values.to(dtype)


def _native(dtype: Any) -> Any:
    return dtype if dtype in DTYPES else torch.float32


def _unpack_into(values: Any, rows: Any, packing: Packing) -> None:
    kernels.unpack(rows.data_ptr(), rows.shape[0], packing, DTYPES[values.dtype], values.data_ptr())


def _parts(packed: Any, packing: Packing, dtype: Any) -> Iterator[tuple[slice, Any]]:
    """Yield rows of the weight, some at a time, in the same memory each time."""
    if dtype not in DTYPES or packed.device.type != "cpu":
        yield slice(0, packing.rows), unpacked(packed, packing, dtype)
        return
    count = max(1, _AT_A_TIME_BYTES // (packing.columns * dtype.itemsize))
    scratch = torch.empty((min(count, packing.rows), packing.columns), dtype=dtype)
    for first in range(0, packing.rows, count):
        rows = packed[first : first + count]
        _unpack_into(scratch, rows, packing)
        yield slice(first, first + rows.shape[0]), scratch[: rows.shape[0]]


class _Linear(torch.autograd.Function):
    """(batch, columns) -> (batch, rows)."""

    @staticmethod
    def forward(ctx: Any, x: Any, packed: Any, packing: Packing, dynamic: bool) -> Any:
        ctx.save_for_backward(packed)
        ctx.packing = packing
        few = x.shape[0] <= _FEW and x.dtype == torch.float32
        if dynamic or few:
            return _product(x, packed, packing, dynamic=dynamic)
        y = x.new_empty((x.shape[0], packing.rows))
        for at, weight in _parts(packed, packing, x.dtype):
            # Past the modes that count operations: this is one.
            torch.ops.aten.mm.out(x, weight.t(), out=y[:, at])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        [packed] = ctx.saved_tensors
        dx = dy.new_zeros((dy.shape[0], ctx.packing.columns))
        for at, weight in _parts(packed, ctx.packing, dy.dtype):
            dx.addmm_(dy[:, at], weight)
        return dx, None, None, None


def _product(x: Any, packed: Any, packing: Packing, *, dynamic: bool) -> Any:
    values = x.float().contiguous()
    y = torch.empty((x.shape[0], packing.rows))
    size = kernels.product_scratch_bytes(packing, x.shape[0], dynamic=dynamic)
    scratch = torch.empty(size, dtype=torch.uint8)
    kernels.product(
        values.data_ptr(), x.shape[0], packed.data_ptr(), packing, scratch.data_ptr(), y.data_ptr(),
        dynamic=dynamic,
    )  # fmt: skip
    return y.to(x.dtype)


class _Convolution(torch.autograd.Function):
    """Without bias; padding is numbers."""

    @staticmethod
    def forward(ctx: Any, x: Any, packed: Any, module: Any, padding: Any) -> Any:
        ctx.save_for_backward(packed)
        ctx.module, ctx.padding, ctx.shape = module, padding, x.shape
        weight = module.unpacked(x.dtype)
        return torch.ops.aten.convolution(
            x, weight, None, module.stride, padding, module.dilation, False,
            [0] * len(padding), module.groups,
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        module = ctx.module
        [packed] = ctx.saved_tensors
        weight = unpacked(packed, module.packing, dy.dtype).view(module.weight_shape)
        dx, _, _ = torch.ops.aten.convolution_backward(
            dy, dy.new_empty(1).expand(ctx.shape), weight, None, module.stride, ctx.padding,
            module.dilation, False, [0] * len(ctx.padding), module.groups, (True, False, False),
        )  # fmt: skip
        return dx, None, None, None


class Packed:
    """What a layer with a packed weight has beside its own class; see `packed_class`."""

    base: Any
    packing: Packing
    packed: Any
    like: Any
    bias: Any
    dynamic: bool
    weight_shape: tuple[int, ...]
    weight_requires_grad: bool

    def unpacked(self, dtype: Any) -> Any:
        """Return the weight in a type."""
        return unpacked(self.packed, self.packing, dtype).view(self.weight_shape)

    @property
    def weight(self) -> Any:
        """The weight, just unpacked; what is written into it is lost."""
        return self.unpacked(self.like.dtype)

    def forward(self, x: Any) -> Any:
        """Compute with the packed weight."""
        return _RUN[self.kind](self, x)

    @property
    def kind(self) -> str:
        """What kind of layer it is: "linear", "conv" or "embedding"."""
        if isinstance(self, nn.Linear):
            return "linear"
        return "embedding" if isinstance(self, nn.Embedding) else "conv"

    def extra_repr(self) -> str:
        """Add the number of bits."""
        return f"{super().extra_repr()}, bits={self.packing.bits}"  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (self.base,), self.__dict__

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        """Also take a float weight, and pack it."""
        weight = state.get(prefix + "weight")
        if weight is not None and tuple(weight.shape) == self.weight_shape:
            packing = packing_for(self.weight_shape, self.packing.bits, dynamic=self.dynamic)
            del state[prefix + "weight"]
            state[prefix + "packed"] = packed_from(weight, packing)[0]
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[misc]


@functools.cache
def packed_class(base: Any) -> Any:
    """Return the class of a layer of some class whose weight is packed."""
    return type(base.__name__, (Packed, base), {"base": base, "__module__": base.__module__})


def _again(base: Any) -> Any:
    """Make the object that is copied or unpickled into: its class has no name to be found by."""
    made = packed_class(base)
    return made.__new__(made)


def _computed_in(kind: str, x: Any) -> Any:
    """Return x in the type that autocast, if it is on, computes this in."""
    device = x.device.type
    casting = current()
    if casting is not None and kind in casting.operations:
        return x.float()
    if torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def _told(kind: str, x: Any, y: Any) -> Any:
    casting = current()
    if casting is not None and casting.log is not None:
        note(casting, kind, kind, (x,), y)
    return y


def _linear(module: Any, x: Any) -> Any:
    values = _computed_in("linear", x)
    flat = values.reshape(-1, module.packing.columns).contiguous()
    y = _Linear.apply(flat, module.packed, module.packing, module.dynamic)
    if module.bias is not None:
        y += module.bias.to(y.dtype)
    return _told("linear", x, y.view(*x.shape[:-1], module.packing.rows))


def _conv(module: Any, x: Any) -> Any:
    space = len(module.kernel_size)
    values = _computed_in("conv", x)
    if x.dim() == space + 1:
        values = values.unsqueeze(0)
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        values = functional.pad(values, module._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * space
    y = _Convolution.apply(values, module.packed, module, padding)
    if module.bias is not None:
        y += module.bias.to(y.dtype).view(-1, *itertools.repeat(1, space))
    return _told("conv", x, y if x.dim() == space + 2 else y.squeeze(0))


def _embedding(module: Any, ids: Any) -> Any:
    rows = module.packed.index_select(0, ids.reshape(-1))
    found = unpacked(rows, module.packing, module.like.dtype)
    return _told("embedding", ids, found.view(*ids.shape, module.packing.columns))


_RUN = {"linear": _linear, "conv": _conv, "embedding": _embedding}
