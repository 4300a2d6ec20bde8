"""Who holds the bytes: blocks and tensors, their owners and categories."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from xmem.diagnosis import Owner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xmem.backend import Backend
    from xmem.pooling import Block, Owners, Refusal
    from xmem.records import Category

_NAMED = (
    ("gradient of ", "gradient"),
    ("optimizer state of ", "optimizer"),
    ("float32 master of ", "optimizer"),
)
_OWNERS = 40


@dataclass
class Holdings:
    """Who holds what.

    Attributes:
        by_category: bytes; they sum to what was allocated.
        sizes: bytes by owner and category.
        counts: blocks by owner and category.
        activations: the blocks of activations with their owners, by birth.
        largest_gradient_bytes: of a single one.
    """

    by_category: Counter[str]
    sizes: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    activations: list[tuple[int, str, int]] = field(default_factory=list)
    largest_gradient_bytes: int = 0

    def add(self, name: str, category: str, size_bytes: int) -> None:
        """Add a block."""
        self.sizes[name, category] += size_bytes
        self.counts[name, category] += 1
        if category == "gradient":
            self.largest_gradient_bytes = max(self.largest_gradient_bytes, size_bytes)


def by_owned(
    backend: Backend,
    owned: Mapping[Category, Sequence[Any]],
    allocated: int,
    blocks: Sequence[Block],
    names: Mapping[int, str],
) -> Holdings:
    """Sum up tensors, where the backend's source knows no categories; the rest is nobody's."""
    holdings = Holdings(Counter())
    for block in blocks:
        if block.address in names:
            name = names[block.address]
            holdings.add(name, _kind(name), block.requested_bytes)
    named: Counter[str] = Counter()
    for (_, kind), size in holdings.sizes.items():
        named[kind] += size
    for category, tensors in owned.items():
        each = {id(tensor): backend.pool.tensor_bytes(tensor) for tensor in tensors}
        holdings.by_category[category] = total = sum(each.values())
        if total > named[category]:
            holdings.add(f"{category} tensors", category, total - named[category])
    rest = max(0, allocated - sum(holdings.by_category.values()))
    holdings.by_category["other"] = rest
    holdings.add("activations, temporaries and other tensors", "other", rest)
    return holdings


def by_blocks(
    backend: Backend,
    owners: Owners,
    refusal: Refusal,
    owned: Mapping[Category, Sequence[Any]],
    names: Mapping[int, str],
) -> Holdings:
    """Give every block that lives an owner; what has gone since keeps the pool's category."""
    assert refusal.by_category is not None
    before = _live(backend)
    for category, tensors in owned.items():
        backend.measure.tag(category, tensors)
    holdings = Holdings(Counter(cast("Mapping[str, int]", refusal.by_category)))
    found = 0
    for key, block in _live(backend).items():
        was: str = before.get(key, block).category or "temporary"
        kind = _category(owners, block, names)
        holdings.by_category[was] -= block.requested_bytes
        holdings.by_category[kind] += block.requested_bytes
        _hold(holdings, owners, block, kind)
        found += block.requested_bytes
    for block in refusal.blocks:
        if (block.address, block.birth) not in before:
            _hold(holdings, owners, block, block.category or "temporary")
            found += block.requested_bytes
    if refusal.allocated_bytes > found:
        holdings.add("gone since", "temporary", refusal.allocated_bytes - found)
    holdings.activations.sort()
    return holdings


def _live(backend: Backend) -> dict[tuple[int, int], Block]:
    return {
        (block.address, block.birth): block
        for segment in backend.pool.segments()
        for block in segment.blocks
        if block.requested_bytes
    }


def _hold(holdings: Holdings, owners: Owners, block: Block, category: str) -> None:
    name = owners.owner_of(block)
    holdings.add(name, category, block.requested_bytes)
    if category == "activation":
        holdings.activations.append((block.birth, name, block.requested_bytes))


def _category(owners: Owners, block: Block, names: Mapping[int, str]) -> str:
    """Return a block's category: its owner's, or what the phase of its birth makes likely.

    A name without a category is of something whose update is pending: what it was is there still.
    """
    if block.category not in (None, "temporary"):
        return str(block.category)
    if block.address in names:
        return _kind(names[block.address])
    phase = owners.phase_at(block.birth)
    if phase is None:
        return "other"
    return "activation" if phase == "forward" else "temporary"


def _kind(name: str) -> str:
    return next((kind for start, kind in _NAMED if name.startswith(start)), "parameter")


def largest(holdings: Holdings) -> tuple[Owner, ...]:
    """Return the owners, largest first, at most forty."""
    return tuple(
        Owner(
            name=name,
            category=category,
            size_bytes=size,
            block_count=holdings.counts[name, category],
        )
        for (name, category), size in holdings.sizes.most_common(_OWNERS)
        if size
    )
