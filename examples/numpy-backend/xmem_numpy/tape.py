"""The "framework": tensors that are counted, and a tape of what was computed.

Counted are the arrays that tensors hold; what NumPy needs inside an expression is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


class Arena:
    """Counts the bytes of live tensors."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.count = self.refused = 0
        self.limit: int | None = None

    def take(self, size_bytes: int) -> None:
        """Count a tensor in, or refuse it."""
        if self.limit is not None and self.allocated + size_bytes > self.limit:
            self.refused += 1
            raise MemoryError(
                f"out of memory: {size_bytes} bytes more than {self.allocated}, limit {self.limit}"
            )
        self.allocated += size_bytes
        self.count += 1
        self.peak = max(self.peak, self.allocated)

    def give(self, size_bytes: int) -> None:
        """Count a tensor out."""
        self.allocated -= size_bytes


arena = Arena()
recording = True


@contextmanager
def not_recording() -> Iterator[None]:
    """Keep no tape inside the block."""
    global recording
    before, recording = recording, False
    try:
        yield
    finally:
        recording = before


class Tensor:
    """An array that is counted while it lives, and how its gradient flows back."""

    def __init__(
        self,
        data: np.ndarray,
        parents: tuple[Tensor, ...] = (),
        pull: Callable[[np.ndarray], tuple[np.ndarray | None, ...]] | None = None,
    ) -> None:
        self._size = 0
        arena.take(data.nbytes)
        self._size = data.nbytes
        self.data = data
        self.parents = parents if recording else ()
        self.pull = pull if recording else None
        self.grad: Tensor | None = None

    def __truediv__(self, number: float) -> Tensor:
        return Tensor(self.data / np.float32(number), (self,), lambda g: (g / np.float32(number),))

    def __del__(self) -> None:
        arena.give(self._size)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(batch, inputs) -> (batch, outputs)."""
    return Tensor(
        x.data @ weight.data.T + bias.data,
        (x, weight, bias),
        lambda g: (g @ weight.data, g.T @ x.data, g.sum(0)),
    )


def _erf(x: np.ndarray) -> np.ndarray:
    """Abramowitz and Stegun, 7.1.26: within 1.5e-7."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    series = np.float32(0)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + np.float32(coefficient)
    return np.sign(x) * (1 - series * t * np.exp(-x * x))


def gelu(x: Tensor) -> Tensor:
    """X times the normal distribution function at x."""
    root = np.float32(np.sqrt(2))

    def pull(g: np.ndarray) -> tuple[np.ndarray]:
        density = np.exp(-x.data * x.data / 2) / np.float32(np.sqrt(2 * np.pi))
        return (g * (0.5 * (1 + _erf(x.data / root)) + x.data * density),)

    return Tensor(x.data * np.float32(0.5) * (1 + _erf(x.data / root)), (x,), pull)


def mean_squared_error(x: Tensor, target: Tensor) -> Tensor:
    """Average over all elements."""
    difference = x.data - target.data
    scale = np.float32(2 / difference.size)
    return Tensor(
        np.mean(difference**2, dtype=np.float32).reshape(1),
        (x, target),
        lambda g: (g * scale * (x.data - target.data), None),
    )


def backward(loss: Tensor, parameters: list[Tensor]) -> None:
    """Leave `grad` at the parameters, and free the tape on the way."""
    wanted = {id(p) for p in parameters}
    order: list[Tensor] = []
    _sort(loss, order, set())
    gradients = {id(loss): Tensor(np.ones(1, np.float32))}
    while order:
        tensor = order.pop()
        gradient = gradients.pop(id(tensor), None)
        if gradient is None or tensor.pull is None:
            continue
        for parent, part in zip(tensor.parents, tensor.pull(gradient.data), strict=True):
            if part is None:
                continue
            if id(parent) in wanted:
                parent.grad = Tensor(part if parent.grad is None else parent.grad.data + part)
            elif parent.pull is not None:
                gradients[id(parent)] = Tensor(part)
        tensor.parents, tensor.pull = (), None


def _sort(tensor: Tensor, order: list[Tensor], seen: set[int]) -> None:
    if id(tensor) in seen:
        return
    seen.add(id(tensor))
    for parent in tensor.parents:
        _sort(parent, order, seen)
    order.append(tensor)
