"""Views of parameters that one pass reads in place of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jittor as jt

from xmem_jittor.graph import handles_of


class OwnViews:
    """Let all handles of parameters hold views of them inside the block.

    Jittor fuses operations that read the same tensor; those of other passes, of an optimizer or of
    a module that shares a parameter would run together with this one's.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        addresses = list(dict.fromkeys(p.var_ptr for p in parameters))
        self._held = handles_of(addresses)
        self._views = [handles[0].detach().start_grad() for handles in self._held]
        self._by_address = {
            view.var_ptr: handles for view, handles in zip(self._views, self._held, strict=True)
        }
        self._swapped: list[tuple[Any, Any]] = []

    def __enter__(self) -> OwnViews:
        for view, handles in zip(self._views, self._held, strict=True):
            for handle in handles:
                other = jt.wrap_var_addr(view.var_ptr)
                handle.swap(other)
                self._swapped.append((handle, other))
        return self

    def __exit__(self, *_: object) -> None:
        for handle, other in self._swapped:
            if handle.var_ptr in self._by_address:  # else the function has assigned to it
                handle.swap(other)
        self._swapped = []

    @property
    def views(self) -> list[Any]:
        """Return the views, of distinct parameters in the order in which they were given."""
        return list(self._views)

    def handles(self, address: int) -> list[Any] | None:
        """Return the handles of the parameter that a tensor, by address, is the view of."""
        return self._by_address.get(address)

    def of(self, var: Any) -> Any:
        """Return the view where a function returned a handle that has its parameter back."""
        for view, handles in zip(self._views, self._held, strict=True):
            if any(var is handle for handle in handles):
                return view
        return var
