"""The backward of a call whose insides are packed: give memory back, then differentiate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jittor as jt

from xmem_jittor import notices
from xmem_jittor.differentiate import differentiate
from xmem_jittor.emptying import Emptied
from xmem_jittor.graph import refuse_second_derivatives
from xmem_jittor.ordering import after
from xmem_jittor.packing import Kept, give_back
from xmem_jittor.remaking import Remade
from xmem_jittor.segments import inside


@dataclass(eq=False)
class Unit:
    """What a call leaves for backward: its graph and what is packed of it.

    Attributes:
        name: what errors call it.
        outputs: where its graph begins.
        targets: where it ends.
        flags: of Jittor, in the call.
        kept: what is packed.
        remade: what later calls may make of that.
        emptied: the outputs whose memory backward does not need.
        places: of the outputs on the tape.
        spent: its gradients have been handed out.
    """

    name: str
    outputs: list[Any]
    targets: list[Any]
    flags: dict[str, int]
    kept: list[Kept] = field(default_factory=list)
    remade: list[Remade] = field(default_factory=list)
    emptied: list[Emptied] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    spent: bool = False

    def backward(self, *gradients: Any) -> list[Any]:
        """Give back what was packed and differentiate."""
        if self.spent:
            notices.refuse_unpacked_twice(self.name)
        self.spent = True
        notices.warn_if_waited_for(self.outputs)
        with inside(), jt.flag_scope(no_grad=0, lazy_execution=1, **self.flags):
            done = give_back(self.kept)
            fed = [
                None if g is None else g.detach() if done is None else after(g, done)
                for g in gradients
            ]
            found = differentiate(self.outputs, fed, self.targets, gated=False)
            places = [p for p, g in zip(self.places, gradients, strict=True) if g is not None]
            self.outputs, self.targets, self.kept, self.remade, self.emptied = [], [], [], [], []
            if not places:
                return found
            return refuse_second_derivatives(
                found, gradients, places[0], notices.refuse_unpacked_twice_differentiated
            )
