"""Parameters that live in a depot; a layer's come when it runs (PyTorch 2.13)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xmem.offload.depot import Depot
from xmem.receipts import Receipt


def offload(
    model: Any, depot: Depot, *, blocks: Sequence[Any] | None, prefetch_bytes: int
) -> Receipt:
    """See `xmem.offloading.Offload.offload_parameters`."""
    raise NotImplementedError


def are_away(parameters: Sequence[Any]) -> bool:
    """Say whether some of these parameters live in a depot."""
    return False


@contextmanager
def brought_in(parameters: Sequence[Any]) -> Iterator[None]:
    """Have these parameters on the device inside the block; changes are stored at its end."""
    yield
