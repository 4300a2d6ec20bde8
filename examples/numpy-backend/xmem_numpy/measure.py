"""Bytes from the arena. It knows no categories, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from xmem.protocols import Counters, Tagged
from xmem_numpy.tape import arena


class Measure:
    """See `xmem.protocols.Measure`, where every method is documented."""

    source = "arena"
    gaps = {"by_category": "the arena adds up totals and does not know single tensors"}

    def synchronize(self) -> None: ...

    def counters(self) -> Counters:
        return Counters(arena.allocated, arena.peak, None, None, arena.count, arena.refused)

    def reset_peak(self) -> None:
        arena.peak = arena.allocated

    def set_limit(self, limit_bytes: int | None) -> None:
        arena.limit = limit_bytes

    def owned(self, model: Any, optimizer: Any, inputs: Any) -> dict[Any, list[Any]]:
        return {}

    def tag(self, category: str, tensors: Iterable[Any]) -> Tagged:
        return Tagged(0, 0, 0)

    def tag_untagged(self, category: str) -> None: ...

    def peak_by_category(self) -> None:
        return None

    def watch(
        self, model: Any, optimizer: Any, record: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def settings(self) -> dict[str, str]:
        return {"numpy": np.__version__}
