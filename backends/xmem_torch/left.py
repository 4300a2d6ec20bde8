"""What operations leave for backward inside an autocast block, worked out from their formulas.

PyTorch's hooks on saved tensors would know exactly. They also switch off recomputation in a region,
drop the check of versions and break compiled graphs; so this goes by what PyTorch (2.13) saves: a
product its factors, gelu its input, softmax its result. What has no name in `xmem.operations`
(additions, dropout) is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from xmem.casting import Casting, OperationLog, current
from xmem.containers import leaves
from xmem_torch.tensors import is_tensor

HALF_TYPES = (torch.bfloat16, torch.float16)
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

_FLOAT32_INSIDE = ("batch_norm", "instance_norm")
"""Their kernels take half inputs and compute in float32."""

_PRODUCTS = ("linear", "matmul")
_SAVES_RESULT = ("softmax", "relu", "sigmoid", "tanh")
_NORMS = ("layer_norm", "batch_norm", "group_norm", "instance_norm")
_SAVES_INPUT = ("gelu", "silu", "leaky_relu", "elu", "pool", *_NORMS)


def note(
    casting: Casting,
    operation: str,
    name: str,
    inputs: Sequence[torch.Tensor],
    result: Any,
) -> None:
    """Tell a casting of one call, and what it leaves for backward if gradients are recorded.

    Args:
        casting: the one in force.
        operation: the name in `xmem.operations`.
        name: the function's own name.
        inputs: the tensors among its inputs.
        result: what it returned.
    """
    output = result if is_tensor(result) else leaves(result, torch.Tensor)[0]
    dtype = output.dtype
    computed = _NAMES.get(dtype) or str(dtype).removeprefix("torch.")
    log = casting.log
    kept = None if log is None or not output.requires_grad else _kept_in(log)
    if log is None or kept is None or kept.regions:
        casting.note(operation, "float32" if operation in _FLOAT32_INSIDE else computed)
        return
    kept.half_bytes = kept.weight_bytes = kept.float32_bytes = 0
    half = dtype in HALF_TYPES
    for tensor in _saved(operation, name, inputs, output):
        kept.add(tensor, half=half)
    if name == "multi_head_attention_forward" and half:
        # Queries, keys, values and what the last projection takes.
        inside_bytes = 4 * 2 * inputs[0].numel()
        kept.half_bytes += inside_bytes
        kept.float32_bytes += 2 * inside_bytes
    log.note(
        operation,
        "float32" if operation in _FLOAT32_INSIDE else computed,
        half_bytes=kept.half_bytes,
        weight_bytes=kept.weight_bytes,
        float32_bytes=kept.float32_bytes,
    )


@contextmanager
def region(inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Count nothing of what runs in the block but its inputs: a region leaves no more."""
    casting = current()
    log = None if casting is None else casting.log
    if log is None:
        yield
        return
    kept = _kept_in(log)
    if not kept.regions:
        kept.half_bytes = kept.weight_bytes = kept.float32_bytes = 0
        for tensor in inputs:
            kept.add(tensor, half=tensor.dtype in HALF_TYPES)
        around: OperationLog | None = log
        while around is not None:
            around.half_bytes += kept.half_bytes
            around.float32_bytes += kept.float32_bytes
            around = around.parent
    kept.regions += 1
    try:
        yield
    finally:
        kept.regions -= 1


def _saved(
    operation: str, name: str, inputs: Sequence[torch.Tensor], output: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Return the tensors that a call saves, as they were before they were cast."""
    if operation in _PRODUCTS:
        factors = inputs[:2] if operation == "linear" else inputs
        if "add" in name:
            factors = inputs[1:3]
        # A factor is needed for the gradients of the others.
        wanting = sum([t.requires_grad for t in factors])
        return [t for t in factors if wanting > t.requires_grad]
    if operation in _SAVES_RESULT:
        return (output,)
    if operation in _SAVES_INPUT:
        return inputs[:1]
    if operation in ("conv", "conv_transpose"):
        return inputs[:2]
    if name == "multi_head_attention_forward":
        # One projection where queries, keys and values come from the same tensor.
        weights = [t for t in inputs[3:] if t.ndim == 2 and t.requires_grad]
        return [*{id(t): t for t in inputs[:3]}.values(), *weights]
    if operation == "attention":
        return [*inputs[:3], output]
    if operation == "loss" and name != "cross_entropy":
        return inputs[:2]
    return ()


class _Kept:
    """What the calls of a block have left, tensor by tensor, and the bytes of the last call.

    Attributes:
        half_bytes: what it left because of autocast: half tensors, and copies in any type.
        weight_bytes: of these, the copies of weights.
        float32_bytes: what would be in the place of these without autocast.
        regions: how many regions are running, one inside the other.
    """

    def __init__(self) -> None:
        self.regions = 0
        self.half_bytes = self.weight_bytes = self.float32_bytes = 0
        # Tensors by id, and whether they are left themselves; else only copies of them are.
        self._known: dict[int, tuple[Any, bool]] = {}

    def add(self, tensor: torch.Tensor, *, half: bool) -> None:
        """Count a tensor that is saved by an operation which computes in half, or in float32."""
        dtype = tensor.dtype
        is_half = dtype in HALF_TYPES
        if not is_half and dtype != torch.float32:
            return
        leaf = tensor.is_leaf
        if is_half != half:
            copy_bytes = tensor.nbytes // 2 if half else tensor.nbytes * 2
            self.half_bytes += copy_bytes
            if leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
                self.weight_bytes += copy_bytes
        if leaf:  # parameters and the batch live anyway
            return
        whole: Any = tensor if tensor._base is None else tensor._base
        reference, itself = self._known.get(id(whole), _UNKNOWN)
        known = reference is not None and reference() is whole
        if not known:
            reference, itself = weakref.ref(whole), is_half == half
            if is_half:
                self.float32_bytes += 2 * whole.nbytes
                self.half_bytes += whole.nbytes if itself else 0
            elif half:
                self.float32_bytes += whole.nbytes
        elif is_half == half and not itself:
            itself = True
            self.half_bytes += whole.nbytes
        else:
            return
        self._known[id(whole)] = reference, itself


_UNKNOWN = (None, False)

# A block inside another one counts on from what that one has.
_of_logs: weakref.WeakKeyDictionary[OperationLog, _Kept] = weakref.WeakKeyDictionary()


def _kept_in(log: OperationLog) -> _Kept:
    while log.parent is not None:
        log = log.parent
    kept = _of_logs.get(log)
    if kept is None:
        kept = _of_logs[log] = _Kept()
    return kept
