"""What operations under autocast tell of themselves (`xmem.casting.OperationLog`).

A tensor counts once, however many operations keep it. Weights count where they are rounded: on
CUDA, the largest, since a copy lives as long as its operation runs. On a CPU they are used as
they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jittor as jt

from xmem.casting import Casting, OperationLog

HALF_BYTES, FLOAT32_BYTES = 2, 4


@dataclass
class _Ledger:
    """What a block has counted.

    Attributes:
        kept: tensors by number, and whether half of it is kept.
        weight_bytes: the largest copy of a weight.
    """

    kept: dict[int, bool] = field(default_factory=dict)
    weight_bytes: int = 0


_ledgers: weakref.WeakKeyDictionary[OperationLog, _Ledger] = weakref.WeakKeyDictionary()


def tell(
    casting: Casting,
    operation: str,
    dtype: str,
    *,
    halves: Sequence[Any] = (),
    whole: Sequence[Any] = (),
    weights: Sequence[Any] = (),
) -> None:
    """Note a call.

    Args:
        casting: in force around it.
        operation: one of `xmem.operations`.
        dtype: what it computes in.
        halves: the tensors that it keeps in half for backward.
        whole: those that it keeps as they are, and would keep without autocast.
        weights: those that it rounds and does not keep.
    """
    log = casting.log
    if log is None:
        return
    if jt.flags.no_grad:
        log.note(operation, dtype)
        return
    while log.parent is not None:
        log = log.parent
    ledger = _ledgers.setdefault(log, _Ledger())
    half_bytes = float32_bytes = weight_bytes = 0
    for x in whole:
        ledger.kept.setdefault(x.id, False)
    for x in halves:
        known = ledger.kept.get(x.id)
        if known is None:
            float32_bytes += FLOAT32_BYTES * int(x.numel())
        if not known:
            half_bytes += HALF_BYTES * int(x.numel())
        ledger.kept[x.id] = True
    if jt.flags.use_cuda:
        largest = max((HALF_BYTES * int(w.numel()) for w in weights), default=0)
        weight_bytes = max(largest - ledger.weight_bytes, 0)
        ledger.weight_bytes += weight_bytes
    casting.note(
        operation,
        dtype,
        half_bytes=half_bytes + weight_bytes,
        weight_bytes=weight_bytes,
        float32_bytes=float32_bytes,
    )
