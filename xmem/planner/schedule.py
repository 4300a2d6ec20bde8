"""Schedules: what a step does, one operation after another, and how they are written.

| written | operation |
|---|---|
| `N2` | forward of stage 2, nothing kept but its output |
| `G3.0` | forward of stage 3, kept as its option 0 |
| `L` | the loss |
| `B3` | backward of stage 3 |
| `Da2` | drop a_2, the input of stage 2 |
| `Ds2` | drop what stage 2 keeps |
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from xmem.errors import InvalidScheduleError

Code = Literal["N", "G", "L", "B", "Da", "Ds"]

_WRITTEN = re.compile(r"(?:(L)|(N|B|Da|Ds)(\d+)|(G)(\d+)\.(\d+))", re.ASCII)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        code: which, see the module.
        index: of the stage (N, G, B, Ds) or the value (Da); 0 for the loss.
        option: how the activations are kept (G); 0 elsewhere.
    """

    code: Code
    index: int = 0
    option: int = 0

    def __str__(self) -> str:
        if self.code == "L":
            return "L"
        return f"{self.code}{self.index}" + (f".{self.option}" if self.code == "G" else "")


def format_ops(ops: Iterable[Op]) -> str:
    """Write a schedule, with blanks between operations."""
    return " ".join(map(str, ops))


def parse_ops(text: str) -> tuple[Op, ...]:
    """Read a schedule.

    Raises:
        InvalidScheduleError: a word is no operation.
    """
    return tuple(_parse(word, i) for i, word in enumerate(text.split()))


def _parse(word: str, i: int) -> Op:
    found = _WRITTEN.fullmatch(word)
    if not found:
        raise InvalidScheduleError(
            f"operation {i} is {word!r}; it must be like N2, G3.0, L, B3, Da2 or Ds2"
        )
    code: Any = found[2]
    if found[1]:
        return Op("L")
    return Op(code, int(found[3])) if code else Op("G", int(found[5]), int(found[6]))
