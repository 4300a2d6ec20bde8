"""What a stage of a plan keeps for its backward, packed or in a depot.

Its inputs are the plan's business, its output is held as a value, and what else Python holds of it
(running statistics, attributes) is not taken away either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from xmem.codec import DTYPES
from xmem.compressing import MIN_BYTES, next_seed
from xmem.saving import Choice
from xmem_jittor import codec, native
from xmem_jittor.away import Stored
from xmem_jittor.graph import newest_node, reached
from xmem_jittor.keeping import Packed
from xmem_jittor.ordering import after
from xmem_jittor.packing import EXACT, GIVEN, REMAKE, Kept, cut, give_back, handles_between, pack
from xmem_jittor.remaking import Remade, recipe_of
from xmem_jittor.softmax import keeping_outputs
from xmem_jittor.trial import noting_kept


@contextmanager
def keeping_little() -> Iterator[list[Any]]:
    """Let a stage keep inside the block what is packed best.

    Yields the handles that its operations keep for their own backward.
    """
    native.saving()
    with keeping_outputs(), noting_kept() as own:
        yield own


def pack_stage(
    output: Any,
    inputs: Sequence[Any],
    reads: Sequence[Any],
    *,
    first: int,
    choice: Choice,
    own: Sequence[Any],
) -> list[Kept]:
    """Pack what the backward of a stage will read.

    Args:
        output: of the stage.
        inputs: where its graph ends.
        reads: the same for what it reads beside them.
        first: the newest node before all of these.
        choice: packed, or to a depot.
        own: handles of its operations.
    """
    ends = [v for v in (*inputs, *reads) if v.dtype.is_float() and not v.is_stop_grad()]
    targets = [v for v, flows in zip(ends, reached([output], ends), strict=True) if flows]
    if not targets:
        return []
    held = handles_between(first, newest_node(), own)
    entries = list({v.var_ptr: v for v in (*inputs, *reads)}.values())
    found = cut([output], targets, entries=entries, given=[output, *held], first=first)
    stage = _Stage(entries, first, choice)
    entered = {v.var_ptr for v in entries}
    waits = {v.var_ptr: v for v in (output, *held) if v.var_ptr not in entered}
    return pack(found, stage.keep, ends=[output], waits=list(waits.values()))[0]


def give_stage_back(packed: Sequence[Kept], value: Any, remade: Mapping[int, Any]) -> list[Any]:
    """Give a stage's memory back; returns what its backward waits for.

    Args:
        packed: what was packed of it.
        value: is there when its forward has run.
        remade: by address of inputs that lost their memory, what they are now.
    """
    known: dict[int, Any] = {}
    for kept in packed:
        for source in kept.packed.sources if isinstance(kept.packed, Remade) else ():
            if source is not None and not isinstance(source, (Packed, Remade)):
                # What is made of it must not be fused with the forward, which reads it, too.
                known[id(source)] = after(remade.get(source.var_ptr, source), value)
    done = give_back(packed, known)
    return [] if done is None else [done]


class _Stage:
    """Says what a tensor of a stage comes back from."""

    def __init__(self, entries: Sequence[Any], first: int, choice: Choice) -> None:
        self._entries = entries
        self._entered = {v.var_ptr for v in entries}
        self._first = first
        self._choice = choice

    def keep(
        self, var: Any, kind: int, inputs: list[Any], sources: list[Any]
    ) -> Packed | Remade | None:
        """See `packing.pack`."""
        if var.var_ptr not in self._entered:
            var.stop_fuse()
        away = self._choice.away
        if kind == GIVEN or var.nbytes < MIN_BYTES or (kind == EXACT and away is None):
            return None
        if kind == REMAKE:
            recipe = recipe_of(var, inputs, self._entries, self._first)
            if recipe is not None and any(recipe.used):
                return Remade.of(recipe, sources)
        shape, dtype = tuple(int(size) for size in var.shape), str(var.dtype)
        if away is not None:
            stored = Stored(var, away)
            return Packed([stored.done], shape, dtype, None, stored)
        if dtype == "bool":
            return Packed([codec.pack_bits(var)], shape, dtype, 1)
        bits = self._choice.bits
        if dtype not in DTYPES or bits is None:
            return None
        return Packed([codec.pack(var, bits, next_seed())], shape, dtype, bits)
