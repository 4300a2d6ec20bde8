"""The steps of a training loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmem.errors import UsageError, unknown
from xmem_numpy.tape import Tensor, backward


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
        optimizer.step()

    def zero_grad(self, optimizer: Any) -> None:
        for parameter in optimizer.parameters:
            parameter.grad = None

    def gradients(self, model: Any, optimizer: Any) -> dict[str, np.ndarray]:
        return {n: p.grad.data.copy() for n, p in model.parameters().items() if p.grad is not None}
