"""Tensors that are not kept, because elementwise operations make them of what is.

What a matmul reads is made by a kernel of its own before it, so Jittor would keep it although it
follows from what is packed, as GELU's output does from its input. It is made anew in backward, by
the same operations on what was unpacked.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem_jittor import native

_LEAVES = 64


@dataclass(eq=False)
class Recipe:
    """How a tensor is made of others.

    Attributes:
        number: of what is written down in C++.
        leaves: what it takes beside its inputs: parameters, small tensors.
        used: which of its inputs it takes.
    """

    number: int
    leaves: list[Any]
    used: list[bool]

    def follow(self, inputs: Sequence[Any]) -> Any:
        """Build the operations; of inputs that are not used, None will do."""
        addresses = [0 if v is None else v.var_ptr for v in inputs]
        with jt.flag_scope(no_grad=1):
            address = native.saving().xmem_jittor_follow(
                self.number,
                (ctypes.c_longlong * len(addresses))(*addresses),
                native.addresses(self.leaves)[0],
            )
            made = jt.wrap_var_addr(address).stop_fuse()
            native.saving().xmem_jittor_followed()
            return made


def recipe_of(
    target: Any, inputs: Sequence[Any], entries: Sequence[Any], first: int
) -> Recipe | None:
    """Return how a tensor is made of others, None if not by elementwise operations alone.

    Args:
        target: the tensor.
        inputs: the others.
        entries: what may not be read, unless it is among the others.
        first: tensors of nodes up to this one are taken as they are.
    """
    leaves = (ctypes.c_longlong * _LEAVES)()
    count = ctypes.c_int()
    used = (ctypes.c_int * max(len(inputs), 1))()
    number = native.saving().xmem_jittor_recipe(
        target.var_ptr,
        *native.addresses(inputs),
        *native.addresses(entries),
        first,
        leaves,
        _LEAVES,
        ctypes.byref(count),
        used,
    )
    if not number:
        return None
    held = [jt.wrap_var_addr(address) for address in leaves[: count.value]]
    recipe = Recipe(number, held, [bool(flag) for flag in used[: len(inputs)]])
    forgotten = weakref.finalize(recipe, native.saving().xmem_jittor_forget_recipe, number)
    forgotten.atexit = False
    return recipe


@dataclass(eq=False)
class Remade:
    """A tensor that is made anew.

    Attributes:
        recipe: how.
        sources: what it is made of: what unpacks (`keeping.Packed`, `Remade`), or tensors; None
            where the recipe takes nothing.
    """

    recipe: Recipe
    sources: list[Any]

    @classmethod
    def of(cls, recipe: Recipe, sources: Sequence[Any]) -> Remade:
        """Return it with the sources that the recipe takes."""
        return cls(
            recipe, [s if used else None for s, used in zip(sources, recipe.used, strict=True)]
        )

    @property
    def data(self) -> list[Any]:
        """The bytes that it is made of."""
        return [
            d for s in self.sources if s is not None and not isinstance(s, jt.Var) for d in s.data
        ]

    def unpacked(self, known: dict[int, Any] | None = None) -> Any:
        """Return the tensor.

        Args:
            known: by id of what unpacks, what it has been unpacked to; of tensors, what is read
                in their place.
        """
        known = {} if known is None else known
        inputs = []
        for source in self.sources:
            if source is not None and not isinstance(source, jt.Var):
                if id(source) not in known:
                    remade = isinstance(source, Remade)
                    known[id(source)] = source.unpacked(known) if remade else source.unpacked()
                inputs.append(known[id(source)])
            else:
                inputs.append(known.get(id(source), source))
        return self.recipe.follow(inputs)
