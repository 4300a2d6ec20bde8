"""Which part of a parameter this rank holds: a note on the tensor's handle.

| kind | on this rank | its gradient |
| --- | --- | --- |
| "owned" | the whole on its owner, elsewhere a placeholder | is added up on the owner |
| "part" | a slice along an axis, of equal size on all ranks | is its own |
| "averaged" | the whole, beside others that are owned | is averaged like a data-parallel one |
| "equal" | the whole, on every rank computed alike | is as it should be |

The note outlives updates, which give a handle another tensor. An optimizer that holds such
parameters is not averaged by Jittor (`gradients.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from xmem.errors import CompositionError

_NOTE = "_xmem_share"


@dataclass(frozen=True)
class Share:
    """What a rank holds of a parameter.

    Attributes:
        kind: see the module.
        shape: of the whole.
        dtype: its type.
        owner: the rank that holds it, if it is owned.
        axis: along which it is cut, if this is a part.
    """

    kind: Literal["owned", "part", "averaged", "equal"]
    shape: tuple[int, ...]
    dtype: str
    owner: int | None = None
    axis: int | None = None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the whole; what is shared is in float32."""
        return 4 * math.prod(self.shape)


def mark(parameter: Any, share: Share) -> None:
    """Note what a handle holds."""
    setattr(parameter, _NOTE, share)


def unmark(parameter: Any) -> None:
    """Take the note off."""
    vars(parameter).pop(_NOTE, None)


def of(parameter: Any) -> Share | None:
    """Return what is noted, or None for a parameter like any other."""
    found: Share | None = getattr(parameter, _NOTE, None)
    return found


def kinds(parameters: Iterable[Any]) -> frozenset[str]:
    """Return the kinds that are among parameters."""
    return frozenset(share.kind for p in parameters if (share := of(p)) is not None)


def refuse_owned(model: Any, what: str) -> None:
    """Refuse what computes blocks in an order of its own, which ranks may not share.

    Args:
        model: a module, or anything else, of which nothing is known.
        what: what that is, at the beginning of a sentence.

    Raises:
        CompositionError: the model's parameters are gathered around its passes only.
    """
    parameters = getattr(model, "parameters", None)
    if callable(parameters) and "owned" in kinds(parameters()):
        raise CompositionError(
            f"{what} computes blocks of {type(model).__name__} in an order of its own, and ranks"
            " that measured other times would gather parameters in another: it is sharded"
            ' (shard_model). Use xmem.apply_checkpointing(model, "every") there'
        )


def is_apart(parameter: Any) -> bool:
    """Say whether ranks hold different numbers of it, so that a norm is summed over ranks."""
    share = of(parameter)
    return share is not None and share.kind in ("owned", "part")
