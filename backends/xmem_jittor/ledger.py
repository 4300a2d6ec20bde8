"""What operations under autocast tell of themselves (`xmem.casting.OperationLog`).

A tensor counts once, however many operations keep it, and until the last of them is gone: a block
around several steps reports the most that was kept at a time. Weights count where they are
rounded: on CUDA, the largest, since a copy lives as long as its operation runs. On a CPU they are
used as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jittor as jt

from xmem.casting import Casting, OperationLog

HALF_BYTES, FLOAT32_BYTES = 2, 4


# Of those that operations keep in float32, which are not seen to go, as many as may still be met.
_WHOLE = 4096


@dataclass
class _Account:
    """What is kept for backward now of what ran inside a block, and the most that was."""

    log: weakref.ref[OperationLog]
    half_bytes: int = 0
    float32_bytes: int = 0

    def add(self, half_bytes: int, float32_bytes: int) -> None:
        self.half_bytes += half_bytes
        self.float32_bytes += float32_bytes
        log = self.log()
        if log is not None:
            # The copies of weights are part of the log's half_bytes.
            log.half_bytes = max(log.half_bytes, self.half_bytes + log.weight_bytes)
            log.float32_bytes = max(log.float32_bytes, self.float32_bytes)


@dataclass
class _Kept:
    """A tensor that is kept in half.

    Attributes:
        half_bytes: its size.
        float32_bytes: what would be kept without autocast; 0 where that is kept all the same.
        accounts: that it counts in: of the blocks it was kept in.
        holders: how many operations keep it.
    """

    half_bytes: int
    float32_bytes: int
    accounts: list[_Account]
    holders: int = 0


@dataclass
class _Ledger:
    """What a block, with all blocks inside it, has counted.

    Attributes:
        kept: tensors by number, as long as an operation keeps them.
        whole: numbers of those that are kept in float32, the last ones.
        weight_bytes: the largest copy of a weight.
    """

    kept: dict[int, _Kept] = field(default_factory=dict)
    whole: dict[int, None] = field(default_factory=dict)
    weight_bytes: int = 0

    def keep(self, x: Any, holder: Any, accounts: list[_Account]) -> None:
        """Count a tensor until the operation that keeps it is gone."""
        number = x.id
        kept = self.kept.get(number)
        if kept is None:
            count = int(x.numel())
            saved = 0 if number in self.whole else FLOAT32_BYTES * count
            kept = self.kept[number] = _Kept(HALF_BYTES * count, saved, accounts)
            for account in accounts:
                account.add(kept.half_bytes, kept.float32_bytes)
        kept.holders += 1
        weakref.finalize(holder, self._release, number).atexit = False

    def _release(self, number: int) -> None:
        kept = self.kept[number]
        kept.holders -= 1
        if not kept.holders:
            del self.kept[number]
            for account in kept.accounts:
                account.add(-kept.half_bytes, -kept.float32_bytes)

    def keep_whole(self, x: Any) -> None:
        """Note that a tensor is kept in float32."""
        self.whole[x.id] = None
        if len(self.whole) > _WHOLE:
            del self.whole[next(iter(self.whole))]


_ledgers: weakref.WeakKeyDictionary[OperationLog, _Ledger] = weakref.WeakKeyDictionary()
_accounts: weakref.WeakKeyDictionary[OperationLog, _Account] = weakref.WeakKeyDictionary()


def _account(log: OperationLog) -> _Account:
    return _accounts.setdefault(log, _Account(weakref.ref(log)))


def tell(
    casting: Casting,
    operation: str,
    dtype: str,
    *,
    halves: Sequence[Any] = (),
    holder: Any = None,
    whole: Sequence[Any] = (),
    weights: Sequence[Any] = (),
) -> None:
    """Note a call.

    Args:
        casting: in force around it.
        operation: one of `xmem.operations`.
        dtype: what it computes in.
        halves: the tensors that it keeps in half for backward.
        holder: what keeps them, and is gone when they are.
        whole: those that it keeps as they are, and would keep without autocast.
        weights: those that it rounds and does not keep.
    """
    log = casting.log
    if log is None:
        return
    if jt.flags.no_grad:
        log.note(operation, dtype)
        return
    accounts = [_account(log)]
    while log.parent is not None:
        log = log.parent
        accounts.append(_account(log))
    ledger = _ledgers.setdefault(log, _Ledger())
    weight_bytes = 0
    if jt.flags.use_cuda:
        largest = max((HALF_BYTES * int(w.numel()) for w in weights), default=0)
        weight_bytes = max(largest - ledger.weight_bytes, 0)
        ledger.weight_bytes += weight_bytes
    casting.note(operation, dtype, half_bytes=weight_bytes, weight_bytes=weight_bytes)
    for x in whole:
        ledger.keep_whole(x)
    for x in halves:
        ledger.keep(x, holder, accounts)
