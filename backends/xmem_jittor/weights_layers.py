"""Layers that compute with packed weights on Jittor (1.3.11), on a CPU.

A linear layer is a `jt.Function`: an operation unpacks its weight for the product, and another one
for the gradient of the inputs; few rows of inputs are multiplied by a kernel that unpacks row by
row. Convolutions, layers with an `execute` of their own, and all under autocast run what their
class runs, on a twin that has the unpacked weight; where gradients are recorded that is a
checkpointed region, so that nothing unpacked is kept. Kernels are called by their addresses, which
`data` carries (`ordering.py`).

Whoever reads `weight` gets a tensor that has just been unpacked; what is assigned to it is lost.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jittor as jt
from jittor import nn

from xmem.casting import current
from xmem.codec import DTYPES
from xmem.native import weights as kernels
from xmem.records import Recompute
from xmem.weights_format import Packing
from xmem_jittor.checkpoint import Checkpoint
from xmem_jittor.native import address_of

_FEW = 4
"""Rows of inputs up to which the kernel that unpacks row by row is faster."""
_AGAIN = Recompute("", preserve_rng=False, check_values=False)
_UNPACK = """
    ((void (*)(const void*, int64_t, int64_t, int, int, int, void*))(size_t)data["run"])(
        in0_p, in0_shape0, (int64_t)data["columns"], (int)data["bits"], (int)data["block"],
        (int)data["dtype"], out0_p);
"""
_PRODUCT = """
    ((void (*)(const void*, int64_t, const void*, int64_t, int64_t, int, int, void*, void*))
        (size_t)data["run"])(
        in0_p, in0_shape0, in1_p, in1_shape0, in0_shape1, (int)data["bits"], (int)data["block"],
        out1_p, out0_p);
"""


def unpacked(rows: Any, packing: Packing, dtype: str = "float32") -> Any:
    """Return packed rows (n, row_bytes) as values (n, columns), unpacked when they are used."""
    data = {
        "run": address_of(kernels.load().xmem_weights_unpack),
        "columns": packing.columns,
        "bits": packing.bits,
        "block": packing.block,
        "dtype": DTYPES.index(dtype),
    }
    values = jt.code((rows.shape[0], packing.columns), dtype, [rows], data=data, cpu_src=_UNPACK)
    return values.stop_grad().stop_fuse()


class _Linear(jt.Function):
    """(batch, columns) -> (batch, rows), in float32."""

    def __init__(self, packed: Any, packing: Packing, *, dynamic: bool) -> None:
        self._packed, self._packing, self._dynamic = packed, packing, dynamic

    def execute(self, x: Any) -> Any:
        """Multiply."""
        if not self._dynamic and x.shape[0] > _FEW:
            return nn.matmul_transpose(x, unpacked(self._packed, self._packing))
        library, packing = kernels.load(), self._packing
        name = "xmem_weights_dynamic" if self._dynamic else "xmem_weights_linear"
        size = kernels.product_scratch_bytes(packing, x.shape[0], dynamic=self._dynamic)
        y, _ = jt.code(
            [(x.shape[0], packing.rows), (size,)],
            ["float32", "uint8"],
            [x, self._packed],
            data={
                "run": address_of(getattr(library, name)),
                "bits": packing.bits,
                "block": packing.block,
            },
            cpu_src=_PRODUCT,
        )
        return y.stop_fuse()

    def grad(self, dy: Any) -> Any:
        """Return the gradient of x."""
        return nn.matmul(dy, unpacked(self._packed, self._packing))


class Packed:
    """What a layer with a packed weight has beside its own class; see `packed_class`."""

    base: Any
    packing: Packing
    packed: Any
    bias: Any
    dynamic: bool
    weight_shape: tuple[int, ...]
    weight_dtype: str
    weight_trained: bool

    @property
    def weight(self) -> Any:
        """The weight, just unpacked; what is assigned to it is lost."""
        # `load_parameters` would write into it, and say nothing. So it says that it cannot load.
        # Jittor asks a second time, from its `__getattr__`.
        reader = sys._getframe(1)
        if reader.f_code is jt.Module.__getattr__.__code__ and reader.f_back is not None:
            reader = reader.f_back
        if reader.f_code is jt.Module.load_parameters.__code__:
            raise AttributeError("weight is packed")
        return self.unpacked(self.weight_dtype)

    def unpacked(self, dtype: str) -> Any:
        """Return the weight in a type."""
        return unpacked(self.packed, self.packing, dtype).reshape(self.weight_shape)

    def execute(self, x: Any) -> Any:
        """Compute with the packed weight."""
        own = self.base.__dict__.get("execute")
        if isinstance(self, nn.Embedding) and _plain():
            found = unpacked(self.packed[x.reshape((-1,))], self.packing, self.weight_dtype)
            return found.reshape((*x.shape, self.packing.columns))
        if self.base is nn.Linear and own is not None and _plain():
            return _linear(self, x)
        if jt.flags.no_grad or x.is_stop_grad():
            return self.run(x)
        return Checkpoint().checkpoint(self.run, (x,), {}, _AGAIN)

    def run(self, x: Any) -> Any:
        """Run what the layer's class runs, with the weight unpacked."""
        state = dict(self.__dict__)
        state.pop("execute", None)
        state["weight"] = self.unpacked("float32")
        if "_conv" in state:  # Conv1d keeps its weight in another layer
            state["_conv"] = [_twin(type(c), dict(c.__dict__)) for c in state["_conv"]]
        return self.base.execute(_twin(self.base, state), x)

    def extra_repr(self) -> str:
        """Add the number of bits."""
        return f"{super().extra_repr()}, bits={self.packing.bits}"  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (self.base,), self.__dict__


@functools.cache
def packed_class(base: Any) -> Any:
    """Return the class of a layer of some class whose weight is packed."""
    return type(base.__name__, (Packed, base), {"base": base, "__module__": base.__module__})


def _again(base: Any) -> Any:
    """Make the object that is copied or unpickled into: its class has no name to be found by."""
    made = packed_class(base)
    return made.__new__(made)


def _twin(kind: Any, attributes: dict[str, Any]) -> Any:
    twin = object.__new__(kind)
    twin.__dict__.update(attributes)
    return twin


def _plain() -> bool:
    """Say whether no autocast is in force, which counts operations and casts."""
    return current() is None


def _linear(module: Any, x: Any) -> Any:
    flat = x.float32().reshape((-1, module.packing.columns))
    product = _Linear(module.packed, module.packing, dynamic=module.dynamic)
    y = product.execute(flat) if jt.flags.no_grad or x.is_stop_grad() else product(flat)
    if module.bias is not None:
        y = y + module.bias
    return y.reshape((*x.shape[:-1], module.packing.rows)).cast(x.dtype)
