"""Blocks that are called one by one and recomputed together.

A segment of several blocks is one region, but a model calls its blocks itself, in a loop or through
a Sequential. This is for frameworks that compute at once and whose functions take objects that are
like tensors (PyTorch's `__torch_function__`). A block that does not end its segment does not run
when it is called: it returns a `Deferred`, and the next block adds itself to it. The last one runs
them all as one region. Whoever else reads a Deferred (a skip connection, a hook, a print) makes
what it needs run at once, as a region of its own: the result is right, and the segment is shorter
than asked for, which is warned of. An output inside a segment that somebody still holds is kept for
them, as without checkpointing.
"""

from __future__ import annotations

import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xmem.containers import as_in, rebuilt, snapshot
from xmem.errors import CompositionError, XmemWarning

Run = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], str], Any]
"""Calls a function as a region: (function, args, kwargs, name)."""

Versions = Callable[[Any], Hashable]
"""Returns what changes when a tensor in nested containers is changed in place."""


@dataclass(frozen=True)
class Before:
    """Stands, in the arguments of a link, for what the link before it returned.

    Attributes:
        path: the keys to take of it, one after the other.
    """

    path: tuple[Any, ...]


@dataclass(frozen=True)
class Link:
    """One call of a block that waits for its segment.

    Attributes:
        forward: the block's own forward.
        name: its path.
        inputs: its args and kwargs, with `Before` where the output of the link before comes in.
        called: the same with containers as they were when it was called.
        versions: of the tensors in them.
    """

    forward: Callable[..., Any]
    name: str
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    called: tuple[tuple[Any, ...], dict[str, Any]]
    versions: Hashable

    def arguments(self, versions: Versions) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the block was called with; its own containers, which it may fill.

        Raises:
            CompositionError: a tensor in it has been changed in place since.
        """
        if versions(self.called) != self.versions:
            raise _changed(f"an input of block {self.name!r}")
        found: tuple[tuple[Any, ...], dict[str, Any]] = as_in(self.inputs, self.called)
        return found

    def after(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], versions: Versions) -> Link:
        """Return the link with its arguments as they are when others before it have run."""
        return replace(self, inputs=inputs, called=snapshot(inputs), versions=versions(inputs))


@dataclass
class Chain:
    """Calls that will run as one region.

    Attributes:
        run: calls a function as a region.
        versions: tells whether a tensor has been changed in place.
        ambient: what the calls run under; all the same.
        links: the calls that have not run, in order.
        done: how many have run before them.
        last: the output of the last one that has run, while links wait for it.
        last_versions: of the tensors in it, when it was made.
        waiting: the Deferreds of this chain that still exist.
    """

    run: Run
    versions: Versions
    ambient: Hashable
    links: list[Link] = field(default_factory=list)
    done: int = 0
    last: Any = None
    last_versions: Hashable = None
    waiting: weakref.WeakSet[Deferred] = field(default_factory=weakref.WeakSet)

    def advance(self, position: int) -> None:
        """Run the links up to a position, and give its output to every Deferred that is left."""
        links, rest = self.links[: position - self.done], self.links[position - self.done :]
        readers: dict[int, list[Deferred]] = {}
        for deferred in self.waiting:
            if self.done < deferred._xmem_position <= position:
                readers.setdefault(deferred._xmem_position - self.done - 1, []).append(deferred)
        first = links[0]
        if self.last is not None and self.versions(self.last) != self.last_versions:
            raise _changed(f"an input of block {first.name!r}")
        (args, kwargs), *others = [link.arguments(self.versions) for link in links]
        waiting = [link.arguments(self.versions) for link in rest]
        args, kwargs = _bind(args, self.last), _bind(kwargs, self.last)
        if len(links) == 1:
            outputs = {0: self.run(first.forward, args, kwargs, first.name)}
        else:
            kept = tuple(sorted({*readers, len(links) - 1}))
            forwards = Forwards(tuple(link.forward for link in links), kept)
            found = self.run(
                forwards, [(args, kwargs), *others], {}, f"{first.name} to {links[-1].name}"
            )
            outputs = dict(zip(kept, found, strict=True))
        for index, deferreds in readers.items():
            for deferred in deferreds:
                deferred._xmem_settle(outputs[index])
        self.links = [
            link.after(inputs, self.versions) for link, inputs in zip(rest, waiting, strict=True)
        ]
        self.done = position
        self.last = outputs[len(links) - 1] if rest else None
        self.last_versions = self.versions(self.last) if rest else None


@dataclass(frozen=True)
class Forwards:
    """Runs the forwards of a segment, one after the other.

    Attributes:
        forwards: of the blocks.
        kept: the indices of the blocks whose outputs are returned.
    """

    forwards: tuple[Callable[..., Any], ...]
    kept: tuple[int, ...]

    def __call__(self, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
        """Call each forward with its arguments, in which `Before` stands for the last output."""
        output: Any = None
        outputs = []
        for index, (forward, (args, kwargs)) in enumerate(zip(self.forwards, calls, strict=True)):
            output = forward(*_bind(args, output), **_bind(kwargs, output))
            if index in self.kept:
                outputs.append(output)
        return outputs


def _changed(what: str) -> CompositionError:
    return CompositionError(
        f"{what} has been changed in place before its segment ran, which is when the last block of"
        " the segment is called. Use the operation that is not in place, clone first, or use the"
        " layout 'every'."
    )


def _bind(tree: Any, output: Any) -> Any:
    """Put the output of the link before where `Before` stands for it."""
    return _replaced(tree, Before, lambda place: _follow(output, place.path))


def _follow(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested containers with their leaves of exactly one type changed."""
    if type(tree) is kind:
        return change(tree)
    return rebuilt(tree, lambda part: _replaced(part, kind, change))


