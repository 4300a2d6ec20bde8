"""Which optimizers step inside backward, so that what needs all gradients at once is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from xmem.errors import CompositionError
from xmem.receipts import Receipt


@dataclass(frozen=True)
class _Applied:
    optimizer: weakref.ref[Any]
    parameters: frozenset[int]


_applied: list[_Applied] = []


def note(receipt: Receipt, optimizer: Any, parameters: Iterable[Any]) -> Receipt:
    """Remember an optimizer until the receipt is undone.

    Args:
        receipt: of the technique.
        optimizer: what steps in backward.
        parameters: its parameters.

    Returns:
        The receipt, whose `undo` also forgets.
    """
    entry = _Applied(weakref.ref(optimizer), frozenset(map(id, parameters)))
    _applied.append(entry)
    return replace(receipt, _undo=_forgetting(entry, receipt.undo))


def _forgetting(entry: _Applied, undo: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        undo()
        if entry in _applied:
            _applied.remove(entry)

    return run


def steps_in_backward(target: Any = None) -> bool:
    """Say whether an optimizer, or one of some parameters, steps in backward; or any, without."""
    _drop_dead()
    if target is None and _applied:
        gc.collect()  # parameters and what steps them hold one another
        _drop_dead()
    if not _applied or target is None:
        return bool(_applied)
    if any(entry.optimizer() is target for entry in _applied):
        return True
    if hasattr(target, "param_groups") or not isinstance(target, Iterable):
        return any(id(target) in entry.parameters for entry in _applied)
    if hasattr(target, "shape"):  # one parameter; a tensor is an iterable of rows
        return any(id(target) in entry.parameters for entry in _applied)
    # A generator would be used up here, and what it yields is looked at by whoever gets it.
    if not isinstance(target, (list, tuple, set, frozenset)):
        return False
    return any(id(p) in entry.parameters for p in target for entry in _applied)


def _drop_dead() -> None:
    _applied[:] = [entry for entry in _applied if entry.optimizer() is not None]


def check(what: str, target: Any = None) -> None:
    """Refuse what needs all gradients at once.

    Args:
        what: the function's name.
        target: the optimizer or the parameters it is about; None: any.

    Raises:
        CompositionError: the optimizer steps in backward.
    """
    if steps_in_backward(target):
        raise CompositionError(
            f"{what} needs the gradients of all parameters at once, and optimizer_in_backward steps"
            " each parameter and drops its gradient inside backward. Undo its receipt first, or"
            f" leave {what} out"
        )
