"""The receipt that every applied technique gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from xmem.errors import XmemWarning


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Receipt:
    """What a technique was applied to.

    Attributes:
        technique: e.g. "checkpoint".
        backend: the backend's name.
        applied_to: how many layers or tensors it was applied to.
        names: their names, where they have any.
        expected_saving_bytes: what it should save, where that is known beforehand.
        measured_saving_bytes: what it saved, where it was measured.
        note: what a reader should know, e.g. why it was applied to nothing.
    """

    technique: str
    backend: str
    applied_to: int
    names: tuple[str, ...] = ()
    expected_saving_bytes: int | None = None
    measured_saving_bytes: int | None = None
    note: str = ""
    _undo: Callable[[], None] = field(default=_nothing, repr=False, compare=False)

    def undo(self) -> None:
        """Restore what was there before; a second call changes nothing."""
        self._undo()


def issue(receipt: Receipt) -> Receipt:
    """Tell the observers of a receipt, warn if it was applied to nothing, and return it."""
    from xmem.plugins import observers  # pluggy is slow to import and not needed before use()

    if receipt.applied_to == 0:
        warnings.warn(
            f"{receipt.technique} was applied to nothing. {receipt.note}".rstrip(),
            XmemWarning,
            stacklevel=3,
        )
    # Historic hooks keep what they are told; the undo would keep the model alive.
    observers.hook.xmem_applied.call_historic(kwargs={"receipt": replace(receipt, _undo=_nothing)})
    return receipt