class Deferred:
    """Stands for the output of a block whose segment has not run.

    Reading anything of it makes the block run; it may then be used like its value, also as an
    argument of PyTorch's functions. It must not pretend to be of its value's class: PyTorch's C++
    asks isinstance, and would read it as the tensor that it is not.
    """

    __slots__ = (
        "__weakref__",
        "_xmem_chain",
        "_xmem_path",
        "_xmem_position",
        "_xmem_value",
    )

    def __init__(self, chain: Chain, position: int, path: tuple[Any, ...] = ()) -> None:
        self._xmem_chain: Chain | None = chain
        self._xmem_position = position
        self._xmem_path = path
        self._xmem_value: Any = None
        chain.waiting.add(self)

    def _xmem_settle(self, output: Any) -> None:
        self._xmem_value = _follow(output, self._xmem_path)
        self._xmem_chain = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_xmem"):
            raise AttributeError(name)
        return getattr(value_of(self, f"its attribute {name!r}"), name)

    def __getitem__(self, key: Any) -> Any:
        chain = self._xmem_chain
        if isinstance(key, (int, str)) and chain is not None:
            return Deferred(chain, self._xmem_position, (*self._xmem_path, key))
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
    chain, position = deferred._xmem_chain, deferred._xmem_position
    if chain is not None:
        if read:
            name = chain.links[position - chain.done - 1].name
            warnings.warn(
                f"a segment was cut short after block {name!r}: {read} is read before the next"
                " block of the segment is called. The result is the same, more is kept than asked"
                " for. End a segment there, or use the layout 'every'.",
                XmemWarning,
                stacklevel=3,
            )
        chain.advance(position)
    return deferred._xmem_value


def settled(tree: Any) -> Any:
    """Return the value with every Deferred in it, in containers too, replaced by what it is."""
    return _replaced(tree, Deferred, lambda deferred: value_of(deferred, "its value"))


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
    run: Run,
    ambient: Hashable,
    forward: Callable[..., Any],
    name: str,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    versions: Versions,
) -> Deferred:
    """Add the call of a block to the segment that its arguments come from, or begin one."""
    chain: Chain | None = None
    for deferred in deferreds_in(inputs):
        behind = deferred._xmem_chain
        if behind is None:
            continue
        newest = deferred._xmem_position == behind.done + len(behind.links)
        if newest and behind.ambient == ambient and chain in (None, behind):
            chain = behind
        else:
            value_of(deferred, "its value")
    if chain is None:
        chain = Chain(run, versions, ambient)

    def bind(deferred: Deferred) -> Any:
        if deferred._xmem_chain is chain:
            return Before(deferred._xmem_path)
        return value_of(deferred)

    inputs = _replaced(inputs, Deferred, bind)
    called = snapshot(inputs)
    chain.links.append(Link(forward, name, inputs, called, versions(called)))
    return Deferred(chain, chain.done + len(chain.links))
