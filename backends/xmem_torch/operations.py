"""What runs inside an autocast block, as functions of PyTorch (2.13), by the names that xmem uses.

A `TorchFunctionMode` sees every call of a function or method in a thread. It computes some in
float32 and tells the casting in force what ran. What such a function calls inside itself it does
not see: multi-head attention is one operation, "attention".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xmem.casting import Casting, current
from xmem.containers import leaves, rebuilt
from xmem_torch.left import HALF_TYPES, note

_DIMENSIONS = ("1d", "2d", "3d")
_POOLS = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "linear": ("linear",),
    "matmul": (
        "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "mv",
        "tensordot", "addmm_", "baddbmm_",
    ),
    "conv": tuple(f"conv{d}" for d in _DIMENSIONS),
    "conv_transpose": tuple(f"conv_transpose{d}" for d in _DIMENSIONS),
    "attention": ("scaled_dot_product_attention", "multi_head_attention_forward"),
    "embedding": ("embedding", "embedding_bag"),
    "gelu": ("gelu",),
    "relu": ("relu", "relu_"),
    "silu": ("silu", "silu_"),
    "leaky_relu": ("leaky_relu", "leaky_relu_"),
    "elu": ("elu", "elu_"),
    "sigmoid": ("sigmoid", "sigmoid_"),
    "tanh": ("tanh", "tanh_"),
    "pool": tuple(
        f"{pool}{d}{rest}" for pool in _POOLS for d in _DIMENSIONS for rest in ("", "_with_indices")
    ),
    "softmax": ("softmax", "log_softmax", "softmin", "special_softmax", "special_log_softmax"),
    "layer_norm": ("layer_norm", "rms_norm"),
    "batch_norm": ("batch_norm",),
    "group_norm": ("group_norm",),
    "instance_norm": ("instance_norm",),
    "loss": (
        "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss",
        "poisson_nll_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
        "multilabel_soft_margin_loss", "hinge_embedding_loss", "cosine_embedding_loss",
        "margin_ranking_loss", "triplet_margin_loss", "ctc_loss",
    ),
}  # fmt: skip
_OPERATIONS = {name: operation for operation, names in _FUNCTIONS.items() for name in names}

# Computed in half, and without a name in xmem.
_UNSEEN = frozenset(
    {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell"}
    | {"rnn_relu_cell", "bilinear", "_transformer_encoder_layer_fwd"}
)
# What they change keeps its type.
_IN_PLACE = frozenset(name for name in _OPERATIONS if name.endswith("_") and name[-2] != "_")

# Not batch_norm and instance_norm: their kernels take half inputs and compute in float32 with
# float32 statistics. To raise the inputs would give the same numbers and keep twice the bytes;
# CUDA's autocast leaves them alone too.
_RAISED = ("softmax", "layer_norm", "group_norm", "loss")


class Operations(TorchFunctionMode):
    """Computes as the casting in force in this thread says, and tells it what ran."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        operation = _OPERATIONS.get(name)
        casting = None if operation is None else current()
        if operation is None or casting is None:
            if name in _UNSEEN and (casting := current()) is not None and casting.log is not None:
                casting.log.opaque = True
            return function(*args, **kwargs)
        inputs = _tensors(name, args, kwargs)
        in_place = name in _IN_PLACE or kwargs.get("inplace", False)
        if not in_place and _raises(operation, inputs, casting):
            with torch.autocast(inputs[0].device.type, enabled=False):
                result = function(*map(raised, args), **{k: raised(v) for k, v in kwargs.items()})
        else:
            result = function(*args, **kwargs)
        if casting.log is not None:
            if torch.compiler.is_compiling():
                casting.log.opaque = True
            else:
                note(casting, operation, name, inputs, result)
        return result


def _tensors(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among the inputs; only einsum takes them in a list."""
    if name == "einsum":
        return leaves((args, kwargs), torch.Tensor)
    found = [value for value in args if isinstance(value, torch.Tensor)]
    if kwargs:
        found += [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
    return found


def raised(value: Any) -> Any:
    """Return half tensors in float32, in lists too, as part of the graph; all else as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF_TYPES else value
    return rebuilt(value, raised)


def _raises(operation: str, inputs: Sequence[torch.Tensor], casting: Casting) -> bool:
    """Say whether an operation's inputs have to be put into float32."""
    if not casting.enabled:
        return False
    if operation in casting.operations:
        return True
    return operation in _RAISED and any(t.dtype in HALF_TYPES for t in inputs)
