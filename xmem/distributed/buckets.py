"""Which tensors of a list travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xmem.distributing import Kind


@dataclass(frozen=True)
class Bucket:
    """Tensors of one type that are sent in one call.

    Attributes:
        dtype: their type.
        numbers: which of the list, in order.
        size_bytes: their bytes.
    """

    dtype: str
    numbers: tuple[int, ...]
    size_bytes: int


def buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Return which tensors go together: numbers in order, none over the limit but single ones."""
    found: list[list[int]] = []
    room = -1
    for number, size_bytes in enumerate(sizes_bytes):
        if found and size_bytes <= room:
            found[-1].append(number)
        else:
            found.append([number])
            room = bucket_bytes
        room -= size_bytes
    return found


def buckets_by_type(kinds: Sequence[Kind], bucket_bytes: int) -> list[Bucket]:
    """Return buckets of one type each, in the order of their first tensors.

    Tensors without an element are in none: there is nothing to send.
    """
    by_type: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        if kind.size_bytes:
            by_type.setdefault(kind.dtype, []).append(number)
    found = [
        Bucket(dtype, tuple(numbers[i] for i in group), sum(sizes[i] for i in group))
        for dtype, numbers in by_type.items()
        for sizes in [[kinds[number].size_bytes for number in numbers]]
        for group in buckets(sizes, bucket_bytes)
    ]
    return sorted(found, key=lambda bucket: bucket.numbers[0])
