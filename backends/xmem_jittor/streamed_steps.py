"""Which parameters are away, for whoever steps: a note on the tensor's handle.

It outlives updates, which give a handle another tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xmem.errors import CompositionError
from xmem_jittor.masters import parameters_of

_NOTE = "_xmem_streamed"


def _nobody() -> None:
    return None


_stepped: list[frozenset[int]] = []
_steps: weakref.WeakSet[Any] = weakref.WeakSet()


def note(parameter: Any, streaming: Any) -> None:
    """Note on a handle who streams it, or that nobody does any more."""
    if streaming is not None:
        # Weakly: whoever streams it holds it, and Python collects no cycles through tensors.
        setattr(parameter, _NOTE, weakref.ref(streaming))
    elif hasattr(parameter, _NOTE):
        delattr(parameter, _NOTE)


def noted(parameter: Any) -> Any:
    """Return who streams a parameter; also while it has a value that is not stored yet."""
    return getattr(parameter, _NOTE, _nobody)()


@contextmanager
def stepping(parameters: Sequence[Any]) -> Iterator[None]:
    """Let a step update these parameters inside the block."""
    _stepped.append(frozenset(id(p) for p in parameters))
    try:
        yield
    finally:
        _stepped.pop()


def let_step(optimizer: Any, *, steps: bool) -> None:
    """Note that an optimizer's own step takes parameters block by block, or does so no more."""
    (_steps.add if steps else _steps.discard)(optimizer)


def refuse_step(optimizer: Any) -> None:
    """Refuse to update parameters that are away all at once.

    Raises:
        CompositionError: that is what the optimizer is about to do.
    """
    if optimizer in _steps:
        return
    allowed = frozenset[int]().union(*_stepped)
    held = [p for group in parameters_of(optimizer) for p in group]
    away = [p for p in held if id(p) not in allowed and noted(p) is not None]
    if away:
        raise CompositionError(
            f"{len(away)} of the {len(held)} parameters of this {type(optimizer).__name__} are away"
            " (offload_parameters); its step would have all of them on the device at once. Call"
            " xmem.offload_optimizer(optimizer) first: its steps take them block by block"
        )
