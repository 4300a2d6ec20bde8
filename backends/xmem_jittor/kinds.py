"""The kinds of operations under autocast, and how a call of each runs.

See `precision.py` for what is done and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.casting import Casting, current, in_force
from xmem.containers import fill, take_apart
from xmem.operations import FLOAT32, FOLLOWING
from xmem_jittor.derivatives import Derivative
from xmem_jittor.ledger import tell
from xmem_jittor.regions import Half, HalfOutput, Linear, is_float, is_half, raised

# Jittor's attention is made of these where user code makes it.
_PARTS_OF_ATTENTION = ("matmul", "softmax")


@dataclass(frozen=True)
class Kind:
    """What is known of an operation.

    Attributes:
        name: one of `xmem.operations`.
        activations: how many of its floating-point tensors, from the first, are not weights.
        raises: its output stays float32.
        upcasts: its kernels take float32 only.
    """

    name: str
    activations: int = 1
    raises: bool = False
    upcasts: bool = False

    @property
    def follows(self) -> bool:
        """Whether it computes in float32 what comes in float32."""
        return self.name in FOLLOWING or self.name in FLOAT32

    @property
    def in_float32(self) -> bool:
        """Whether it computes in float32 on any device."""
        return self.upcasts or self.name in FLOAT32


def plain(name: str) -> bool:
    """Say whether an operation computes in float32 here, whatever comes in."""
    casting = current()
    return casting is None or not casting.enabled or _kept(casting, name)


def _kept(casting: Casting, name: str) -> bool:
    operations = casting.operations
    return name in operations or (name in _PARTS_OF_ATTENTION and "attention" in operations)


def apply(
    kind: Kind,
    operation: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    derivative: Derivative | None = None,
) -> Any:
    """Run an operation in the precision in force.

    Args:
        kind: what is known of it.
        operation: takes tensors only.
        inputs: the tensors, all floating-point: what it computes on, then weights.
        derivative: of an operation on one input, where it follows from the output.
    """
    casting = current()
    if casting is None:
        return operation(*inputs)
    if not casting.enabled or _kept(casting, kind.name):
        return _in_float32(casting, kind.name, operation, inputs)
    activations, weights = inputs[: kind.activations], inputs[kind.activations :]
    if kind.follows and not any(is_half(x) for x in activations):
        return _in_float32(casting, kind.name, operation, inputs)
    dtype = casting.dtype
    computes = "float32" if kind.in_float32 else dtype
    if derivative is not None:
        run = HalfOutput(operation, dtype, derivative, in_float32=kind.in_float32)
        output = run(*inputs)
        tell(casting, kind.name, computes, halves=_recorded([output], inputs), holder=run)
        return output
    halves = [is_half(x) or not kind.follows for x in activations]
    numbers = [x.id if half else None for x, half in zip(activations, halves, strict=True)]
    run = Half(
        operation,
        dtype,
        [*numbers, *[None] * len(weights)],
        in_float32=kind.in_float32,
        rounds=not kind.raises,
    )
    kept = [x for x, half in zip(activations, halves, strict=True) if half]
    tell(
        casting,
        kind.name,
        computes,
        halves=_recorded(kept, inputs),
        holder=run,
        weights=() if kind.in_float32 else [w for w in weights if not is_half(w)],
    )
    return run(*inputs)


def _recorded(kept: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """Return what is kept, nothing where no gradient will be asked for."""
    return () if all(x.is_stop_grad() for x in inputs) else kept


def _in_float32(
    casting: Casting, name: str, operation: Callable[..., Any], inputs: Sequence[Any]
) -> Any:
    tell(casting, name, "float32", whole=inputs)
    # Also where modules of a cast model are kept: their weights are in half, their inputs are not.
    if casting.enabled or len({str(x.dtype) for x in inputs}) > 1:
        inputs = [raised(x) for x in inputs]
    with in_force(None):
        return operation(*inputs)


def reach(function: Callable[..., Any], args: Any, kwargs: Any, *, linear: bool) -> Any:
    """Call a function whose results leave half's range, in float32 where its tensors are in half.

    It is none of `xmem.operations`: nothing is told of it, and nothing else changes.

    Args:
        function: takes tensors anywhere.
        args: its arguments.
        kwargs: those by name.
        linear: it is, in its one tensor, so that backward needs nothing of that.
    """
    casting = current()
    found: list[Any] = []
    template = take_apart((args, kwargs), jt.Var, found)
    if casting is None or not casting.enabled or not any(is_half(v) for v in found):
        return function(*args, **kwargs)
    operation, inputs = _of_floats(function, template, found)
    if linear and len(inputs) == 1:
        return Linear(operation)(*inputs)
    numbers = [x.id if is_half(x) else None for x in inputs]
    return Half(operation, casting.dtype, numbers, in_float32=True, rounds=False)(*inputs)


def _of_floats(
    function: Callable[..., Any], template: Any, found: list[Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of the floating-point tensors among those found, and these."""
    places = [i for i, v in enumerate(found) if is_float(v)]
    inputs = [found[place] for place in places]
    for place in places:
        found[place] = None  # or the operation would keep it, not rounded

    def operation(*values: Any) -> Any:
        filled = list(found)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        args, kwargs = fill(template, filled)
        return function(*args, **kwargs)

    return operation, inputs


def call(kind: Kind, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function in the precision in force; its tensors may stand anywhere.

    Integers, and what is no tensor, go to it as they are.
    """
    found: list[Any] = []
    template = take_apart((args, kwargs), jt.Var, found)
    if not found or not is_float(found[0]):
        with in_force(None):
            return function(*args, **kwargs)
    operation, inputs = _of_floats(function, template, found)
    return apply(kind, operation, inputs)
