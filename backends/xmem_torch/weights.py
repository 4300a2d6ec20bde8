"""Packed weights of layers on PyTorch (2.13): which, and back; see `weights_layers.py`.

A layer stays the same object under the same name, with its hooks. Its class becomes one that
derives from its own (`weights_layers.py`), its parameter `weight` goes, and a buffer `packed`
comes: `state_dict` has "packed" in place of "weight", and another model that was packed alike
loads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from xmem.native import weights as kernels
from xmem.receipts import Receipt
from xmem.weights import LARGEST, PackedLayer, make_receipt
from xmem.weights_format import Packing, packing_for
from xmem_torch.weights_layers import CONVOLUTIONS, DTYPES, Packed, packed_class, packed_from

_LAYERS = (nn.Linear, *CONVOLUTIONS, nn.Embedding)
_Layer = tuple[str, Any]


def quantize_weights(
    model: Any, bits: int, scheme: str, *, min_elements: int, skip: Sequence[str] = ()
) -> Receipt:
    """See `xmem.quantizing.Quantize`."""
    kernels.load()  # compiled before anything changes
    layers, left_out = _chosen(model, bits, scheme, min_elements, frozenset(skip))
    packed: list[PackedLayer] = []
    for tied in layers:
        weight = tied[0][1].weight
        packing = _packing(tied, bits, scheme)
        data, error = packed_from(weight, packing)
        for number, (path, module) in enumerate(tied):
            dynamic = scheme == "dynamic" and isinstance(module, nn.Linear)
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
    return make_receipt("torch", bits, scheme, packed, left_out, lambda: _undo(model))


def dequantize(model: Any) -> int:
    """See `xmem.quantizing.Quantize`."""
    put_back: dict[int, Any] = {}
    found: list[Any] = [m for m in model.modules() if isinstance(m, Packed)]
    for module in found:
        data = module.packed
        if id(data) not in put_back:
            weight = nn.Parameter(module.weight, requires_grad=module.weight_requires_grad)
            put_back[id(data)] = weight, data  # held, so that no other gets its id
        for name in ("packed", "like"):
            del module._buffers[name]
        module._non_persistent_buffers_set.discard("like")
        for name in ("packing", "weight_shape", "weight_requires_grad", "dynamic"):
            del module.__dict__[name]
        module.__class__ = module.base
        others = dict(module._parameters)  # the weight is the first again, as optimizers count
        module._parameters.clear()
        module._parameters.update({"weight": put_back[id(data)][0], **others})
    return len(found)


def _undo(model: Any) -> None:
    dequantize(model)


def _put(module: Any, data: Any, packing: Packing, *, dynamic: bool) -> None:
    weight = module._parameters.pop("weight")
    kind: Any = type(module)
    module.__class__ = packed_class(kind)
    module.packing, module.dynamic = packing, dynamic
    module.weight_shape = tuple(weight.shape)
    module.weight_requires_grad = weight.requires_grad
    module.register_buffer("packed", data)
    # Goes through .to() and .half(), and so tells which type the model is in.
    module.register_buffer("like", torch.empty(0, dtype=weight.dtype), persistent=False)


def _packing(tied: Sequence[_Layer], bits: int, scheme: str) -> Packing:
    linear = any(isinstance(module, nn.Linear) for _, module in tied)
    return packing_for(tuple(tied[0][1].weight.shape), bits, dynamic=linear and scheme == "dynamic")


def _chosen(
    model: Any, bits: int, scheme: str, min_elements: int, skip: frozenset[str]
) -> tuple[list[list[_Layer]], list[tuple[str, str]]]:
    """Return layers that are packed, those of one weight together, and what is left out and why."""
    inside_attention = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
    }
    holders = _holders(model)
    reasons: dict[str, str] = {}
    tied: dict[int, list[_Layer]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, _LAYERS):
            continue
        reason = "in skip" if path in skip else _obstacle(module)
        if reason is None and id(module) in inside_attention:
            reason = "MultiheadAttention reads its weight itself"
        reason = reason or _too_small(module, bits, scheme, min_elements)
        if reason is not None:
            reasons[path] = reason
        else:
            tied.setdefault(id(module.weight), []).append((path, module))
    for key, layers in list(tied.items()):
        others = sorted(
            holders[key] - {path + ".weight" if path else "weight" for path, _ in layers}
        )
        if others:
            reasons |= {path: f"its weight is also {others[0]}" for path, _ in layers}
            del tied[key]
    return list(tied.values()), list(reasons.items())


def _holders(model: Any) -> Mapping[int, set[str]]:
    """Return the names that each parameter has in the model, by its id."""
    found: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    # A module that is in several places is packed once, and reads it in all of them.
    for names in found.values():
        names &= set(_first_names(model))
    return found


def _first_names(model: Any) -> Iterator[str]:
    for path, module in model.named_modules():
        for name in module._parameters:
            yield f"{path}.{name}" if path else name


def _obstacle(module: Any) -> str | None:
    if isinstance(module, Packed):
        return "packed already"
    base = next(layer for layer in _LAYERS if isinstance(module, layer))
    own = type(module)
    if own.forward is not base.forward or "forward" in module.__dict__:
        return "its forward is not its layer's own"
    if base in CONVOLUTIONS and own._conv_forward is not base._conv_forward:
        return "its forward is not its layer's own"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (a parametrization)"
    if isinstance(weight, nn.parameter.UninitializedTensorMixin):
        return "its weight has no shape yet"
    if type(weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(weight).__name__}"
    if base is nn.Embedding and module.max_norm is not None:
        return "max_norm changes its weight in forward"
    if weight.dtype not in DTYPES or weight.device.type != "cpu":
        return f"its weight is {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
    return None


def _too_small(module: Any, bits: int, scheme: str, min_elements: int) -> str | None:
    weight = module.weight
    if weight.numel() < max(1, min_elements):
        return f"fewer than {min_elements} weights"
    if _packing([("", module)], bits, scheme).packed_bytes >= weight.nbytes:
        return "it would take no less packed"
    least, most = (float(v) for v in torch.aminmax(weight.detach()))
    if not (least > -LARGEST and most < LARGEST):
        return "it has values that are infinite, NaN or beyond 1e37"
    return None
