"""Layouts: which modules of a model make up the segments that are recomputed.

"sqrt" is the rule of Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training Deep Nets with
Sublinear Memory Cost", 2016: of n blocks, about sqrt(n) segments. All segments are checkpointed,
the last one too. A block keeps many times what it hands on, so in practice "every" often needs
least; measure.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.errors import CompositionError, UsageError, unknown
from xmem.sizes import parse_size

if TYPE_CHECKING:
    from xmem.protocols import Checkpoint

LAYOUTS = ("every", "sqrt")

Named = tuple[str, Any]
"""A module with its path in the model."""


@dataclass(frozen=True)
class KeyLayers:
    """Checkpoint the layers whose inside is large and cheap to compute again.

    A module is chosen if it meets every criterion that is given; modules inside a chosen one are
    not searched. The last two are measured in one pass, so they need `inputs`.

    Attributes:
        types: classes of modules, or their names, e.g. ("TransformerEncoderLayer",).
        names: paths in the model, or patterns of them, e.g. ("encoder.*.attention",).
        min_saved_bytes: what it keeps for backward at least, beyond its inputs and outputs: a
            number of bytes, or text such as "8MiB".
        max_recompute_seconds: how long its forward may take at most.
    """

    types: Sequence[type | str] = ()
    names: Sequence[str] = ()
    min_saved_bytes: int | str | None = None
    max_recompute_seconds: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.types, (str, type)) or isinstance(self.names, str):
            raise UsageError("KeyLayers takes sequences: types=(Block,), names=('blocks.*',)")
        if not (self.types or self.names or self.measured):
            raise UsageError(
                "KeyLayers() chooses by nothing; give types, names, min_saved_bytes or"
                " max_recompute_seconds"
            )
        if self.min_saved_bytes is not None:
            object.__setattr__(self, "min_saved_bytes", parse_size(self.min_saved_bytes))
        seconds = self.max_recompute_seconds
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise UsageError(f"max_recompute_seconds={seconds!r} is no time above 0, in seconds")

    @property
    def measured(self) -> bool:
        """Whether a criterion has to be measured."""
        return self.min_saved_bytes is not None or self.max_recompute_seconds is not None

    def matches(self, path: str, module: Any) -> bool:
        """Say whether the type and the path of a module are among those asked for."""
        classes = type(module).__mro__
        by_type = not self.types or any(
            t in classes or t in {c.__name__ for c in classes} for t in self.types
        )
        return by_type and (
            not self.names or any(fnmatch.fnmatchcase(path, name) for name in self.names)
        )

    def fits(self, saved_bytes: int, seconds: float) -> bool:
        """Say whether measured costs meet the criteria."""
        least, most = self.min_saved_bytes, self.max_recompute_seconds
        return (least is None or saved_bytes >= int(least)) and (most is None or seconds <= most)


def modules_of(capability: Checkpoint, model: Any) -> Iterator[Named]:
    """Yield every module inside a model with its path, outer ones first; a shared one each time."""

    def inside(module: Any, path: str) -> Iterator[Named]:
        for name, child in capability.children(module):
            below = f"{path}.{name}" if path else name
            yield below, child
            yield from inside(child, below)

    yield from inside(model, "")


def find_blocks(capability: Checkpoint, model: Any) -> list[list[Named]]:
    """Return the repeated blocks of a model, one list for each list of modules that has any.

    A block is a child of a list of modules (Sequential, ModuleList) in which at least two
    children are of one class and have submodules of their own. Lists inside blocks are not
    searched again, since a region inside a region is recomputed twice.
    """
    return list(_blocks(capability, model, ""))


def _blocks(capability: Checkpoint, module: Any, path: str) -> Iterator[list[Named]]:
    children = [(f"{path}.{n}" if path else n, c) for n, c in capability.children(module)]
    if capability.is_container(module):
        composite = [(p, c) for p, c in children if capability.children(c)]
        classes = Counter(type(c) for _, c in composite)
        if classes and max(classes.values()) >= 2:
            yield composite
            return
    for child_path, child in children:
        yield from _blocks(capability, child, child_path)


def split(blocks: Sequence[list[Named]], layout: str | int) -> list[list[Named]]:
    """Cut lists of blocks into segments of equal length, or of lengths that differ by one.

    Args:
        blocks: one list for each list of modules; a segment lies in one of them.
        layout: "every" (each block), "sqrt" (of each list) or how many segments in all.

    Raises:
        UsageError: the layout is unknown, or there cannot be so many segments.
    """
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise UsageError(
                unknown("layout", layout, LAYOUTS) + " Or a number of segments, KeyLayers(...), or"
                " a list of segments, each a list of modules or of their paths."
            )
        counts = [len(b) if layout == "every" else round(math.sqrt(len(b))) for b in blocks]
    else:
        counts = _shares([len(b) for b in blocks], layout)
    segments = []
    for found, count in zip(blocks, counts, strict=True):
        # Longer ones first: the last is recomputed while the loss's own gradients are alive.
        bounds = [-(-len(found) * i // count) for i in range(count + 1)]
        segments += [found[a:b] for a, b in itertools.pairwise(bounds)]
    return segments


def _shares(lengths: Sequence[int], segments: int) -> list[int]:
    """Share a number of segments among lists by their lengths, at least one each."""
    total = sum(lengths)
    if total and not len(lengths) <= segments <= total:
        found = f"{total} blocks in {len(lengths)} list(s)"
        raise UsageError(
            f"{segments} segments cannot be made of {found}; give a number from {len(lengths)} to"
            f" {total}"
        )
    shares = [1] * len(lengths)
    for _ in range(segments - len(lengths) if total else 0):
        # the list whose segments are longest now
        longest = max(range(len(lengths)), key=lambda i: lengths[i] / shares[i])
        shares[longest] += 1
    return shares


def given(
    capability: Checkpoint, model: Any, segments: Sequence[Any], what: str = "segment"
) -> list[list[Named]]:
    """Return segments that were listed as modules, as paths, or as lists of these.

    Raises:
        UsageError: a path leads nowhere, a value is no module, or a segment is empty.
        CompositionError: a module belongs to two segments, or lies inside another one.
    """
    paths = dict(modules_of(capability, model))
    names = {id(module): path for path, module in reversed(paths.items())}
    resolved = []
    for number, listed in enumerate(segments):
        members = listed if isinstance(listed, (list, tuple)) else [listed]
        if not members:
            raise UsageError(f"{what} {number} is empty; leave it out, or name its modules")
        resolved.append([_named(capability, m, paths, names) for m in members])
    _disjoint(capability, [named for segment in resolved for named in segment])
    return resolved


def _named(
    capability: Checkpoint, member: Any, paths: dict[str, Any], names: dict[int, str]
) -> Named:
    if isinstance(member, str):
        if member not in paths:
            raise UsageError(unknown("module", member, paths))
        return member, paths[member]
    if not capability.is_module(member):
        raise UsageError(f"{member!r} is no module of the active backend; pass its own modules")
    return names.get(id(member), type(member).__name__), member


def _disjoint(capability: Checkpoint, members: Sequence[Named]) -> None:
    seen: dict[int, str] = {}
    for path, module in members:
        if id(module) in seen:
            raise CompositionError(f"module {path!r} was listed twice; a block is recomputed once")
        seen[id(module)] = path
    for path, module in members:
        for below, inner in modules_of(capability, module):
            if id(inner) in seen:
                raise CompositionError(
                    f"module {seen[id(inner)]!r} lies inside {path!r} (as {below!r}); it would be"
                    " recomputed twice. List one of the two."
                )


def key_candidates(capability: Checkpoint, model: Any, layers: KeyLayers) -> list[Named]:
    """Return the modules that types and names ask for, outer ones first, each once.

    Raises:
        UsageError: a pattern matches no path.
    """
    everything = list(modules_of(capability, model))
    for name in layers.names:
        if not any(fnmatch.fnmatchcase(path, name) for path, _ in everything):
            raise UsageError(unknown("module", name, [path for path, _ in everything]))
    found: dict[int, Named] = {}
    for path, module in everything:
        # A list of modules is often only looped over, never called: measuring shows it, else its
        # own name or type has to be given.
        called = (
            layers.measured
            or not capability.is_container(module)
            or path in layers.names
            or type(module) in layers.types
            or type(module).__name__ in layers.types
        )
        if called and layers.matches(path, module):
            found.setdefault(id(module), (path, module))
    return list(found.values())


def outermost(capability: Checkpoint, chosen: Sequence[Named]) -> list[Named]:
    """Return the modules that lie in none of the others."""
    inner = {id(m) for _, module in chosen for _, m in modules_of(capability, module)}
    return [(path, module) for path, module in chosen if id(module) not in inner]
