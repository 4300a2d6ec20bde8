"""Sizes: `"8GiB"` <-> bytes. Units for people exist only where text is rendered."""

from __future__ import annotations

import re
from fractions import Fraction

from xmem.errors import UsageError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Return a size in bytes.

    Args:
        size: bytes as an int, or text such as "8GiB", "512 MB", "1.5gib".

    Raises:
        UsageError: the text is no size, or the size is negative or not whole bytes.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise UsageError(f"a size is an int (bytes) or text such as '8GiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise UsageError(f"a size cannot be negative: {size}")
        return size
    match = _PATTERN.fullmatch(size)
    if match is None or match.group(2).upper() not in _UNITS:
        raise UsageError(
            f"{size!r} is not a size; write bytes, or a number with one of B, KiB, MiB, GiB, TiB"
            " (powers of 1024) or KB, MB, GB, TB (powers of 1000), e.g. '8GiB'"
        )
    exact = Fraction(match.group(1)) * _UNITS[match.group(2).upper()]
    if exact.denominator != 1:
        raise UsageError(f"{size!r} is not a whole number of bytes")
    return int(exact)


def format_size(size_bytes: int | None, *, digits: int = 2) -> str:
    """Render bytes for people, in powers of 1024; unknown is a dash."""
    if size_bytes is None:
        return "-"
    magnitude = abs(size_bytes)
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if magnitude >= factor:
            return f"{size_bytes / factor:.{digits}f} {unit}"
    return f"{size_bytes} B"
