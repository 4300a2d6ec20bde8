"""The precision in force, and how an operation runs in it.

See `precision.py` for what is done and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.errors import CompositionError
from xmem_jittor import halves


@dataclass(frozen=True)
class Region:
    """The precision in force.

    Attributes:
        dtype: the half type.
        kept: operations that stay in float32.
    """

    dtype: str
    kept: frozenset[str]


_current: Region | None = None


def in_force() -> Region | None:
    """Return the precision in force, or None for plain float32."""
    return _current


@contextmanager
def switched(region: Region | None) -> Iterator[None]:
    """Put another precision in force inside the block."""
    global _current
    before = _current
    _current = region
    try:
        yield
    finally:
        _current = before


def rounded(x: Any, operation: str) -> Any:
    """Return what an operation would keep of its input, for inputs that several of them read."""
    if _current is None or operation in _current.kept or not is_float(x):
        return x
    return _round(x, _current.dtype)


def is_float(x: Any) -> bool:
    """Say whether something is a tensor of floating-point numbers."""
    return isinstance(x, jt.Var) and x.dtype.is_float()


def _round(x: Any, dtype: str) -> Any:
    """Return x in half; unfused, or what reads it would keep the float32 alive instead."""
    return x if str(x.dtype) == dtype else x.cast(dtype).stop_fuse()


class Half(jt.Function):
    """An operation that keeps its inputs in half.

    Args:
        operation: takes tensors only.
        region: the precision in force.
        weights: the inputs that are kept as they are, and rounded whenever they are used.
    """

    def __init__(
        self, operation: Callable[..., Any], region: Region, weights: tuple[int, ...]
    ) -> None:
        self.operation = operation
        self.region = region
        self.weights = weights

    def execute(self, *inputs: Any) -> Any:
        """Run the operation on rounded inputs."""
        dtype = self.region.dtype
        self.dtypes = [x.dtype for x in inputs]
        self.kept = [
            x.detach() if i in self.weights else halves.to_half(x.detach(), dtype)
            for i, x in enumerate(inputs)
        ]
        with switched(None):
            return halves.to_half(self.operation(*self._working()), dtype)

    def _working(self) -> list[Any]:
        """Return the inputs, rounded, in the type that operations run in."""
        half = [halves.to_half(x, self.region.dtype) for x in self.kept]
        return half if jt.flags.use_cuda else [halves.to_float32(x) for x in half]

    def grad(self, gradient: Any) -> list[Any]:
        """Differentiate the operation, built again on what was kept."""
        if not self.kept:
            raise CompositionError(
                "gradients were asked for twice through an operation that ran under autocast. It"
                " gives its inputs back in the first backward; compute the loss again, or call"
                " jt.grad once for all targets."
            )
        with jt.flag_scope(no_grad=0), switched(None):
            inputs = [x.detach().start_grad() for x in self._working()]
            output = self.operation(*inputs)
            feed = Feed([halves.cast(gradient, output.dtype)])
            found = jt.grad(feed(output), inputs, retain_graph=False)
        self.kept = []
        if not jt.flags.use_cuda:
            # Jittor takes a gradient of another type than its tensor's. In float32 small ones do
            # not vanish without a loss scale: BERT's gradients are off by 0.13, not 0.65 %.
            return found
        return [halves.cast(g, dtype) for g, dtype in zip(found, self.dtypes, strict=True)]


class Feed(jt.Function):
    """Stands for a loss whose gradient with respect to the outputs is known; never executed."""

    def __init__(self, gradients: list[Any]) -> None:
        self.gradients = gradients

    def execute(self, *_: Any) -> Any:
        """Return something to differentiate."""
        return jt.zeros((1,))

    def grad(self, _: Any) -> tuple[Any, ...]:
        """Hand over the gradients."""
        return tuple(self.gradients)


def apply(
    name: str,
    operation: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    weights: tuple[int, ...] = (),
) -> Any:
    """Run an operation in the precision in force.

    Args:
        name: one of `xmem.operations`.
        operation: takes tensors only.
        inputs: the tensors.
        weights: those that are kept as they are, since they live anyway.
    """
    region = _current
    if region is None or not all(is_float(x) for x in inputs):
        return operation(*inputs)
    if name in region.kept:
        with switched(None):
            return operation(*(x.float32() for x in inputs))
    return Half(operation, region, weights)(*inputs)
