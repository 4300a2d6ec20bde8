"""Optimizer states that live in a depot; a step streams them block by block (PyTorch 2.13)."""

from __future__ import annotations

from typing import Any

from xmem.offload.depot import Depot
from xmem.receipts import Receipt


def offload(optimizer: Any, depot: Depot, *, block_bytes: int) -> Receipt:
    """See `xmem.offloading.Offload.offload_optimizer`."""
    raise NotImplementedError
