"""What a call leaves for its backward: found, packed, taken out of memory and given back.

A backward that is built and never run tells what it reads (`native/saving.cc` finds where keeping
that takes least). Operations behind the forward pack those tensors and take their memory away, and
operations before the backward, which it waits for, give it back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jittor as jt

from xmem_jittor import native
from xmem_jittor.emptying import Emptied, empty_views, refill, views_before
from xmem_jittor.graph import newest_node
from xmem_jittor.keeping import Packed
from xmem_jittor.late import Noted, Stays, note_views, take_back
from xmem_jittor.ordering import after, anchor
from xmem_jittor.regions import Feed
from xmem_jittor.remaking import Remade
from xmem_jittor.segments import inside
from xmem_jittor.trial import trial

EXACT, GIVEN, REMAKE = 1, 2, 3
"""Kinds of what is cut, beside 0: compared in backward; held anyway; made of the others again."""

Cut = Sequence[tuple[Any, int]]
Keep = Callable[[Any, int, list[Any], list[Any]], Packed | Remade | Stays | None]


@dataclass(eq=False)
class Kept:
    """A tensor without memory.

    Attributes:
        packed: what it comes back from.
        emptied: the memory that it has lost, or may lose.
    """

    packed: Packed | Remade | Stays
    emptied: Emptied | Noted

    def unpacked(self, known: dict[int, Any]) -> Any:
        """Return the tensor as it comes back.

        Args:
            known: by id of what they were packed in, what has been unpacked.
        """
        if id(self.packed) not in known:
            packed = self.packed
            if isinstance(packed, Remade):
                known[id(packed)] = packed.unpacked(known)
            else:
                known[id(packed)] = packed.unpacked()
        return known[id(self.packed)]


def handles_between(first: int, newest: int, ignored: Sequence[Any]) -> list[Any]:
    """Return the Python objects that hold tensors of nodes after `first` up to `newest`."""
    capacity = 64
    while True:
        objects = (ctypes.c_longlong * capacity)()
        count = native.saving().xmem_jittor_held(first, newest, id(jt.Var), objects, capacity)
        if count <= capacity:
            break
        capacity = count
    left_out = {id(v) for v in ignored}
    return [
        ctypes.cast(address, ctypes.py_object).value
        for address in objects[:count]
        if address not in left_out
    ]


def cut(
    outputs: Sequence[Any],
    targets: Sequence[Any],
    *,
    entries: Sequence[Any],
    given: Sequence[Any],
    first: int,
) -> Cut:
    """Return what is to be kept for the backward of a call, with its kind.

    Args:
        outputs: where its graph begins.
        targets: where that ends.
        entries: its inputs.
        given: what is held anyway.
        first: the newest node before it.
    """
    newest = newest_node()
    with trial(), inside(), jt.flag_scope(no_grad=0):
        fed = [jt.empty(v.shape, v.dtype) for v in outputs]
        made = jt.grad(Feed(fed)(*outputs), targets, retain_graph=True)
        capacity = 128
        while True:
            found = (ctypes.c_longlong * capacity)()
            kinds = (ctypes.c_int * capacity)()
            count = native.saving().xmem_jittor_cut(
                *native.addresses(made),
                *native.addresses(fed),
                *native.addresses(entries),
                *native.addresses(given),
                first,
                newest,
                found,
                kinds,
                capacity,
            )
            if count <= capacity:
                break
            capacity = count
        return [
            (jt.wrap_var_addr(address), kind)
            for address, kind in zip(found[:count], kinds[:count], strict=True)
        ]


def pack(
    found: Cut, keep: Keep, *, ends: Sequence[Any], waits: Sequence[Any]
) -> tuple[list[Kept], list[Any], list[Any]]:
    """Pack what was cut, and let it lose its memory.

    Args:
        found: what was cut.
        keep: returns what a tensor of a kind comes back from, given what was kept before it and
            what that comes from; None where it is kept as it is.
        ends: what keeps its memory, with all that is made of it.
        waits: what is there before memory goes.

    Returns:
        what is packed; what others may be made of; what those come back from.
    """
    behind = anchor()
    for wait in waits:
        behind = after(behind, wait)
    packed: list[Kept] = []
    inputs: list[Any] = []
    sources: list[Any] = []
    for var, kind in found:
        kept = keep(var, kind, inputs, sources)
        # Also what is remade: what follows from it would read it, or a view, after it was emptied.
        inputs.append(var)
        sources.append(var if kept is None else kept)
        if kept is not None:
            done = behind
            for data in kept.data:
                done = after(done, data)
            if isinstance(kept, Stays):
                kept.noted = note_views(views_before(var, ends), done, kept.depot)
                packed.append(Kept(kept, kept.noted))
            else:
                packed.append(Kept(kept, empty_views(var, ends, done)))
    return packed, inputs, sources


def give_back(packed: Sequence[Kept], known: dict[int, Any] | None = None) -> Any:
    """Give memory back; returns what the readers wait for, None where nothing was packed.

    Args:
        packed: what was packed.
        known: by id, what is read in the place of tensors that others are made of.
    """
    known = {} if known is None else known
    done = None
    for kept in reversed(packed):
        emptied = kept.emptied
        if done is not None:
            emptied = replace(emptied, done=after(emptied.done, done))
        if isinstance(emptied, Noted):
            done = take_back(emptied)
        else:
            done = refill(emptied, kept.unpacked(known))
    return done
