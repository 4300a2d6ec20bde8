"""Operations whose derivative follows from their output; all in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jittor as jt

Derivative = Callable[[Any, Any], Any]
"""Makes the gradient of an operation's input of its output's gradient and its output."""


def of(operation: str, *args: Any, **kwargs: Any) -> Derivative | None:
    """Return it, or None where what comes out does not tell.

    Args:
        operation: one of `xmem.operations`.
        args: what it takes after its input.
        kwargs: the same by name.
    """
    make = _MAKERS.get(operation)
    return None if make is None else make(*args, **kwargs)


def _relu() -> Derivative:
    return lambda gradient, output: jt.ternary(output > 0.0, gradient, jt.zeros_like(gradient))


def _leaky_relu(scale: float = 0.01) -> Derivative | None:
    if scale <= 0:
        return None
    return lambda gradient, output: jt.ternary(output > 0.0, gradient, gradient * scale)


def _sigmoid() -> Derivative:
    return lambda gradient, output: gradient * output * (1.0 - output)


def _tanh() -> Derivative:
    return lambda gradient, output: gradient * (1.0 - output * output)


def _softmax(dim: Any = None, log: bool = False) -> Derivative | None:
    if log:
        return None
    axes = () if dim is None else dim

    def derivative(gradient: Any, output: Any) -> Any:
        weighted = gradient * output
        return weighted - output * weighted.sum(axes, keepdims=True)

    return derivative


_MAKERS: dict[str, Callable[..., Derivative | None]] = {
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "softmax": _softmax,
}
