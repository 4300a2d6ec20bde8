"""Packed weights of layers on Jittor (1.3.11): which, and back; see `weights_layers.py`.

A layer stays the same object under the same name. Its class becomes one that derives from its own
(`weights_layers.py`), its `weight` goes, and `packed` comes, a uint8 tensor without gradient, as
running statistics are one: it is among `parameters()` and in `state_dict()`, optimizers pass it
over, and `save` and `load` work between models that were packed alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jittor as jt
import numpy as np
from jittor import attention, nn

from xmem.codec import DTYPES
from xmem.errors import CapabilityError
from xmem.native import weights as kernels
from xmem.receipts import Receipt
from xmem.weights import LARGEST, PackedLayer, make_receipt
from xmem.weights_format import Packing, packing_for
from xmem_jittor.weights_layers import Packed, packed_class

_CONVOLUTIONS = (nn.Conv, nn.Conv1d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS, nn.Embedding)
_ATTRIBUTES = (
    "packing", "weight_shape", "weight_dtype", "weight_trained", "dynamic",
)  # fmt: skip
_Layer = tuple[str, Any]


def quantize_weights(
    model: Any, bits: int, scheme: str, *, min_elements: int, skip: Sequence[str] = ()
) -> Receipt:
    """See `xmem.quantizing.Quantize`."""
    if jt.flags.use_cuda:
        raise CapabilityError(
            "packed weights compute on a CPU on Jittor; call xmem.use('jittor', device='cpu')"
        )
    kernels.load()  # compiled before anything changes
    layers, left_out = _chosen(model, bits, scheme, min_elements, frozenset(skip))
    packed: list[PackedLayer] = []
    for tied in layers:
        weight = tied[0][1].weight
        packing = _packing(tied, bits, scheme)
        data, error = _packed(weight, packing)
        _forget(model, (weight, data))
        for number, (path, module) in enumerate(tied):
            dynamic = scheme == "dynamic" and type(module) is nn.Linear
            _put(module, data, packing, dynamic=dynamic)
            packed.append(
                PackedLayer(
                    path,
                    weight.numel(),
                    0 if number else weight.nbytes,
                    0 if number else packing.packed_bytes,
                    error,
                    scheme if dynamic else "weight_only",
                )
            )
        del weight
    return make_receipt("jittor", bits, scheme, packed, left_out, lambda: _undo(model))


def dequantize(model: Any) -> int:
    """See `xmem.quantizing.Quantize`."""
    put_back: dict[int, Any] = {}
    found = [m for m in model.modules() if isinstance(m, Packed)]
    for module in found:
        data = module.packed
        if id(data) not in put_back:
            weight = module.unpacked(module.weight_dtype).detach()
            weight = weight.start_grad() if module.weight_trained else weight.stop_grad()
            put_back[id(data)] = weight.sync(), data  # held, so that no other gets its id
        _rename(module, "packed", "weight", put_back[id(data)][0])
        for name in _ATTRIBUTES:
            del module.__dict__[name]
        module.__class__ = type(module).base
    _forget(model, [held for pair in put_back.values() for held in pair])
    return len(found)


def _undo(model: Any) -> None:
    dequantize(model)


def _packed(weight: Any, packing: Packing) -> tuple[Any, float]:
    values = weight.sync().data
    packed = np.empty((packing.rows, packing.row_bytes), np.uint8)
    lost, whole = kernels.pack(values.ctypes.data, str(weight.dtype), packing, packed.ctypes.data)
    return jt.array(packed).stop_grad().sync(), (lost / whole) ** 0.5 if whole else 0.0


def _put(module: Any, data: Any, packing: Packing, *, dynamic: bool) -> None:
    weight = module.weight
    _rename(module, "weight", "packed", data)
    for inner in module.__dict__.get("_conv", ()):  # Conv1d's, in the same memory
        inner.__dict__.pop("weight", None)
    kind: Any = type(module)
    module.__class__ = packed_class(kind)
    module.packing, module.dynamic = packing, dynamic
    module.weight_shape, module.weight_dtype = tuple(weight.shape), str(weight.dtype)
    module.weight_trained = not weight.is_stop_grad()


def _rename(module: Any, name: str, other: str, value: Any) -> None:
    """Put an attribute in the place of another one: `parameters()` go by their order."""
    held = dict(module.__dict__)
    module.__dict__.clear()
    for key, kept in held.items():
        module.__dict__.update({other: value} if key == name else {key: kept})


def _forget(model: Any, tensors: Sequence[Any]) -> None:
    """Take tensors out of what `eval()` has noted by their ids, which others may get.

    Else `train()` would let a packed weight require gradients.
    """
    for module in model.modules():
        noted = module.__dict__.get("backup_grad_state", {})
        for tensor in tensors:
            noted.pop(id(tensor), None)


def _packing(tied: Sequence[_Layer], bits: int, scheme: str) -> Packing:
    linear = any(type(module) is nn.Linear for _, module in tied)
    return packing_for(tuple(tied[0][1].weight.shape), bits, dynamic=linear and scheme == "dynamic")


def _chosen(
    model: Any, bits: int, scheme: str, min_elements: int, skip: frozenset[str]
) -> tuple[list[list[_Layer]], list[tuple[str, str]]]:
    """Return layers that are packed, those of one weight together, and what is left out and why."""
    inside_attention = {
        id(child)
        for module in model.modules()
        if isinstance(module, attention.MultiheadAttention)
        for child in module.children()
    }
    holders = _holders(model)
    reasons: dict[str, str] = {}
    tied: dict[int, list[_Layer]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, _LAYERS) or id(module) in seen:
            continue
        seen.add(id(module))
        reason = "in skip" if path in skip else _obstacle(module)
        if reason is None and id(module) in inside_attention:
            reason = "MultiheadAttention reads its weight itself"
        reason = reason or _too_small(module, bits, scheme, min_elements)
        if reason is not None:
            reasons[path] = reason
        else:
            tied.setdefault(module.weight.var_ptr, []).append((path, module))
    for key, layers in list(tied.items()):
        others = sorted(
            holders[key] - {path + ".weight" if path else "weight" for path, _ in layers}
        )
        if others:
            reasons |= {path: f"its weight is also {others[0]}" for path, _ in layers}
            del tied[key]
    return list(tied.values()), list(reasons.items())


def _holders(model: Any) -> Mapping[int, set[str]]:
    """Return the names that each tensor has in the model, by its address; a module counts once."""
    found: dict[int, set[str]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, value in module.__dict__.items():
            if isinstance(value, jt.Var):
                name = f"{path}.{name}" if path else name
                found.setdefault(value.var_ptr, set()).add(name)
    return found


def _obstacle(module: Any) -> str | None:
    if isinstance(module, Packed):
        return "packed already"
    weight = module.__dict__.get("weight")
    if not isinstance(weight, jt.Var):
        return "its weight is computed"
    if str(weight.dtype) not in DTYPES[:2]:
        return f"its weight is {weight.dtype}"
    return None


def _too_small(module: Any, bits: int, scheme: str, min_elements: int) -> str | None:
    weight = module.weight
    if weight.numel() < max(1, min_elements):
        return f"fewer than {min_elements} weights"
    if _packing([("", module)], bits, scheme).packed_bytes >= weight.nbytes:
        return "it would take no less packed"
    values = weight.sync().data
    if not (float(values.min()) > -LARGEST and float(values.max()) < LARGEST):
        return "it has values that are infinite, NaN or beyond 1e37"
    return None
