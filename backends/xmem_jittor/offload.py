"""Offload of states and parameters on Jittor 1.3.11.

See `streamed_states.py`, `streamed_parameters.py`.

Activations go through `saved.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xmem.offload.depot import Depot
from xmem.receipts import Receipt
from xmem_jittor import streamed_parameters, streamed_states


class Offload:
    """See `xmem.offloading.Offload`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.gaps: Mapping[str, str] = {}

    def offload_optimizer(self, optimizer: Any, depot: Depot, *, block_bytes: int) -> Receipt:
        """See `streamed_states.py`."""
        return streamed_states.offload(optimizer, depot, block_bytes=block_bytes)

    def offload_parameters(
        self, model: Any, depot: Depot, *, blocks: Sequence[Any] | None, prefetch_bytes: int
    ) -> Receipt:
        """See `streamed_parameters.py`."""
        return streamed_parameters.offload(
            model, depot, blocks=blocks, prefetch_bytes=prefetch_bytes
        )
