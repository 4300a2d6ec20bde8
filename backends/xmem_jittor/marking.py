"""What each operation of a schedule takes: notes that the graph makes while it runs.

A note is made when an operation has ended, and is where the next one begins.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.errors import MeasurementError
from xmem.records import HEAD, REST, Mark
from xmem_jittor import native
from xmem_jittor.ordering import after_all, anchor, noting

_START = -4
_END = -1  # belongs to all runs
_NUMBERS = 1 << 20  # of operations in a run, at most
_runs = itertools.count(1)


@dataclass(frozen=True)
class Entry:
    """One note.

    Attributes:
        allocated_bytes: then.
        peak_bytes: since the note before.
        at_seconds: on a clock.
    """

    allocated_bytes: int
    peak_bytes: int
    at_seconds: float


def forget() -> None:
    """Forget all notes."""
    native.allocator().xmem_jittor_forget_entries()


def end() -> None:
    """Note, now, that what ran has ended."""
    native.allocator().xmem_jittor_enter(_END)


def allocated() -> tuple[int, int]:
    """Return the bytes that are allocated, and the most since the peak was reset."""
    values = (ctypes.c_longlong * 6)()
    native.allocator().xmem_jittor_counters(values)
    return int(values[0]), int(values[1])


class Notes:
    """The notes of one run."""

    def __init__(self) -> None:
        self._base = next(_runs) * _NUMBERS
        # First of all that is pending: what comes before the first stage is noted, too.
        with jt.flag_scope(node_order=1):
            self._start = self._noted(anchor(), _START)

    def begun(self, var: Any) -> Any:
        """Return a tensor in the same memory; what came before the first stage has ended there."""
        start, self._start = self._start, None
        return self._noted(var, HEAD, start)

    def ended(self, var: Any, number: int, others: Sequence[Any] = ()) -> Any:
        """Return a tensor in the same memory; an operation has ended when all others are there."""
        return self._noted(after_all(var, others), number)

    def _noted(self, var: Any, number: int, *others: Any) -> Any:
        address = native.address_of(native.allocator().xmem_jittor_enter)
        return noting(var, address, self._base + number - _START, *others)

    def marks(self, numbers: Sequence[int], gradient_bytes: Callable[[int], int]) -> list[Mark]:
        """Return a mark for each operation; an empty one where nothing needed it to run.

        Args:
            numbers: of the operations in order, `TAIL` among them.
            gradient_bytes: gives the bytes of gradients that there were when an operation began.
        """
        found = self._read()
        if _START not in found:
            raise MeasurementError("there are no marks: the step has not run, or was not traced")
        ran = [number for number in found if number not in (_START, REST)]
        expected = [HEAD, *numbers]
        if ran != [number for number in expected if number in found]:
            raise MeasurementError(
                f"operations {ran} ran in another order than the schedule's {expected}"
            )
        marks, before = [], found[_START]
        for number in (*expected, REST):
            entry = found.get(number, Entry(before.allocated_bytes, 0, before.at_seconds))
            marks.append(
                Mark(
                    op=number,
                    before_bytes=before.allocated_bytes,
                    peak_bytes=max(entry.peak_bytes, before.allocated_bytes),
                    after_bytes=entry.allocated_bytes,
                    gradient_bytes=gradient_bytes(number),
                    seconds=entry.at_seconds - before.at_seconds,
                )
            )
            before = entry
        return marks

    def _read(self) -> dict[int, Entry]:
        """Return this run's entries by number, in the order of time.

        Peaks that other runs have noted in between are among them.
        """
        library = native.allocator()
        count = library.xmem_jittor_entries(0, 0, None, None)
        numbers, seconds = (ctypes.c_longlong * (3 * count))(), (ctypes.c_double * count)()
        library.xmem_jittor_entries(0, count, numbers, seconds)
        found: dict[int, Entry] = {}
        most = 0
        for i in range(count):
            which, allocated, peak = numbers[3 * i : 3 * i + 3]
            most = max(most, peak)
            entry = Entry(allocated, most, seconds[i])
            if which == _END and found:
                found.setdefault(REST, entry)
            elif self._base <= which < self._base + _NUMBERS:
                found[which - self._base + _START] = entry
                most = 0
        return found
