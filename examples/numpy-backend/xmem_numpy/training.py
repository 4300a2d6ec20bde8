"""The steps of a training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from xmem.errors import UsageError, unknown
from xmem_numpy.tape import Tensor, backward, not_recording


class Adam:
    """Kingma and Ba, ICLR 2015."""

    def __init__(self, parameters: list[Tensor], learning_rate: float) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.steps = 0
        self.first = [Tensor(np.zeros_like(p.data)) for p in parameters]
        self.second = [Tensor(np.zeros_like(p.data)) for p in parameters]

    def step(self) -> None:
        """Update in place."""
        self.steps += 1
        rate = np.float32(self.learning_rate / (1 - 0.9**self.steps))
        correction = np.float32(1 / (1 - 0.999**self.steps))
        for p, m, v in zip(self.parameters, self.first, self.second, strict=True):
            if p.grad is None:
                continue
            m.data += np.float32(0.1) * (p.grad.data - m.data)
            v.data += np.float32(0.001) * (p.grad.data**2 - v.data)
            p.data -= rate * m.data / (np.sqrt(v.data * correction) + np.float32(1e-8))


class Training:
    """See `xmem.protocols.Training`, where every method is documented."""

    gaps: dict[str, str] = {}

    def make_optimizer(self, name: str, model: Any, *, learning_rate: float) -> Any:
        if name != "adam":
            raise UsageError(unknown("optimizer", name, ["adam"]))
        return Adam(list(model.parameters().values()), learning_rate)

    def backward(self, loss: Any, optimizer: Any) -> None:
        backward(loss, optimizer.parameters)

    def optimizer_step(self, optimizer: Any) -> None:
        self._gradients(optimizer)
        optimizer.step()

    def zero_grad(self, optimizer: Any) -> None:
        for parameter in optimizer.parameters:
            parameter.grad = None

    def gradients(self, model: Any, optimizer: Any) -> dict[str, np.ndarray]:
        return {n: p.grad.data.copy() for n, p in model.parameters().items() if p.grad is not None}

    def clip_grad_norm_(self, target: Any, max_norm: float, *, norm_type: float) -> Tensor:
        gradients = self._gradients(target)
        norm = float(np.linalg.norm(np.concatenate([g.ravel() for g in gradients]), norm_type))
        for gradient in gradients:
            gradient *= np.float32(min(1.0, max_norm / (norm + 1e-6)))
        return Tensor(np.array([norm], np.float32))

    def _gradients(self, optimizer: Any) -> list[np.ndarray]:
        found = [p.grad.data for p in optimizer.parameters if p.grad is not None]
        if not found:
            raise UsageError("there are no gradients; call xmem.backward(loss, optimizer) first")
        return found

    def finish_micro_batch(self, optimizer: Any) -> None: ...

    def unreduced(self, model: Any) -> AbstractContextManager[Any]:
        raise UsageError("the numpy example runs in one process; leave model= out")

    def no_grad(self) -> AbstractContextManager[None]:
        return not_recording()

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[int]:
        yield len(model.blocks())

    def value(self, loss: Any) -> float:
        return float(loss.data[0])
