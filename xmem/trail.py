"""Where a step was when something was made: phases and modules over a number that only grows.

A backend notes the number of its latest allocation (PyTorch) or graph node (Jittor) whenever a
module is called or returns and a phase begins. Every block of memory carries the number of its
birth, so its place is found by bisection, afterwards. Two appends a note; all else waits until
somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.casting import current
from xmem.following import Followed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xmem.pooling import Block, PhaseName, Refusal

_LIMIT = 1 << 17
"""Of a loop that runs inside one block the latest notes are kept."""


_OUTSIDE_OF_MODULES: dict[PhaseName, str] = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "outside": "between the phases",
}


@dataclass(frozen=True)
class Place:
    """Where a step is.

    Attributes:
        phase: the phase of the step.
        module: the innermost module that runs, or None.
    """

    phase: PhaseName
    module: Any = None


@dataclass(frozen=True)
class _Begin:
    phase: PhaseName


_RAISED = object()


class Trail:
    """The places that a step passed, in order.

    What happens is only noted, by whoever follows a framework, in two lists: `numbers`, and in
    `marks` a module when it is called, and its Followed when it has returned. Only a question plays
    that back.

    Attributes:
        numbers: of the latest allocation or node at each mark.
        marks: what happened.
        is_fresh: no module has been called since the phase began.
        depth: how many calls of backward are inside each other.
        phases: those that have begun.
        in_force: techniques that were seen in force: "autocast", and what a backend adds.
    """

    def __init__(self, number: int) -> None:
        self.numbers: list[int] = []
        self.marks: list[Any] = []
        self.is_fresh = True
        self.depth = 0
        self.phases: set[PhaseName] = {"forward"}
        self.in_force: set[str] = set()
        self._stack: list[Any] = []
        self._phase: PhaseName = "forward"
        self._has_raised = False
        self._numbers = [number]
        self._places: list[tuple[PhaseName, Any]] = [("forward", None)]

    def look(self, *techniques: str) -> None:
        """Note what is in force when the first module of a phase is called."""
        self.is_fresh = False
        casting = current()
        if casting is not None and casting.enabled:
            self.in_force.add("autocast")
        self.in_force.update(techniques)

    def begin(self, number: int, phase: PhaseName) -> None:
        """Note that a phase begins; modules that have not returned raised."""
        self.phases.add(phase)
        self.is_fresh = True
        self._mark(number, _Begin(phase))

    def raised(self, number: int) -> None:
        """Note that a phase has ended by an error: what is called next is another step's."""
        self._mark(number, _RAISED)

    def _mark(self, number: int, mark: Any) -> None:
        self.numbers.append(number)
        self.marks.append(mark)
        if len(self.numbers) > _LIMIT:
            self._play()

    @property
    def version(self) -> int:
        """Changes whenever something is noted."""
        return len(self._numbers) + len(self.numbers)

    def at(self, birth: int) -> Place | None:
        """Return where something was made; None: before the trail began, or too long ago.

        Args:
            birth: its number; 0 where it is not known, which means now.
        """
        self._play()
        index = bisect_left(self._numbers, birth) - 1 if birth else len(self._numbers) - 1
        return Place(*self._places[index]) if index >= 0 else None

    def _play(self) -> None:
        """Turn marks into places."""
        for number, mark in zip(self.numbers, self.marks, strict=True):
            self._step(mark)
            self._numbers.append(number)
            self._places.append((self._phase, self._stack[-1] if self._stack else None))
        self.numbers.clear()
        self.marks.clear()
        del self._numbers[:-_LIMIT], self._places[:-_LIMIT]

    def _step(self, mark: Any) -> None:
        stack = self._stack
        if isinstance(mark, Followed):
            if any(held is mark.__self__ for held in stack):
                while stack.pop() is not mark.__self__:  # those inside it raised
                    pass
        elif isinstance(mark, _Begin):
            self._phase, self._has_raised = mark.phase, False
            stack.clear()
        elif mark is _RAISED:
            self._has_raised = True
        else:
            if not stack and (self._phase in ("outside", "optimizer") or self._has_raised):
                self._phase, self._has_raised = "forward", False
            stack.append(mark)


class TrailOwners:
    """What backends return from `Pool.watch`; see `xmem.pooling.Owners`.

    Args:
        trail: is filled while the block is open.
        names: returns `Pool.parameter_names` as it is now.
        paths: returns the paths of the model's modules by id.
    """

    def __init__(self, trail: Trail, names: Any, paths: Any) -> None:
        self._trail = trail
        self._find_names = names
        self._find_paths = paths
        self._known: tuple[int, Mapping[int, str], Mapping[int, str]] | None = None

    @property
    def phases(self) -> frozenset[PhaseName]:
        """The phases that have begun inside the block."""
        return frozenset(self._trail.phases)

    @property
    def in_force(self) -> frozenset[str]:
        """Techniques that were in force inside the block."""
        return frozenset(self._trail.in_force)

    def owner_of(self, block: Block) -> str:
        """By address, what has a name; else by birth."""
        name = self._names().get(block.address)
        if name is not None:
            return name
        place = self._trail.at(block.birth) if block.birth else None
        if place is None:
            return "made before"
        return self._path(place) or _OUTSIDE_OF_MODULES[place.phase]

    def phase_at(self, birth: int) -> PhaseName | None:
        """Return the phase in which something was made; None: before the block."""
        place = self._trail.at(birth)
        return None if place is None else place.phase

    def phase_of(self, refusal: Refusal) -> PhaseName:
        """Return the phase at the birth of what was refused."""
        place = self._trail.at(refusal.birth)
        if place is None:
            return "outside"
        if refusal.in_backward and place.phase == "forward":
            return "backward"
        return place.phase

    def module_of(self, refusal: Refusal) -> str:
        """Return the path of the module at the birth of what was refused."""
        place = self._trail.at(refusal.birth)
        return "" if place is None else self._path(place)

    def make_whole(self) -> None:
        """Where operations run at once, a step's phases follow each other anyway."""

    def finish(self) -> None:
        """Where operations run at once, there is nothing to run."""

    def may_be_updated(self, refusal: Refusal | None) -> bool:
        """Say whether a request was made while an optimizer stepped."""
        if refusal is not None:
            return self.phase_of(refusal) == "optimizer"
        place = self._trail.at(0)
        return place is not None and place.phase == "optimizer"

    def forget(self) -> None:
        """Let go of the modules: what was seen cannot be asked for any more."""
        self._trail = Trail(0)
        self._find_names = self._find_paths = dict
        self._known = None

    def _path(self, place: Place) -> str:
        if place.module is None:
            return ""
        path = self._lookup()[2].get(id(place.module))
        return path or type(place.module).__name__

    def _names(self) -> Mapping[int, str]:
        return self._lookup()[1]

    def _lookup(self) -> tuple[int, Mapping[int, str], Mapping[int, str]]:
        version = self._trail.version
        if self._known is None or self._known[0] != version:
            self._known = (version, self._find_names(), self._find_paths())
        return self._known
