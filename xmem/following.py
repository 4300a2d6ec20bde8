"""Note on a trail which module runs: an instance's forward is replaced while a block is open.

Not by hooks, global ones or a class's: on PyTorch those make every call take its slow way (6 us),
and a class that changes loses what the interpreter has cached for it and all that derive from it.
Here a call costs 1 us. A forward that something else has set (checkpointing, a plan) is left alone:
who looks for it there must find it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmem.trail import Trail


class Followed:
    """A forward that notes when it begins and ends.

    Slots, so that who looks into what a module holds finds nothing here. A copy of the module, or
    one that is unpickled, runs its own forward.

    Attributes:
        forward: what it has been put over.
        trail: where it notes; None when its block has ended, wherever it still is.
    """

    __slots__ = (
        "__self__", "_look", "_marks", "_name", "_number", "_numbers", "_passes", "forward",
        "trail",
    )  # fmt: skip

    def __init__(
        self,
        module: Any,
        name: str,
        forward: Callable[..., Any],
        trail: Trail,
        number: Callable[[], int],
        look: Callable[[], None],
        passes: Callable[[], bool] | None = None,
    ) -> None:
        self.__self__ = module
        self._look = look
        self._marks = trail.marks
        self._name = name
        self._number = number
        self._numbers = trail.numbers
        self._passes = passes
        self.forward = forward
        self.trail: Trail | None = trail

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        trail = self.trail
        if trail is None or (self._passes is not None and self._passes()):
            return self.forward(*args, **kwargs)
        if trail.is_fresh:
            self._look()
        self._numbers.append(self._number())
        self._marks.append(self.__self__)
        result = self.forward(*args, **kwargs)
        self._numbers.append(self._number())
        self._marks.append(self)
        return result

    def __reduce__(self) -> Any:
        return _own, (self.__self__, self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own(copy.deepcopy(self.__self__, memo), self._name)


def _own(module: Any, name: str) -> Any:
    return getattr(type(module), name).__get__(module)


@contextmanager
def following(
    modules: Iterable[Any],
    name: str,
    own: Callable[[Any], Callable[..., Any]],
    trail: Trail,
    number: Callable[[], int],
    look: Callable[[], None],
    *,
    passes: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Let modules note their calls inside the block.

    Args:
        modules: the modules, each once.
        name: of the attribute that a module's forward is, "forward".
        own: returns what a module runs without such an attribute.
        trail: what is told.
        number: returns the number of the latest allocation or node.
        look: is called before the first module of a phase; see `Trail.look`.
        passes: returns True where calls are not to be noted, as while a compiler traces them.
    """
    put: list[Followed] = []
    for module in modules:
        before = vars(module).get(name)
        if before is None:
            before = own(module)
        elif type(before) is not Followed:
            continue
        made = Followed(module, name, before, trail, number, look, passes)
        vars(module)[name] = made
        put.append(made)
    try:
        yield
    finally:
        for made in put:
            made.trail = None
            if vars(made.__self__).get(name) is made:  # else something lies over it
                _take_off(made, name)


@contextmanager
def replacing(
    owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Put a function over another inside the block.

    Blocks may end in any order, as those of threads and generators do: what lies below another
    block's passes on from its end, and goes when that ends.

    Args:
        owner: a module or class.
        name: of the function in it.
        around: makes what lies over the function that is there.
    """
    below = vars(owner)[name]

    def door(*args: Any, **kwargs: Any) -> Any:
        return made.inside(*args, **kwargs)

    made: Any = door
    made.below, made.inside = below, around(below)
    setattr(owner, name, made)
    try:
        yield
    finally:
        made.inside = below
        while _has_ended(top := vars(owner)[name]):
            setattr(owner, name, top.below)


def _has_ended(function: Any) -> bool:
    below = getattr(function, "below", None)
    return below is not None and getattr(function, "inside", None) is below


def _take_off(made: Followed, name: str) -> None:
    """Leave what lies below, unless that has ended, too."""
    below: Any = made
    while type(below) is Followed and below.trail is None:
        below = below.forward
    if type(below) is Followed:
        vars(made.__self__)[name] = below
    else:
        del vars(made.__self__)[name]
