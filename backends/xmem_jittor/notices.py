"""What checkpointing on Jittor says to people: refusals and warnings."""

from __future__ import annotations

import warnings
from typing import NoReturn

import jittor as jt

from xmem.errors import CompositionError, XmemWarning

_EAGER = (
    "jt.flags.lazy_execution is 0, which keeps every tensor that Python sees. Checkpointed regions"
    " run lazily all the same, or they would save nothing; whatever is outside of them is kept. Set"
    " jt.flags.lazy_execution = 1 for training."
)

_eager_told = False


def refuse_twice(name: str) -> NoReturn:
    """Say that a region's gradients come once."""
    raise CompositionError(
        f"gradients were asked for twice through the checkpointed {name!r}. It gives its inputs"
        " back in the first backward; compute the loss again, or call jt.grad once for all targets."
    )


def refuse_twice_differentiated() -> None:
    """Say that second derivatives are not to be had."""
    raise CompositionError(
        "second derivatives were asked for through a checkpointed region. It is differentiated"
        " once and keeps nothing for a second time; take checkpointing off what you differentiate"
        " twice (receipt.undo())."
    )


def warn_if_eager() -> None:
    """Say, once, that tensors outside of regions are kept."""
    global _eager_told
    if not jt.flags.lazy_execution and not _eager_told:
        _eager_told = True
        warnings.warn(_EAGER, XmemWarning, stacklevel=3)


def warn_cut_short(name: str) -> None:
    """Say that blocks of one segment are recomputed apart."""
    warnings.warn(
        f"a segment was cut short after block {name!r}: the next block of the segment was not"
        " called with what it returned. The result is the same, more is kept than asked for. End a"
        " segment there, or use the layout 'every'.",
        XmemWarning,
        stacklevel=3,
    )
