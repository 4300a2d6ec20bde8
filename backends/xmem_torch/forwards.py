"""Forwards that are replaced, and given back in any order (PyTorch 2.13).

What replaces a module's forward is the instance attribute `forward`, so that hooks and state_dict
stay as they are. An autocast block, a receipt and a measurement may each replace it, and the first
may end first: so the module keeps them in order, and whoever ends is left out of a chain that is
built anew.

Whatever else has set `forward` since is left where it is, and goes on running what it found there,
also what has been undone since: that warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xmem.errors import XmemWarning

Forward = Callable[..., Any]
Wrap = Callable[[Forward], Forward]

_ATTRIBUTE = "_xmem_forwards"


@dataclass(eq=False)
class _Layer:
    """One replacement: ours has `wrap`; one that was set past us only what was set."""

    wrap: Wrap | None
    forward: Forward


@dataclass(eq=False)
class _Forwards:
    """What replaces one module's forward, innermost first.

    Held by the module, which it refers to: a table of modules would keep them alive. A copy of the
    module runs its copy of the chain, and nothing can undo that, so a copy of this is empty.
    """

    base: Forward | None = None
    layers: list[_Layer] = field(default_factory=list)

    @property
    def set_last(self) -> Forward | None:
        """What was set last, None if nothing is left of it."""
        return self.layers[-1].forward if self.layers else None

    def __reduce__(self) -> Any:
        return _Forwards, ()

    def __deepcopy__(self, memo: Any) -> _Forwards:
        return _Forwards()


def replace_forward(module: Any, wrap: Wrap) -> Callable[[], None]:
    """Let a module run `wrap(forward)`; see `xmem.protocols.Checkpoint.replace_forward`."""
    held = module.__dict__.get(_ATTRIBUTE) or _Forwards()
    forward = module.forward
    layer = _Layer(wrap, wrap(forward))  # may refuse, and nothing has changed then
    own = _settle(module, held)
    if own is None:
        held.base, held.layers = forward, []
    elif own is not held.set_last:
        held.layers.append(_Layer(None, own))
    held.layers.append(layer)
    module.__dict__[_ATTRIBUTE] = held
    module.forward = layer.forward

    def undo() -> None:
        if layer in held.layers:
            _take_out(module, held, layer)

    return undo


def rebuild(module: Any) -> None:
    """Let what replaces a module's forward run its class's own, where that has changed since."""
    held = module.__dict__.get(_ATTRIBUTE)
    if held is None or getattr(held.base, "__self__", None) is not module:
        return
    if _settle(module, held) is held.set_last and all(layer.wrap for layer in held.layers):
        kind: Any = type(module)
        held.base = kind.forward.__get__(module)
        _build(module, held, 0)


def reaches_own(module: Any) -> bool:
    """Say whether what replaces a module's forward is all ours, and runs its class's own."""
    held = module.__dict__.get(_ATTRIBUTE)
    if held is None or module.__dict__.get("forward") is not held.set_last:
        return False
    own = getattr(held.base, "__func__", None) is type(module).forward
    return own and all(layer.wrap for layer in held.layers)


def _settle(module: Any, held: _Forwards) -> Any:
    """Return the `forward` that is set, and forget what has been taken off from above it."""
    own = module.__dict__.get("forward")
    for index, layer in enumerate(held.layers):
        if layer.forward is own:
            del held.layers[index + 1 :]
            break
    return own


def _take_out(module: Any, held: _Forwards, layer: _Layer) -> None:
    ours_on_top = _settle(module, held) is held.set_last
    if layer in held.layers:
        index = held.layers.index(layer)
        above = held.layers[index + 1 :]
        del held.layers[index]
        if not ours_on_top or any(other.wrap is None for other in above):
            warnings.warn(
                f"the forward of {type(module).__name__} has been set by something else since; that"
                " is left, and may still run what is undone now. Undo in the opposite order",
                XmemWarning,
                stacklevel=4,
            )
        if ours_on_top:
            _build(module, held, index)
    if not any(other.wrap for other in held.layers):
        module.__dict__.pop(_ATTRIBUTE, None)


def _build(module: Any, held: _Forwards, index: int) -> None:
    """Set the chain of what is left, new from a place on."""
    forward: Any = held.layers[index - 1].forward if index else held.base
    for layer in held.layers[index:]:
        if layer.wrap is not None:
            layer.forward = layer.wrap(forward)
        forward = layer.forward
    if held.layers:
        module.forward = forward
    else:
        module.__dict__.pop("forward", None)
