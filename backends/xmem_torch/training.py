"""The training steps on PyTorch: torch.optim, fused where it runs (2.13)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from xmem.errors import UsageError, unknown
from xmem_torch import data_parallel, norms
from xmem_torch.masters import check_gradients, master_of


class Training:
    """Steps; see `xmem.protocols.Training`."""

    gaps: Mapping[str, str] = {}

    def make_optimizer(self, name: str, model: Any, *, learning_rate: float) -> Any:
        """Fused: no temporaries in the step (foreach takes 2.56 bytes per parameter)."""
        makers: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        if name not in makers:
            raise UsageError(unknown("optimizer", name, makers))
        return makers[name](model.parameters(), lr=learning_rate, fused=True)

    def backward(self, loss: Any, optimizer: Any) -> None:
        """Call loss.backward()."""
        loss.backward()

    def optimizer_step(self, optimizer: Any) -> Any:
        """Call optimizer.step()."""
        check_gradients(optimizer)
        return optimizer.step()

    def zero_grad(self, optimizer: Any) -> None:
        """Set the gradients to None, which frees them."""
        optimizer.zero_grad(set_to_none=True)

    def clip_grad_norm_(self, target: Any, max_norm: float, *, norm_type: float) -> Any:
        """The target may be parameters, where the optimizer has no masters of them."""
        parameters = _parameters_in(target)
        if any(master_of(p) is not p for p in parameters):
            raise UsageError(
                "these parameters have float32 masters, which have their gradients: pass the"
                " optimizer to clip_grad_norm_"
            )
        if all(p.grad is None for p in parameters):
            raise UsageError("there are no gradients to clip: call xmem.backward first")
        parts = norms.parts_of(parameters)
        if parts:
            return norms.clip(parameters, parts, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def finish_micro_batch(self, optimizer: Any) -> None:
        """Nothing is left of it: the graph went with backward."""

    def unreduced(self, model: Any) -> AbstractContextManager[Any]:
        """Enter the model's own `no_sync`; see `data_parallel`."""
        return data_parallel.accumulating(model)

    def no_grad(self) -> AbstractContextManager[None]:
        """torch.no_grad."""
        return torch.no_grad()

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[int]:
        """Call model.eval()."""
        flags = [(module, module.training) for module in model.modules()]
        wanting = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        model.eval()
        try:
            yield len(flags)
        finally:
            for module, was in flags:
                module.training = was
            for parameter, wanted in wanting:
                parameter.requires_grad_(wanted)

    def value(self, loss: Any) -> float:
        """Copy it to the host."""
        if loss.numel() != 1:
            raise UsageError(f"log_value takes a scalar, not a tensor of {tuple(loss.shape)}")
        return float(loss.detach())

    def gradients(self, model: Any, optimizer: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Copy the gradients out."""
        return {
            name: gradient.detach().float().cpu().numpy().copy()
            for name, parameter in model.named_parameters()
            if (gradient := master_of(parameter).grad) is not None
        }


def _parameters_in(target: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, or those given.

    Raises:
        UsageError: there are none, or the target is something else.
    """
    if hasattr(target, "param_groups"):
        found = [p for group in target.param_groups for p in group["params"]]
    elif isinstance(target, torch.Tensor):
        found = [target]
    elif isinstance(target, torch.nn.Module) or not isinstance(target, Iterable):
        raise UsageError(
            f"{type(target).__name__} is no target to clip: pass the optimizer, or parameters"
        )
    else:
        found = list(target)
    if not found:
        raise UsageError("there are no parameters to clip: pass the optimizer, or parameters")
    for parameter in found:
        if not isinstance(parameter, torch.Tensor):
            raise UsageError(
                f"{type(parameter).__name__} is no parameter to clip: pass the optimizer, or"
                " parameters"
            )
    return found
