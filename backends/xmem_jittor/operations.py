"""What autocast puts in the place of Jittor's operations.

See `precision.py`. Each maker gets an operation's name and the original, and returns what runs
instead: the original where no half precision is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jittor as jt
from jittor import nn, pool

from xmem_jittor.regions import apply, in_force, is_float


def _elementwise(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the input in half where it is in half already; float32 stays float32."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if in_force() is None or not is_float(x) or x.dtype == "float32":
            return original(x, *args, **kwargs)
        return apply(name, lambda v: original(v, *args, **kwargs), [x])

    return run


def _product(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        return apply(name, original, [a, b])

    return run


def _weighted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace operation(x, weight, bias=None, ...)."""

    def run(x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        if in_force() is None:
            return original(x, weight, bias, *args, **kwargs)
        tensors = [x, weight] if bias is None else [x, weight, bias]
        return apply(
            name,
            lambda v, w, b=None: original(v, w, b, *args, **kwargs),
            tensors,
            weights=(1, 2),
        )

    return run


def _matmul_transpose(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        return apply(name, original, [a, b], weights=(1,))

    return run


def _module(function: str, *options: str) -> Callable[[str, Any], Callable[..., Any]]:
    """Let a module's execute go through the replaced function of `jittor.nn`."""

    def make(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(self: Any, x: Any) -> Any:
            if in_force() is None:
                return original(self, x)
            values = [getattr(self, option) for option in options]
            return getattr(nn, function)(x, self.weight, self.bias, *values)

        return execute

    return make


def _unary_module(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(self: Any, x: Any) -> Any:
        return _elementwise(name, lambda v: original(self, v))(x)

    return execute


def _softmax(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    halved = _elementwise(name, original)

    def run(x: Any, dim: Any = None, log: bool = False) -> Any:
        if log and in_force() is not None:
            return original(x.float32(), dim, log)  # logarithms near 0 need more than 11 bits
        return halved(x, dim, log)

    return run


def _normalisation(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Run in float32, give back what came in; the cast is fused and keeps nothing."""

    def execute(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if in_force() is None or x.dtype == "float32":
            return original(self, x, *args, **kwargs)
        return original(self, x.float32(), *args, **kwargs).cast(x.dtype)

    return execute


def _loss(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(output: Any, *args: Any, **kwargs: Any) -> Any:
        return original(output.float32() if is_float(output) else output, *args, **kwargs)

    return run


def replacements() -> Iterator[tuple[str, Any, str, Callable[[str, Any], Callable[..., Any]]]]:
    """Yield operation, owner, attribute and what makes the replacement."""
    yield "linear", nn, "matmul_transpose", _matmul_transpose
    yield "linear", nn, "linear", _weighted
    yield "linear", nn.Linear, "execute", _module("linear")
    for owner, name in (
        (nn, "matmul"), (jt, "matmul"), (jt.Var, "matmul"), (jt.Var, "__matmul__"),
    ):  # fmt: skip
        yield "matmul", owner, name, _product
    for name in ("conv2d", "conv", "conv3d"):
        yield "conv", nn, name, _weighted
    yield "conv", nn.Conv, "execute", _module("conv2d", "stride", "padding", "dilation", "groups")
    for name in ("conv_transpose", "conv_transpose2d", "conv_transpose3d"):
        yield "conv_transpose", nn, name, _weighted
    transpose = ("stride", "padding", "output_padding", "groups", "dilation")
    yield (
        "conv_transpose", nn.ConvTranspose, "execute", _module("conv_transpose", *transpose),
    )  # fmt: skip
    yield "gelu", nn, "gelu", _elementwise
    yield "gelu", nn.GELU, "execute", _unary_module
    yield "relu", nn, "relu", _elementwise
    yield "relu", nn.ReLU, "execute", _unary_module
    yield "softmax", nn, "softmax", _softmax
    yield "softmax", jt.Var, "softmax", _softmax
    # Jittor's pools do not compile in half on a CPU.
    yield "pool", pool.Pool, "execute", _unary_module
    yield "pool", pool.Pool3d, "execute", _unary_module
    yield "layer_norm", nn.LayerNorm, "execute", _normalisation
    yield "batch_norm", nn.BatchNorm, "execute", _normalisation
    yield "group_norm", nn.GroupNorm, "execute", _normalisation
    for name in ("cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "bce_loss",
                 "nll_loss", "binary_cross_entropy_with_logits"):  # fmt: skip
        yield "loss", nn, name, _loss
