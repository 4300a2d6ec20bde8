"""Loss scaling on PyTorch: torch.amp.GradScaler (2.13), which works on a CPU too."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from xmem.errors import UsageError
from xmem_torch import norms
from xmem_torch.local_parts import local_part
from xmem_torch.masters import check_gradients, parameters_of


class Scaler:
    """Scales losses; see `xmem.protocols.Scaler`.

    A fused optimizer is told on the device whether to skip, so that nothing waits. Its first step
    waits: PyTorch makes the state before it skips, and leaves the momentum of SGD uninitialised
    (`_fused_sgd`: `empty_like`, then the kernel returns early).
    """

    def __init__(self, device: str, *, init_scale: float, **settings: Any) -> None:
        self._scaler = torch.amp.GradScaler(device, init_scale=init_scale, **settings)
        self._unscaled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._scaled = False  # PyTorch puts the scale on a device when it first scales

    def scale(self, loss: Any) -> Any:
        """Multiply on the device."""
        self._scaled = True
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Any) -> None:
        """Leave it to PyTorch, which notes what it finds on the device."""
        self._check(optimizer)
        self._scaler.unscale_(optimizer)
        self._unscaled.add(optimizer)
        if self._has_parts(optimizer):
            norms.agree_on_infinity(self._found(optimizer))

    def step(self, optimizer: Any) -> Any:
        """Leave it to PyTorch, once the optimizer has its state."""
        self._check(optimizer)
        if optimizer not in self._unscaled and self._has_parts(optimizer):
            self.unscale_(optimizer)
        if not optimizer.state and optimizer not in self._begun:  # SGD alone never has any
            if optimizer not in self._unscaled:
                self.unscale_(optimizer)
            if self._found_inf(optimizer):
                return None
        result = self._scaler.step(optimizer)
        self._begun.add(optimizer)
        return result

    def _check(self, optimizer: Any) -> None:
        check_gradients(optimizer)
        if not self._scaled:
            raise UsageError(
                "this scaler has scaled no loss, so the gradients are not scaled by it: call"
                " xmem.backward(scaler.scale(loss), optimizer) first"
            )

    def _found_inf(self, optimizer: Any) -> bool:
        return any(found.item() for found in self._found(optimizer))

    def _found(self, optimizer: Any) -> list[torch.Tensor]:
        state = self._scaler._per_optimizer_states[id(optimizer)]
        return [local_part(found) for found in state["found_inf_per_device"].values()]

    def _has_parts(self, optimizer: Any) -> bool:
        """Say whether other ranks may find what this one does not."""
        return bool(norms.parts_of(list(parameters_of(optimizer))))

    def update(self, new_scale: float | None) -> None:
        """Leave it to PyTorch, which has no scale to set before it first scales."""
        if new_scale is None:
            self._scaler.update()
        elif self._scaled:
            self._scaler.update(float(new_scale))
        else:
            self.load_state_dict({**self.state_dict(), "scale": new_scale})
        self._unscaled.clear()

    def forget(self, optimizer: Any) -> None:
        """Drop what PyTorch noted of it since the last update."""
        self._scaler._per_optimizer_states.pop(id(optimizer), None)
        self._unscaled.discard(optimizer)

    def get_scale(self) -> float:
        """Read it from the device."""
        return float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """The keys are PyTorch's own."""
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A scale that is an integer becomes a float."""
        self._scaler.load_state_dict({**state, "scale": float(state["scale"])})
