"""Calls of blocks that wait for the last block of their segment.

See `xmem.deferred` for the placeholders that stand for what they will return.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from xmem.containers import as_in, rebuilt, snapshot
from xmem.errors import CompositionError
from xmem.mismatch import as_they_were

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

Flags = tuple[tuple[Any, bool], ...]
"""Modules and whether they were in training mode."""


@dataclass(frozen=True)
class Setting:
    """What blocks are called under, taken when they are called.

    Attributes:
        run: calls a function as a region: (function, args, kwargs, name).
        versions: returns what changes when a tensor in nested containers is changed in place.
        key: calls under equal ones may run as one region.
        again: enters the precision and the gradient mode of the call, whatever is in force when
            its output is read.
    """

    run: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], str], Any]
    versions: Callable[[Any], Hashable]
    key: Hashable
    again: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Before:
    """Stands, in the arguments of a call, for what the call before it returned.

    Attributes:
        path: the keys to take of it, one after the other.
    """

    path: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """One call of a block that waits for its segment.

    Attributes:
        forward: the block's own forward.
        name: its path.
        flags: the training modes of its modules.
        inputs: its args and kwargs, with `Before` where the output of the call before comes in.
        called: the same with containers as they were when it was called.
        versions: of the tensors in them.
    """

    forward: Callable[..., Any]
    name: str
    flags: Flags
    inputs: Inputs
    called: Inputs
    versions: Hashable

    def arguments(self, versions: Callable[[Any], Hashable]) -> Inputs:
        """Return what the block was called with; its own containers, which it may fill.

        Raises:
            CompositionError: a tensor in it has been changed in place since.
        """
        if versions(self.called) != self.versions:
            raise _changed(f"an input of block {self.name!r}")
        found: Inputs = as_in(self.inputs, self.called)
        return found

    def after(self, inputs: Inputs, versions: Callable[[Any], Hashable]) -> Call:
        """Return the call with its arguments as they are when others before it have run."""
        return replace(self, inputs=inputs, called=snapshot(inputs), versions=versions(inputs))


class Waiting(Protocol):
    """A placeholder for the output of a call, or for a part of it."""

    _xmem_position: int

    def _xmem_settle(self, output: Any) -> None: ...


@dataclass
class Pending:
    """Calls that will run as one region.

    Attributes:
        setting: what they were called under; all the same.
        calls: those that have not run, in order.
        done: how many have run before them.
        last: the output of the last one that has run, while calls wait for it.
        last_versions: of the tensors in it, when it was made.
        failed: running them has raised an error, or is under way.
        waiting: the placeholders that still exist, by id; asking whether two are equal reads them.
    """

    setting: Setting
    calls: list[Call] = field(default_factory=list)
    done: int = 0
    last: Any = None
    last_versions: Hashable = None
    failed: bool = False
    waiting: weakref.WeakValueDictionary[int, Any] = field(
        default_factory=weakref.WeakValueDictionary
    )

    @property
    def newest(self) -> int:
        """The position of the last call."""
        return self.done + len(self.calls)

    def advance(self, position: int) -> None:
        """Run the calls up to a position, and give their outputs to the placeholders left."""
        self.failed = True  # until it is known to have succeeded
        versions = self.setting.versions
        count = position - self.done
        calls, rest = self.calls[:count], self.calls[count:]
        readers: dict[int, list[Waiting]] = {}
        for placeholder in self.waiting.values():
            if self.done < placeholder._xmem_position <= position:
                index = placeholder._xmem_position - self.done - 1
                readers.setdefault(index, []).append(placeholder)
        if self.last is not None and versions(self.last) != self.last_versions:
            raise _changed(f"an input of block {calls[0].name!r}")
        inputs = [call.arguments(versions) for call in calls]
        waiting = [call.arguments(versions) for call in rest]
        outputs = self._run(calls, inputs, tuple(sorted({*readers, count - 1})))
        for index, placeholders in readers.items():
            for placeholder in placeholders:
                placeholder._xmem_settle(outputs[index])
        self.calls = [call.after(i, versions) for call, i in zip(rest, waiting, strict=True)]
        self.done = position
        self.last = outputs[count - 1] if rest else None
        self.last_versions = versions(self.last) if rest else None
        self.failed = False

    def dropped(self, placeholder: Waiting) -> None:
        """Run what only a placeholder that nobody has read was waiting for."""
        position = placeholder._xmem_position
        self.waiting.pop(id(placeholder), None)
        others = any(other._xmem_position == position for other in self.waiting.values())
        if position == self.newest and not others and not self.failed:
            self.advance(position)

    def _run(
        self, calls: list[Call], inputs: list[Inputs], kept: tuple[int, ...]
    ) -> dict[int, Any]:
        """Run calls as one region; returns the outputs that are kept, by index."""
        (args, kwargs), *others = inputs
        args, kwargs = bind(args, self.last), bind(kwargs, self.last)
        first, run = calls[0], self.setting.run
        with self.setting.again():
            if len(calls) == 1:
                with as_they_were(first.flags, "training"):
                    found = [run(first.forward, args, kwargs, first.name)]
            else:
                forwards = Forwards(
                    tuple(call.forward for call in calls), tuple(call.flags for call in calls), kept
                )
                name = f"{first.name} to {calls[-1].name}"
                found = run(forwards, [(args, kwargs), *others], {}, name)
        return dict(zip(kept, found, strict=True))


@dataclass(frozen=True)
class Forwards:
    """Runs the forwards of a segment, one after the other.

    Attributes:
        forwards: of the blocks.
        flags: the training modes of their modules, when they were called.
        kept: the indices of the blocks whose outputs are returned.
    """

    forwards: tuple[Callable[..., Any], ...]
    flags: tuple[Flags, ...]
    kept: tuple[int, ...]

    def __call__(self, *calls: Inputs) -> list[Any]:
        """Call each forward with its arguments, in which `Before` stands for the last output."""
        output: Any = None
        outputs = []
        each = zip(self.forwards, self.flags, calls, strict=True)
        for index, (forward, flags, (args, kwargs)) in enumerate(each):
            with as_they_were(flags, "training"):
                output = forward(*bind(args, output), **bind(kwargs, output))
            if index in self.kept:
                outputs.append(output)
        return outputs


def _changed(what: str) -> CompositionError:
    return CompositionError(
        f"{what} has been changed in place before its segment ran, which is when the last block of"
        " the segment is called. Use the operation that is not in place, clone first, or use the"
        " layout 'every'."
    )


def bind(tree: Any, output: Any) -> Any:
    """Put the output of the call before where `Before` stands for it."""
    return replaced(tree, Before, lambda place: follow(output, place.path))


def follow(value: Any, path: tuple[Any, ...]) -> Any:
    """Take one key after the other of a value."""
    for key in path:
        value = value[key]
    return value


def replaced(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested containers with their leaves of exactly one type changed."""
    if type(tree) is kind:
        return change(tree)
    return rebuilt(tree, lambda part: replaced(part, kind, change))
