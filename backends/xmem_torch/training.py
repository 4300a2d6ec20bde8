"""The training steps on PyTorch: torch.optim, fused where it runs (2.13)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from xmem.errors import UsageError, unknown


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

    def optimizer_step(self, optimizer: Any) -> None:
        """Call optimizer.step()."""
        optimizer.step()

    def zero_grad(self, optimizer: Any) -> None:
        """Set the gradients to None, which frees them."""
        optimizer.zero_grad(set_to_none=True)

    def gradients(self, model: Any, optimizer: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Copy the gradients out."""
        return {
            name: parameter.grad.detach().float().cpu().numpy().copy()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
