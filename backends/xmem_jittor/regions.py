"""How an operation runs in the precision in force, and what it keeps for backward.

See `precision.py` for what is done and why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jittor as jt

from xmem.casting import current
from xmem.casting import in_force as casting_in_force
from xmem.errors import CompositionError
from xmem_jittor import halves
from xmem_jittor.trial import note_kept, trying


def in_force() -> Hashable:
    """Return what is equal for castings that compute alike; None outside of any block."""
    casting = current()
    return None if casting is None else casting.key


def is_float(x: Any) -> bool:
    """Say whether something is a tensor of floating-point numbers."""
    return isinstance(x, jt.Var) and x.dtype.is_float()


def is_half(x: Any) -> bool:
    """Say whether something is a tensor in half precision."""
    return isinstance(x, jt.Var) and str(x.dtype) in ("float16", "bfloat16")


def raised(value: Any) -> Any:
    """Return a half tensor in float32, all else as it is."""
    return Raise()(value) if is_half(value) else value


class _Rounded:
    """A tensor in half, shared by all operations that keep it."""

    def __init__(self, value: Any) -> None:
        self.value = value


# By the number of the tensor, which is never given twice, and the type. A query, a key and a value
# that are made from one input keep it once.
_roundings: weakref.WeakValueDictionary[tuple[int, str], _Rounded] = weakref.WeakValueDictionary()


def _rounding(of: int, x: Any, dtype: str) -> _Rounded:
    """Return x in half, the same for all that keep it."""
    found = _roundings.get((of, dtype))
    if found is None:
        found = _Rounded(halves.to_half(x.detach(), dtype))
        _roundings[of, dtype] = found
    return found


class Half(jt.Function):
    """An operation that keeps its inputs in half and is built again in backward.

    Args:
        operation: takes tensors only.
        dtype: the half type.
        numbers: of the inputs that are rounded (`Var.id`); None for those that are kept as they
            are, since they live anyway: weights.
        in_float32: compute in float32 on any device.
        rounds: give the output back in half.
    """

    def __init__(
        self,
        operation: Callable[..., Any],
        dtype: str,
        numbers: Sequence[int | None],
        *,
        in_float32: bool = False,
        rounds: bool = True,
    ) -> None:
        self.operation = operation
        self.dtype = dtype
        self.numbers = numbers
        self.in_float32 = in_float32 or not jt.flags.use_cuda
        self.rounds = rounds
        self.kept: list[Any] = []

    def execute(self, *inputs: Any) -> Any:
        """Run the operation on rounded inputs."""
        self.dtypes = [x.dtype for x in inputs]
        self.kept = [
            x.detach() if number is None else _rounding(number, x, self.dtype)
            for x, number in zip(inputs, self.numbers, strict=True)
        ]
        note_kept([x.value if isinstance(x, _Rounded) else x for x in self.kept])
        with casting_in_force(None):
            output = self.operation(*self._working())
        # Detached, or it would be kept as what its own operation needs in backward.
        return halves.to_half(output, self.dtype) if self.rounds else output.detach()

    def _working(self) -> list[Any]:
        """Return the inputs in the type that the operation runs in."""
        kept = [x.value if isinstance(x, _Rounded) else x for x in self.kept]
        if self.in_float32:
            return [halves.to_float32(x) for x in kept]
        return [halves.to_half(x, self.dtype) for x in kept]

    def grad(self, gradient: Any) -> list[Any]:
        """Differentiate the operation, built again on what was kept."""
        if not self.kept:
            refuse_twice()
        with jt.flag_scope(no_grad=0), casting_in_force(None):
            inputs = [x.detach().start_grad() for x in self._working()]
            output = self.operation(*inputs)
            feed = Feed([halves.cast(gradient, output.dtype)])
            found = jt.grad(feed(output), inputs, retain_graph=False)
        if not trying():
            self.kept = []
        return [_returned(g, dtype) for g, dtype in zip(found, self.dtypes, strict=True)]


class HalfOutput(jt.Function):
    """An operation on one input whose derivative follows from its output, which is kept in half.

    The next operation mostly keeps the same, so it takes no memory of its own.

    Args:
        operation: takes the input.
        dtype: the half type.
        derivative: makes the input's gradient of the output's and the output, in float32.
        in_float32: compute in float32 on any device.
    """

    def __init__(
        self,
        operation: Callable[[Any], Any],
        dtype: str,
        derivative: Callable[[Any, Any], Any],
        *,
        in_float32: bool,
    ) -> None:
        self.operation = operation
        self.dtype = dtype
        self.derivative = derivative
        self.in_float32 = in_float32 or not jt.flags.use_cuda
        self.kept: Any = None

    def execute(self, x: Any) -> Any:
        """Run the operation."""
        self.input_dtype = x.dtype
        half = halves.to_half(x.detach(), self.dtype)
        with casting_in_force(None):
            output = self.operation(halves.to_float32(half) if self.in_float32 else half)
        output = halves.to_half(output, self.dtype)
        self.kept = output.detach()
        note_kept([self.kept])
        return output

    def grad(self, gradient: Any) -> Any:
        """Differentiate."""
        if self.kept is None:
            refuse_twice()
        with casting_in_force(None):
            found = self.derivative(halves.to_float32(gradient), halves.to_float32(self.kept))
        if not trying():
            self.kept = None
        return _returned(found, self.input_dtype)


class Linear(jt.Function):
    """A linear operation on one tensor in half, in float32; keeps nothing.

    Args:
        operation: takes the tensor.
    """

    def __init__(self, operation: Callable[[Any], Any]) -> None:
        self.operation = operation

    def execute(self, x: Any) -> Any:
        """Run the operation."""
        self.shape, self.dtype = x.shape, x.dtype
        with casting_in_force(None):
            return self.operation(halves.to_float32(x.detach()))

    def grad(self, gradient: Any) -> Any:
        """Differentiate the operation, built on zeros that are never computed."""
        with jt.flag_scope(no_grad=0), casting_in_force(None):
            zeros = jt.zeros(self.shape, "float32").start_grad()
            feed = Feed([halves.cast(gradient, "float32")])
            found = jt.grad(feed(self.operation(zeros)), [zeros], retain_graph=False)[0]
        return _returned(found, self.dtype)


class Raise(jt.Function):
    """Half to float32, with a gradient that stays float32 where that is possible."""

    def execute(self, x: Any) -> Any:
        """Cast."""
        self.dtype = x.dtype
        return halves.to_float32(x.detach())

    def grad(self, gradient: Any) -> Any:
        """Hand the gradient on."""
        return _returned(gradient, self.dtype)


def _returned(gradient: Any, dtype: Any) -> Any:
    """Return a gradient in the type that it is handed on in.

    Jittor takes a gradient of another type than its tensor's. In float32 small ones do not vanish
    without a loss scale; on CUDA they are in half, as its kernels take them.
    """
    return halves.cast(gradient, dtype) if jt.flags.use_cuda else gradient


def refuse_twice() -> None:
    """Say that what is kept is given back in backward."""
    raise CompositionError(
        "gradients were asked for twice through an operation that ran under autocast. It gives its"
        " inputs back in the first backward; compute the loss again, or call jt.grad once for all"
        " targets."
    )


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
