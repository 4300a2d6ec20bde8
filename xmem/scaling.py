"""Loss scaling for float16: gradients too small for it are computed larger.

Paulius Micikevicius et al., "Mixed Precision Training", ICLR 2018, with the dynamic scale of
PyTorch's `torch.amp.GradScaler`, whose protocol this is on every backend.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

from xmem import accumulating, api, in_backward, loop
from xmem.errors import CompositionError, UsageError

_scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
_refused: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def refuse(optimizer: Any, reason: str) -> None:
    """Let no scaler unscale an optimizer's gradients, which no scaled loss can have made."""
    _refused[optimizer] = reason


def forget(optimizer: Any) -> None:
    """Let no scaler take an optimizer's next gradients for unscaled: a step of it has failed."""
    for scaler in list(_scalers):
        scaler._forget(optimizer)


class GradScaler:
    """Scales losses, and steps only where no gradient overflowed.

        scaler = xmem.GradScaler()
        with xmem.autocast("float16"):
            loss = ...
        xmem.backward(scaler.scale(loss), optimizer)
        scaler.unscale_(optimizer)  # only to clip
        scaler.step(optimizer)
        scaler.update()

    A step with a gradient that is not finite changes no parameter, no optimizer state and no count
    of steps; `update` then multiplies the scale by `backoff_factor`. After `growth_interval` steps
    without one, it multiplies it by `growth_factor`.

    Args:
        init_scale: what losses are multiplied by at first.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: finite steps before the scale grows.
        enabled: False lets everything pass unscaled.

    Raises:
        UsageError: a number that is out of its range.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        _check("init_scale", init_scale, "above 0", valid=init_scale > 0)
        _check("growth_factor", growth_factor, "above 1", valid=growth_factor > 1)
        _check("backoff_factor", backoff_factor, "between 0 and 1", valid=0 < backoff_factor < 1)
        whole = isinstance(growth_interval, int) and growth_interval >= 1
        _check("growth_interval", growth_interval, "a whole number from 1", valid=whole)
        self.enabled = enabled
        self._scaler = api.active().precision.make_scaler(
            init_scale=float(init_scale),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._unscaled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        if enabled:
            _scalers.add(self)

    def scale(self, loss: Any) -> Any:
        """Return the loss, a scalar, multiplied by the scale.

        Raises:
            CompositionError: an optimizer steps in backward, where it cannot be unscaled before.
        """
        if not self.enabled:
            return loss
        in_backward.check("GradScaler.scale")
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale, once before `step`; for clipping.

        Raises:
            UsageError: they have been unscaled, or stepped, since the last update, or are a part
                of what `xmem.accumulate` adds up.
            CompositionError: they are made where no loss can be scaled, by `Pipeline.step`.
        """
        if not self.enabled:
            return
        _check_scaled(optimizer)
        if optimizer in self._stepped:
            raise UsageError("unscale_ comes before step; call update() after each step")
        if optimizer in self._unscaled:
            raise UsageError("unscale_ has been called for this optimizer since the last update()")
        accumulating.check("unscale_")
        self._scaler.unscale_(optimizer)
        self._unscaled.add(optimizer)
        accumulating.mark_unscaled(optimizer, unscaled=True)

    def step(self, optimizer: Any) -> Any:
        """Step the optimizer if all its gradients are finite; returns what its step returns.

        Raises:
            UsageError: the optimizer has stepped since the last update.
            CompositionError: see `unscale_`.
        """
        if optimizer in self._stepped:
            raise UsageError("step has been called for this optimizer since the last update()")
        accumulation = accumulating.current()
        if accumulation is not None:
            accumulation.check_step()
        if not self.enabled:
            return loop.optimizer_step(optimizer)
        _check_scaled(optimizer)
        result = self._scaler.step(optimizer)
        self._stepped.add(optimizer)
        accumulating.mark_unscaled(optimizer, unscaled=False)
        return result

    def update(self, new_scale: float | None = None) -> None:
        """Let the scale follow what has been found since the last update.

        Args:
            new_scale: set it to this instead.

        Raises:
            UsageError: nothing has been stepped or unscaled since the last update.
        """
        if not self.enabled:
            return
        if new_scale is not None:
            _check("new_scale", new_scale, "above 0", valid=new_scale > 0)
        elif not self._stepped and not self._unscaled:
            raise UsageError("update comes after step(optimizer), and nothing has been stepped")
        self._scaler.update(new_scale)
        for optimizer in self._unscaled:
            accumulating.mark_unscaled(optimizer, unscaled=False)
        self._stepped.clear()
        self._unscaled.clear()

    def _forget(self, optimizer: Any) -> None:
        self._scaler.forget(optimizer)
        self._unscaled.discard(optimizer)
        self._stepped.discard(optimizer)

    def get_scale(self) -> float:
        """Return the scale; 1.0 where scaling is disabled. Waits for the last update."""
        return float(self._scaler.get_scale()) if self.enabled else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return scale, factors, interval and the count of finite steps; as PyTorch's, plain."""
        return dict(self._scaler.state_dict()) if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` gave, on any backend.

        Raises:
            UsageError: keys are missing, e.g. because it comes from a scaler that was disabled.
        """
        if not self.enabled:
            return
        missing = sorted(set(self._scaler.state_dict()) - set(state))
        if missing:
            raise UsageError(
                f"the state of the scaler lacks {', '.join(missing)}; it has"
                f" {', '.join(state) or 'nothing'}. Was it saved with enabled=False?"
            )
        self._scaler.load_state_dict(dict(state))


def _check_scaled(optimizer: Any) -> None:
    if optimizer in _refused:
        raise CompositionError(_refused[optimizer])


def _check(name: str, value: Any, what: str, *, valid: bool) -> None:
    if not valid or not math.isfinite(value):
        raise UsageError(f"{name}={value!r}: give a number {what}")
