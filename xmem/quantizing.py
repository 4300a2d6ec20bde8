"""The contract of backends that keep optimizer states or weights in few bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from xmem.receipts import Receipt


@runtime_checkable
class Quantize(Protocol):
    """Optimizer states and weights in few bits: hook `xmem_quantize`."""

    gaps: Mapping[str, str]

    def make_optimizer(
        self, rule: str, parameters: Iterable[Any], options: Mapping[str, Any], *, state_bits: int
    ) -> Any:
        """Return an optimizer of the framework's kind whose states take a number of bits.

        Args:
            rule: "adamw", "adafactor" or "lion".
            parameters: parameters, or groups of them as the framework's own optimizers take them.
            options: the rule's options (`xmem.optim`).
            state_bits: 32, 8 or 4.
        """

    def quantize_optimizer(self, optimizer: Any, bits: int, *, min_elements: int) -> Any:
        """Return an optimizer that goes on where another is, with its states in few bits.

        Raises:
            UsageError: the optimizer's kind has no update rule here; names those that have.
        """

    def optimizer_in_backward(self, model: Any, optimizer: Any) -> Receipt:
        """Step each parameter as soon as its gradient is there, and drop the gradient.

        Raises:
            CapabilityError: the framework cannot.
        """

    def quantize_weights(
        self, model: Any, bits: int, scheme: str, *, min_elements: int, skip: Sequence[str] = ()
    ) -> Receipt:
        """Keep the weights of linear and convolution layers in few bits, for inference.

        Args:
            model: changed in place, after all checks.
            bits: 8 or 4.
            scheme: "weight_only" or "dynamic" (activations are quantized too).
            min_elements: smaller weights stay as they are.
            skip: paths of modules that stay as they are.

        Returns:
            What `xmem.weights.make_receipt` makes.
        """

    def dequantize(self, model: Any) -> int:
        """Put weights that `quantize_weights` packed back as they unpack; returns how many."""
