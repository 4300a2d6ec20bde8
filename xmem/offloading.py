"""The contract of backends that move optimizer states and parameters away from the device.

What forward leaves for backward goes through `xmem.saving`, with a `Choice` that has an `away`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from xmem.receipts import Receipt

if TYPE_CHECKING:
    from xmem.offload.depot import Depot


@runtime_checkable
class Offload(Protocol):
    """States and parameters that live outside of the device: hook `xmem_offload`."""

    gaps: Mapping[str, str]

    def offload_optimizer(self, optimizer: Any, depot: Depot, *, block_bytes: int) -> Receipt:
        """Keep an optimizer's states away; its step brings them in block by block.

        The optimizer stays the object it is, with its groups, hooks and schedulers; a step gives
        the same parameters and states, bit for bit on a framework that computes at once. Its
        `state_dict` holds the states themselves, and `load_state_dict` takes them.

        Args:
            optimizer: the framework's own, or one of `xmem.optim`.
            depot: where states go.
            block_bytes: what states of may be on the device at once; a parameter whose states are
                larger is stepped in parts where its rule treats every element alone.

        Returns:
            A receipt; `undo()` brings all states back.

        Raises:
            UsageError: it is no optimizer, or offloaded already.
            CompositionError: it is in a combination that cannot work, with the reason.
        """

    def offload_parameters(
        self, model: Any, depot: Depot, *, blocks: Sequence[Any] | None, prefetch_bytes: int
    ) -> Receipt:
        """Keep the parameters of a model's layers away, but for the layer that runs.

        A layer's parameters come before its forward and before its backward, and go after. They
        stay the objects they are for optimizers and hooks. `state_dict` of the model holds
        the values; `load_state_dict` takes them.

        Args:
            model: a native module.
            depot: where parameters go.
            blocks: the modules that come and go as a whole; None: found as for checkpointing
                (children of lists of modules), and every other module with parameters of its own.
            prefetch_bytes: what is read before it is needed, at most.

        Returns:
            A receipt; `undo()` brings all parameters back.

        Raises:
            UsageError: it is no module, or offloaded already.
            CompositionError: it is in a combination that cannot work, with the reason.
        """
