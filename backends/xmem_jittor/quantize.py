"""Optimizer states (`optimizers.py`) and weights (`weights.py`) in few bits on Jittor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xmem.receipts import Receipt

NO_CUDA = (
    "the kernels of optimizers with states in few bits run on a CPU on Jittor; on CUDA use jt.optim"
)
IN_BACKWARD = (
    "Jittor's backward is lazy: nothing runs, and no gradient is there, before the update is asked"
    " for. xmem's optimizers update each parameter as soon as its gradient has been computed and"
    " drop the gradient then: make one (xmem.optim, or xmem.quantize_optimizer) and call its"
    " step(loss), or backward and step with nothing between them that needs all gradients"
    " (clipping, a scaler, sync)"
)


class Quantize:
    """See `xmem.quantizing.Quantize`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.gaps: Mapping[str, str] = {"optimizer_in_backward": IN_BACKWARD}
        if device != "cpu":
            self.gaps = {**self.gaps, "optimizers": NO_CUDA}

    def make_optimizer(
        self, rule: str, parameters: Iterable[Any], options: Mapping[str, Any], *, state_bits: int
    ) -> Any:
        """See `xmem.quantizing.Quantize`."""
        from xmem_jittor.optimizers import make_optimizer

        return make_optimizer(rule, parameters, options, state_bits=state_bits)

    def quantize_optimizer(self, optimizer: Any, bits: int, *, min_elements: int) -> Any:
        """See `xmem.quantizing.Quantize`."""
        from xmem_jittor.optimizers import quantize_optimizer

        return quantize_optimizer(optimizer, bits, min_elements=min_elements)

    def optimizer_in_backward(self, model: Any, optimizer: Any) -> Receipt:
        """See `xmem.quantizing.Quantize`."""
        from xmem_jittor.optimizers import optimizer_in_backward

        return optimizer_in_backward(model, optimizer)

    def quantize_weights(
        self, model: Any, bits: int, scheme: str, *, min_elements: int, skip: Sequence[str] = ()
    ) -> Receipt:
        """See `xmem.quantizing.Quantize`."""
        from xmem_jittor.weights import quantize_weights

        return quantize_weights(model, bits, scheme, min_elements=min_elements, skip=skip)

    def dequantize(self, model: Any) -> int:
        """See `xmem.quantizing.Quantize`."""
        from xmem_jittor.weights import dequantize

        return dequantize(model)
