"""Loss scaling on Jittor 1.3.11: gradients belong to the optimizer, and its steps can be undone.

Jittor has no such class. The scale is a number on the host, since whether to step is decided in
Python anyway: `step` waits once, for one number per optimizer. What a bit test finds not finite is
the gradient as backward left it, as in PyTorch. `x != x` would not: Jittor compiles with -Ofast,
under which no number is NaN and none infinite.

Float16 gradients are unscaled in float32 and rounded again, so that those below 6e-8 vanish.
Limit: the kernel for CUDA has been compiled nowhere yet.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import jittor as jt
import numpy as np

from xmem_jittor import gradients, halves, methods, shares

# What a number that is not finite has set: all bits of its exponent.
_EXPONENTS = {
    "float16": ("unsigned short", "0x7c00u"),
    "bfloat16": ("unsigned short", "0x7f80u"),
    "float32": ("unsigned int", "0x7f800000u"),
    "float64": ("unsigned long long", "0x7ff0000000000000ull"),
}
_CPU = """
    const {word}* bits = (const {word}*)in0_p;
    int bad = in1_p[0] != 0;
    for (int64 i = 0; i < in0->num; i++) bad |= (bits[i] & {mask}) == {mask};
    out0_p[0] = bad;
"""
_CUDA = """
    __global__ static void look(const {word}* bits, int64 count, int* found) {{
        int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x;
        for (; i < count; i += gridDim.x * (int64)blockDim.x)
            if ((bits[i] & {mask}) == {mask}) *found = 1;
    }}
    cudaMemcpyAsync(out0_p, in1_p, sizeof(int), cudaMemcpyDeviceToDevice, 0);
    const int64 blocks = (in0->num + 255) / 256;
    look<<<blocks < 4096 ? blocks : 4096, 256>>>((const {word}*)in0_p, in0->num, (int*)out0_p);
"""

# Of float32, normal. Not np.finfo: it warns where a library has had denormals flushed to zero.
_SMALLEST = 2.0**-126
_LARGEST = (2 - 2.0**-23) * 2.0**127

_scalers: WeakSet[Scaler] = WeakSet()


def forget(optimizer: Any) -> None:
    """Let no scaler take the next gradients of an optimizer for those that it has unscaled."""
    for scaler in _scalers:
        scaler.forget(optimizer)


class Scaler:
    """Scale losses and step where gradients are finite; see `xmem.protocols.Scaler`.

    The scale is a float32, as PyTorch's is, and does not fall below the smallest normal number,
    whose inverse is the last that a float32 holds.
    """

    def __init__(
        self,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
    ) -> None:
        self._scale = float(np.float32(init_scale))
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._enabled = enabled
        # By optimizer: whether a gradient is not finite; a tensor until it has been waited for.
        self._found: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        if enabled:
            methods.hold(self)
            _scalers.add(self)

    def scale(self, loss: Any) -> Any:
        """Return the loss times the scale, in float32."""
        if not self._enabled:
            return loss
        return loss.float32() * self._scale

    def unscale_(self, optimizer: Any) -> None:
        """Ask for the gradients divided by the scale; waits for nothing."""
        if not self._enabled:
            return
        inverse = float(np.float32(1.0 / self._scale))
        found = jt.zeros((1,), "int32").stop_grad()
        for gradient in gradients.of(optimizer, before="unscale_"):
            found = overflowed(gradient, found)
            raised = halves.to_float32(gradient) * inverse
            gradient.update(halves.cast(raised, gradient.dtype))
        if any(shares.is_apart(p) for group in optimizer.param_groups for p in group["params"]):
            found = gradients.agreed(found, "max")  # all ranks skip a step, or none
        self._found[optimizer] = found

    def step(self, optimizer: Any) -> Any:
        """Step, or take back what backward has done to the optimizer."""
        if not self._enabled:
            return gradients.step(optimizer)
        if optimizer not in self._found:
            self.unscale_(optimizer)
        if self._has_found(optimizer):
            gradients.take_back(optimizer)
            return None
        return gradients.step(optimizer)

    def _has_found(self, optimizer: Any) -> bool:
        found = self._found[optimizer]
        if not isinstance(found, bool):
            found = self._found[optimizer] = bool(found.item())
        return found

    def update(self, new_scale: float | None) -> None:
        """Let the scale follow what was found in any optimizer."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(np.float32(new_scale))
        elif any(self._has_found(optimizer) for optimizer in list(self._found)):
            self._set(max(self._scale * self._backoff_factor, _SMALLEST))
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._set(self._scale * self._growth_factor)
                self._growth_tracker = 0
        self._found.clear()

    def forget(self, optimizer: Any) -> None:
        """Drop what was found in its gradients since the last update."""
        self._found.pop(optimizer, None)

    def _set(self, scale: float) -> None:
        if scale <= _LARGEST:
            self._scale = float(np.float32(scale))

    def get_scale(self) -> float:
        """Return the scale."""
        return self._scale if self._enabled else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state under PyTorch's names."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state."""
        self._scale = float(np.float32(state["scale"]))
        self._growth_factor = state["growth_factor"]
        self._backoff_factor = state["backoff_factor"]
        self._growth_interval = state["growth_interval"]
        self._growth_tracker = state["_growth_tracker"]


def overflowed(values: Any, before: Any) -> Any:
    """Return whether a number is NaN or infinite, or one was before: an int32 of shape (1,)."""
    word, mask = _EXPONENTS[str(values.dtype)]
    return jt.code(
        (1,),
        "int32",
        [values, before],
        cpu_src=_CPU.format(word=word, mask=mask),
        cuda_src=_CUDA.format(word=word, mask=mask),
    ).stop_grad()
