"""The steps of a training loop on Jittor: gradients belong to the optimizer.

Relies on `jt.optim.Optimizer` of Jittor 1.3.11: `pre_step` computes gradients and gives the
update an early place in the order of execution, `post_step` ends that. Where gradients are and what
counts updates is in `gradients.py`. `xmem.backward` counts one update however often it is called
for it, so `jt.optim.Adam` corrects its bias rightly under `xmem.accumulate`; calls of the
optimizer's own `backward` each count, as in plain Jittor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jittor as jt
import numpy as np

from xmem.errors import UsageError, unknown
from xmem_jittor import data_parallel, gradients, masters


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
            self._add_moments(group)

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
            with gradients.updating():
                for p, g, m, v in held:
                    if p.is_stop_grad():
                        continue
                    m.update(first * m + (1 - first) * g)
                    v.update(second * v + (1 - second) * g * g)
                    p.update(p - rate * m / (jt.sqrt(v) / correction + eps))
        self.post_step()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add parameters, with moments of their own."""
        self._add_moments(group)
        super().add_param_group(group)

    def _add_moments(self, group: dict[str, Any]) -> None:
        for name in ("m", "v"):
            group[name] = [jt.zeros(p.shape, p.dtype).stop_grad() for p in group["params"]]


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
        gradients.backward(loss, optimizer)

    def optimizer_step(self, optimizer: Any) -> None:
        """Ask for the update."""
        gradients.of(optimizer, before="optimizer_step")
        gradients.step(optimizer)

    def zero_grad(self, optimizer: Any) -> None:
        """Forget the gradients, memory included, which Jittor's `zero_grad` keeps."""
        gradients.forget(optimizer)

    def clip_grad_norm_(self, target: Any, max_norm: float, *, norm_type: float) -> Any:
        """Clip an optimizer's gradients; parameters have none of their own here."""
        if not isinstance(target, jt.optim.Optimizer):
            raise UsageError(
                "clip_grad_norm_ takes the optimizer on Jittor, to which gradients belong, and got"
                f" {type(target).__name__}"
            )
        return gradients.clip(target, max_norm, norm_type, before="clip_grad_norm_")

    def finish_micro_batch(self, optimizer: Any) -> None:
        """Execute the gradients, and with them what is older: running statistics too."""
        jt.sync(gradients.of(optimizer, before="the end of a micro-batch", apart=True))

    def unreduced(self, model: Any) -> AbstractContextManager[Any]:
        """See `data_parallel.no_sync`."""
        return data_parallel.no_sync(model)

    def no_grad(self) -> AbstractContextManager[None]:
        """Enter `jt.no_grad`."""
        return jt.no_grad()

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[int]:
        """Set `is_train` of all modules.

        Not by `Module.eval`, which also stops the gradients of all parameters, for good where they
        are frozen or `train` comes first, and remembers them by the ids of tensors.
        """
        modules = model.modules()
        flags = [vars(module).get("is_train") for module in modules]
        for module in modules:
            module.is_train = False
        try:
            yield len(modules)
        finally:
            for module, flag in zip(modules, flags, strict=True):
                if flag is None:
                    vars(module).pop("is_train", None)
                else:
                    module.is_train = flag

    def value(self, loss: Any) -> float:
        """Return a scalar's value."""
        if loss.numel() != 1:
            raise UsageError(
                f"log_value takes a scalar and got a tensor of shape {tuple(loss.shape)}. Give a"
                " scalar, e.g. the loss's mean"
            )
        return float(loss.item())

    def gradients(self, model: Any, optimizer: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the gradients by parameter name; a master's are its parameter's."""
        groups = zip(optimizer.param_groups, masters.parameters_of(optimizer), strict=True)
        found = {
            id(p): g
            for group, parameters in groups
            for p, g in zip(parameters, group.get("grads", ()), strict=False)
        }
        return {
            name: np.array(found[id(p)].float32().numpy())
            for name, p in model.named_parameters()
            if id(p) in found
        }
