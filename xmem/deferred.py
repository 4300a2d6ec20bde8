"""Blocks that are called one by one and recomputed together.

A segment of several blocks is one region, but a model calls its blocks itself, in a loop or through
a Sequential. This is for frameworks that compute at once and whose functions take objects that are
like tensors (PyTorch's `__torch_function__`). A block that does not end its segment does not run
when it is called: it returns a `Deferred`, and the next block adds itself to it. The last one runs
them all as one region. Whoever else reads a Deferred (a skip connection, a hook, a print) makes
what it needs run at once, as a region of its own: the result is right, and the segment is shorter
than asked for, which is warned of. An output inside a segment that somebody still holds is kept for
them, as without checkpointing. A Deferred that goes unread runs its block too, when it is dropped:
the block may draw random numbers, update statistics or fill a list.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from xmem.containers import snapshot
from xmem.errors import CompositionError, XmemWarning
from xmem.pending import Before, Call, Flags, Inputs, Pending, Setting, follow, replaced


class Deferred:
    """Stands for the output of a block whose segment has not run.

    Reading anything of it makes the block run; it may then be used like its value, also as an
    argument of PyTorch's functions. It must not pretend to be of its value's class: PyTorch's C++
    asks isinstance, and would read it as the tensor that it is not.
    """

    __slots__ = (
        "__weakref__",
        "_xmem_path",
        "_xmem_pending",
        "_xmem_position",
        "_xmem_value",
    )

    def __init__(self, pending: Pending, position: int, path: tuple[Any, ...] = ()) -> None:
        self._xmem_pending: Pending | None = pending
        self._xmem_position = position
        self._xmem_path = path
        self._xmem_value: Any = None
        pending.waiting[id(self)] = self

    def _xmem_settle(self, output: Any) -> None:
        self._xmem_value = follow(output, self._xmem_path)
        self._xmem_pending = None

    def __del__(self) -> None:
        pending = getattr(self, "_xmem_pending", None)
        if pending is not None and not sys.is_finalizing():
            try:
                pending.dropped(self)
            except CompositionError as error:  # what is raised here is printed and lost
                warnings.warn(str(error), XmemWarning, stacklevel=2)

    def __copy__(self) -> Any:
        return copy.copy(value_of(self, "a copy of it"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(value_of(self, "a copy of it"), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return value_of(self, "a copy of it").__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_xmem"):
            raise AttributeError(name)
        return getattr(value_of(self, f"its attribute {name!r}"), name)

    def __getitem__(self, key: Any) -> Any:
        pending = self._xmem_pending
        if isinstance(key, (int, str)) and pending is not None:
            return Deferred(pending, self._xmem_position, (*self._xmem_path, key))
        return value_of(self, "a part of it")[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(value_of(self, "its parts"))

    def __len__(self) -> int:
        return len(value_of(self, "its length"))

    def __bool__(self) -> bool:
        return bool(value_of(self, "its truth"))

    def __float__(self) -> float:
        return float(value_of(self, "its number"))

    def __repr__(self) -> str:
        return repr(value_of(self, "its text"))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return value_of(self, "its values").__array__(*args, **kwargs)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let PyTorch's functions take it: PyTorch's protocol for what is like a tensor."""
        return function(*settled(args), **settled(kwargs or {}))


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_COMPARING = ("lt", "le", "gt", "ge", "eq", "ne")
_BINARY = (*_ARITHMETIC, *_BITWISE, *_COMPARING)
_UNARY = ("neg", "pos", "abs", "invert")


def _add_operators() -> None:
    """Give Deferred the operators of its value, in both orders."""
    for name in _BINARY:
        base = getattr(operator, name, None) or getattr(operator, f"{name}_")

        def forwards(self: Deferred, other: Any, base: Any = base) -> Any:
            return base(value_of(self, "its value"), settled(other))

        def backwards(self: Deferred, other: Any, base: Any = base) -> Any:
            return base(settled(other), value_of(self, "its value"))

        setattr(Deferred, f"__{name}__", forwards)
        if name not in _COMPARING:
            in_place = getattr(operator, f"i{name}")
            setattr(Deferred, f"__r{name}__", backwards)
            setattr(Deferred, f"__i{name}__", functools.partialmethod(forwards, base=in_place))
    for name in _UNARY:
        base = getattr(operator, name)

        def alone(self: Deferred, base: Any = base) -> Any:
            return base(value_of(self, "its value"))

        setattr(Deferred, f"__{name}__", alone)


_add_operators()


def value_of(deferred: Deferred, read: str = "") -> Any:
    """Return what a Deferred stands for; the blocks behind it run now, if they have not.

    Args:
        deferred: the placeholder.
        read: what of it is read, for the warning that a segment is cut short; "" for none.
    """
    pending, position = deferred._xmem_pending, deferred._xmem_position
    if pending is not None:
        if read:
            name = pending.calls[position - pending.done - 1].name
            warnings.warn(
                f"a segment was cut short after block {name!r}: {read} is read before the next"
                " block of the segment is called. The result is the same, more is kept than asked"
                " for. End a segment there, or use the layout 'every'.",
                XmemWarning,
                stacklevel=3,
            )
        pending.advance(position)
    return deferred._xmem_value


def settled(tree: Any) -> Any:
    """Return the value with every Deferred in it, in containers too, replaced by what it is."""
    return replaced(tree, Deferred, lambda deferred: value_of(deferred, "its value"))


def deferreds_in(tree: Any) -> list[Deferred]:
    """Return the Deferreds in nested containers."""
    if type(tree) is Deferred:
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [deferred for part in tree for deferred in deferreds_in(part)]


def extended(
    setting: Setting, forward: Callable[..., Any], name: str, flags: Flags, inputs: Inputs
) -> Deferred:
    """Add the call of a block to the segment that its arguments come from, or begin one."""
    pending: Pending | None = None
    for deferred in deferreds_in(inputs):
        behind = deferred._xmem_pending
        if behind is None:
            continue
        newest = deferred._xmem_position == behind.newest
        if newest and behind.setting.key == setting.key and pending in (None, behind):
            pending = behind
        else:
            value_of(deferred, "its value")
    if pending is None:
        pending = Pending(setting)

    def bind(deferred: Deferred) -> Any:
        if deferred._xmem_pending is pending:
            return Before(deferred._xmem_path)
        return value_of(deferred)

    inputs = replaced(inputs, Deferred, bind)
    called = snapshot(inputs)
    pending.calls.append(Call(forward, name, flags, inputs, called, setting.versions(called)))
    return Deferred(pending, pending.newest)
