"""Modules whose parameters come when they run and go after it (PyTorch 2.13).

Such a module gets a class derived from its own, as PyTorch's parametrizations and FSDP2 do it: its
`forward` is then ours wherever it is called from, also where a checkpointed region recomputes it.
Copies and pickles are of the own class, with the values.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from xmem.errors import UsageError
from xmem_torch.forwards import reaches_own
from xmem_torch.streamed_calls import LAYER, StreamedLayer, lend, run
from xmem_torch.streamed_pieces import Piece, holding, piece_of, pieces_of

_OWN = "_xmem_streamed_own"


class Streamed:
    """What a module has beside its own class; see `streamed_class`."""

    _xmem_base: Any

    def __getattr__(self, name: str) -> Any:
        """Have a parameter on the device if it is read while the model runs."""
        found = self._xmem_base.__getattr__(self, name)
        own = self.__dict__.get(_OWN)
        piece = own.get(name) if own else None
        if piece is not None and not piece.here:
            lend(piece, self.__dict__[LAYER])
        return found

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        function = args[0] if args else kwargs["fn"]
        for p in (p for p in self.parameters() if piece_of(p)):
            like = torch.empty(0, dtype=p.dtype, device=p.device)
            made = function(like)
            if made.dtype != p.dtype or made.device != p.device or made.is_shared():
                raise UsageError(
                    f"{type(self).__name__} has parameters that are away (xmem.offload_parameters),"
                    " which cannot be converted or moved: call undo() of the receipt, convert, and"
                    " offload again"
                )
        return self._xmem_base._apply(self, *args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._xmem_base._save_to_state_dict(self, destination, prefix, keep_vars)
        own: dict[str, Piece] = self.__dict__.get(_OWN, {})
        for name, piece in own.items():
            if keep_vars and not piece.here:
                raise UsageError(
                    "state_dict(keep_vars=True) would hold parameters that are away"
                    " (xmem.offload_parameters): leave keep_vars out, or call undo() of the receipt"
                )
            p = self.__dict__["_parameters"][name]
            if p is not None and piece_of(p) is piece:
                destination[prefix + name] = piece.values_of(p)

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        own = [p for p in self.__dict__["_parameters"].values() if p is not None]
        if metadata.get("assign_to_params_buffers", False) and pieces_of(own):
            raise UsageError(
                "load_state_dict(assign=True) would exchange parameters that are away"
                " (xmem.offload_parameters): leave assign out, or call undo() of the receipt"
            )
        with holding(own):
            self._xmem_base._load_from_state_dict(self, state, prefix, metadata, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for p in self.__dict__["_parameters"].values():
            if p is not None and id(p) not in memo and piece_of(p) is not None:
                memo[id(p)] = copied(p)
        own = getattr(self._xmem_base, "__deepcopy__", None)
        if own is not None:
            return own(self, memo)
        made = self._xmem_base.__new__(self._xmem_base)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(_without(self.__dict__), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        found = list(self._xmem_base.__reduce_ex__(self, protocol))
        if found[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            found[:2] = _empty, (self._xmem_base, *found[1][1:])
        if isinstance(found[2], dict):
            found[2] = _without(found[2])
            found[2]["_parameters"] = {
                name: p if p is None or piece_of(p) is None else _for_pickle(p)
                for name, p in found[2]["_parameters"].items()
            }
        return tuple(found)


def streamed_class(base: Any) -> Any:
    """Return the class of a module of some class whose parameters come and go.

    Not kept in a table: a parametrized module has a class of its own, which refers to it.
    """
    for known in type.__subclasses__(base):
        if vars(known).get("_xmem_base") is base:
            return known

    # With the class in their closures: whoever has taken them before runs them after `end`, too.
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if reaches_own(self):  # what lies over our forward may run it later, or not at all
            return base.__call__(self, *args, **kwargs)
        return run(self, base.__call__, args, kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, base.forward, args, kwargs)

    names = {
        "_xmem_base": base,
        "__call__": call,
        "forward": functools.wraps(base.forward)(forward),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (Streamed, base), names)


def begin(module: Any, layer: StreamedLayer) -> None:
    """Let a module's parameters come and go from now on."""
    own = {name: piece_of(p) for name, p in module._parameters.items() if p is not None}
    vars(module)[LAYER] = layer
    vars(module)[_OWN] = {name: piece for name, piece in own.items() if piece is not None}
    kind: Any = type(module)
    module.__class__ = streamed_class(kind)


def end(module: Any) -> None:
    """Take that back; what has taken its forward meanwhile runs the plain one."""
    if vars(module).pop(LAYER, None) is not None:
        vars(module).pop(_OWN, None)
        module.__class__ = type(module)._xmem_base


def copied(parameter: Any) -> Any:
    """Return a parameter like one that is away, with its values."""
    piece = piece_of(parameter)
    assert piece is not None
    made = torch.nn.Parameter(piece.values_of(parameter), parameter.requires_grad)
    if parameter.grad is not None:
        made.grad = parameter.grad.clone()
    return made


def _empty(kind: Any, *args: Any) -> Any:
    """Make the object that is unpickled into."""
    return kind.__new__(kind, *args)


_pickled: Any = WeakTensorKeyDictionary()


def _for_pickle(parameter: Any) -> Any:
    """Return one copy for all the places where a pickle holds the parameter.

    The pickle keeps it alive meanwhile; the values are new each time that none is.
    """
    known = _pickled.get(parameter)
    made = None if known is None else known()
    if made is None:
        made = copied(parameter)
        made.grad = None
        _pickled[parameter] = weakref.ref(made)
    return made


def _without(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in (LAYER, _OWN)}
