"""Parsers of settings: each takes what a person wrote and raises UsageError, or returns a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xmem.errors import UsageError, unknown
from xmem.sizes import parse_size


def one_of(name: str, valid: Sequence[str]) -> Callable[[Any], str]:
    """Take one of some names."""

    def parse(value: Any) -> str:
        if value not in valid:
            raise UsageError(unknown(name, value, valid))
        return str(value)

    return parse


def flag(name: str) -> Callable[[Any], bool]:
    """Take True or False, and nothing that only resembles them."""

    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"{name} is True or False, not {value!r}")
        return value

    return parse


def size(
    name: str, least: int, most: int | None = None, *, may_be_none: bool = False
) -> Callable[[Any], int | None]:
    """Take a size in bytes, as an int or text."""

    def parse(value: Any) -> int | None:
        if value is None and may_be_none:
            return None
        found = parse_size(value)
        if found < least or (most is not None and found > most):
            upper = "" if most is None else f" and at most {most}"
            raise UsageError(f"{name} is at least {least} bytes{upper}, not {value!r} ({found})")
        return found

    return parse


def whole(name: str, least: int, most: int) -> Callable[[Any], int]:
    """Take a whole number in a range."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UsageError(f"{name} is a whole number from {least} to {most}, not {value!r}")
        return value

    return parse


def fraction(name: str, *, open_ends: bool) -> Callable[[Any], float]:
    """Take a number between 0 and 1; `open_ends` leaves out 0 and 1 themselves."""

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{name} is a number between 0 and 1, not {value!r}")
        inside = 0 < value < 1 if open_ends else 0 <= value <= 1
        if not inside:
            raise UsageError(f"{name} lies {'inside' if open_ends else 'in'} 0 to 1, not {value!r}")
        return float(value)

    return parse


def factor(
    name: str, least: float, most: float, *, may_be_none: bool = False
) -> Callable[[Any], float | None]:
    """Take a number in a range."""

    def parse(value: Any) -> float | None:
        if value is None and may_be_none:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise UsageError(f"{name} is a number from {least} to {most}, not {value!r}")
        return float(value)

    return parse
