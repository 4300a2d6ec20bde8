"""What a pool does that looks like a leak from outside and is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmem.leak_records import Note

if TYPE_CHECKING:
    from xmem.pooling import PoolStats

_LEAST_BYTES = 1 << 20
"""Less is not worth a note."""
_PIECES = 0.5
"""If the largest free piece is at most this share of all that is free, it lies in pieces."""


def pool_notes(first: PoolStats, last: PoolStats) -> list[Note]:
    """Compare a pool after warm-up with the same at the end."""
    if first.reserved_bytes is None or last.reserved_bytes is None:
        return []
    free_before = first.reserved_bytes - first.allocated_bytes
    free_bytes = last.reserved_bytes - last.allocated_bytes
    grown = min(last.reserved_bytes - first.reserved_bytes, free_bytes - free_before)
    if grown < _LEAST_BYTES:
        return []
    largest = last.largest_free_bytes
    figures = f"{last.reserved_bytes} bytes are reserved and {last.allocated_bytes} allocated"
    if largest is not None and largest <= _PIECES * free_bytes:
        return [
            Note(
                "fragmentation",
                f"the pool holds {grown} bytes more than after warm-up, in pieces of at most"
                f" {largest} bytes: {figures}. xmem.pool.trim() gives back what can be; sizes that"
                " vary less (padding to a few shapes) avoid it",
            )
        ]
    return [
        Note(
            "cache growth",
            f"the pool keeps {grown} bytes more for reuse than after warm-up: {figures}. No leak;"
            " xmem.pool.trim() gives them back",
        )
    ]
