"""The inputs of a call that is packed: their handles hold views while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jittor as jt

from xmem_jittor.graph import maker_of
from xmem_jittor.keeping import Origin, known_origin, origin_of


class Entries:
    """Inputs that ask for gradients, and the views that the call reads in their place."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles
        self.changed: list[Any] = []
        self.views: dict[int, Any] = {}
        self.originals: dict[int, Any] = {}
        self.origins: dict[int, int] = {}  # by address of the view
        self.places: dict[int, Origin] = {}
        self.leaves: list[Any] = []
        for handle in handles:
            address = handle.var_ptr
            known = known_origin(handle)
            if known is not None:
                self.places[address] = known
            if address in self.views:
                continue
            view = handle.detach().start_grad()
            self.views[address] = view
            self.originals[address] = jt.wrap_var_addr(address)
            self.origins[view.var_ptr] = origin_of(handle)
            if not maker_of(address):  # nobody computed it: a batch, which lives anyway
                self.leaves.append(view)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the handles hold the views inside the block."""
        swapped = []
        for handle in self.handles:
            view = self.views[handle.var_ptr]
            other = jt.wrap_var_addr(view.var_ptr)
            handle.swap(other)
            swapped.append((handle, other, view.var_ptr))
        try:
            yield
        finally:
            for handle, other, address in swapped:
                if handle.var_ptr == address:
                    handle.swap(other)
                else:  # the call has assigned to it
                    self.changed.append(handle)
