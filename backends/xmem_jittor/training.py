"""The steps of a training loop on Jittor: gradients belong to the optimizer.

Relies on `jt.optim.Optimizer` of Jittor 1.3.11: `pre_step` computes gradients and gives the
update an early place in the order of execution, `post_step` ends that, `param_groups[i]["grads"]`
holds the gradients, beside "params", until the next backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jittor as jt
import numpy as np

from xmem.errors import UsageError, unknown


class Adam(jt.optim.Optimizer):
    """Adam with the update rule of `xmem.protocols.Training.make_optimizer`.

    Diederik Kingma and Jimmy Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015. Jittor's
    own `jt.optim.Adam` adds eps to sqrt(v) before the bias correction, which makes its eps larger
    by 1/sqrt(1 - b2^t), 32 times in the first step, and takes t from the number of calls of
    `backward`, which accumulation of gradients counts several times per update.
    """

    def __init__(
        self,
        params: list[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr)
        self.betas = betas
        self.eps = eps
        self.updates = 0
        for group in self.param_groups:
            group["m"] = [jt.zeros(p.shape, p.dtype).stop_grad() for p in group["params"]]
            group["v"] = [jt.zeros(p.shape, p.dtype).stop_grad() for p in group["params"]]

    def step(self, loss: Any = None, retain_graph: bool = False) -> None:
        """Update the parameters, from the gradients of `loss` where one is given."""
        self.pre_step(loss, retain_graph)
        self.updates += 1
        for group in self.param_groups:
            first, second = group.get("betas", self.betas)
            rate = group.get("lr", self.lr) / (1 - first**self.updates)
            correction = math.sqrt(1 - second**self.updates)
            eps = group.get("eps", self.eps)
            held = zip(group["params"], group["grads"], group["m"], group["v"], strict=True)
            for p, g, m, v in held:
                if p.is_stop_grad():
                    continue
                m.update(first * m + (1 - first) * g)
                v.update(second * v + (1 - second) * g * g)
                p.update(p - rate * m / (jt.sqrt(v) / correction + eps))
        self.post_step()


class Training:
    """One name for each step; see `xmem.protocols.Training`."""

    def __init__(self) -> None:
        self.gaps: Mapping[str, str] = {}

    def make_optimizer(self, name: str, model: Any, *, learning_rate: float) -> Any:
        """Return an optimizer; "sgd" is Jittor's base class, whose own rule is p -= lr g.

        `jt.optim.SGD` holds a momentum of 4 bytes per parameter even where momentum is 0.
        """
        makers = {"sgd": jt.optim.Optimizer, "adam": Adam}
        if name not in makers:
            raise UsageError(unknown("optimizer", name, makers))
        trained = [p for p in model.parameters() if not p.is_stop_grad()]
        return makers[name](trained, learning_rate)

    def backward(self, loss: Any, optimizer: Any) -> None:
        """Ask for the gradients; they are computed when something needs them."""
        optimizer.backward(loss)

    def optimizer_step(self, optimizer: Any) -> None:
        """Ask for the update."""
        if any("grads" not in group for group in optimizer.param_groups):
            raise UsageError(
                "optimizer_step came before backward: the optimizer has no gradients. Call"
                " xmem.backward(loss, optimizer) first."
            )
        optimizer.step()

    def zero_grad(self, optimizer: Any) -> None:
        """Forget the gradients, memory included, which Jittor's `zero_grad` keeps."""
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group.pop("grads", None)

    def gradients(self, model: Any, optimizer: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the gradients by parameter name."""
        found = {
            id(p): g
            for group in optimizer.param_groups
            for p, g in zip(group["params"], group.get("grads", ()), strict=False)
        }
        return {
            name: np.array(found[id(p)].float32().numpy())
            for name, p in model.named_parameters()
            if id(p) in found
        }
