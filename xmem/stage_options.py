"""The ways to keep what a stage's backward reads that can be executed, by the names of options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xmem.codec import BITS
from xmem.errors import CapabilityError
from xmem.offload.depot import TO, To
from xmem.planner.schedule import Op
from xmem.saving import Choice

if TYPE_CHECKING:
    from xmem.offload.stages import Depots

AS_IS = Choice(None)


def packed_option(bits: int) -> str:
    """Return the name of the option that packs what a stage keeps into a number of bits."""
    return f"{bits} bits"


def offload_option(to: To) -> str:
    """Return the name of the option that moves what a stage keeps off the device."""
    return f"offload to {to}"


def choice_of(op: Op, options: Sequence[Sequence[str]] | None, depots: Depots) -> Choice:
    """Return what becomes of what an operation keeps."""
    if op.code != "G" or op.option == 0:
        return AS_IS
    named = options[op.index] if options else ()
    name = named[op.option] if op.option < len(named) else f"option {op.option}"
    for bits in BITS:
        if name == packed_option(bits):
            return Choice(bits)
    for to in TO:
        if name == offload_option(to):
            return Choice(None, away=depots.away(to))
    valid = ", ".join([*map(packed_option, BITS), *map(offload_option, TO)])
    raise CapabilityError(
        f"{op} keeps stage {op.index} by option {op.option}, {name!r}; what can be executed is"
        f" option 0, keep all, and {valid}"
    )
