"""Backwards that are built to be looked at and never run; operations must not spend themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_depth = 0
_kept: list[list[Any]] = []


def trying() -> bool:
    """Say whether a backward is being built that will not run."""
    return _depth > 0


@contextmanager
def trial() -> Iterator[None]:
    """Note inside the block that what is built will not run."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def noting_kept() -> Iterator[list[Any]]:
    """Note inside the block which handles operations keep for their own backward."""
    found: list[Any] = []
    _kept.append(found)
    try:
        yield found
    finally:
        _kept.pop()


def note_kept(handles: list[Any]) -> None:
    """Note handles that an operation keeps and reads in its own backward only."""
    if _kept:
        _kept[-1].extend(handles)
