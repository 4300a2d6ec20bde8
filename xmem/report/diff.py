"""Two reports held against each other: what changed between A and B, case by case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xmem.report.compare import settings_key
from xmem.report.model import Case, Report, Result
from xmem.report.ranks import most_of
from xmem.report.tables import (
    Cell,
    Table,
    Tone,
    format_change,
    format_factor,
    format_seconds,
    status_cell,
    technique_label,
)
from xmem.sizes import format_size


@dataclass(frozen=True)
class CaseChange:
    """One case in both reports; None where a report has no such case.

    Attributes:
        case: the case.
        before: its result in A.
        after: its result in B.
    """

    case: Case
    before: Result | None
    after: Result | None

    @property
    def peak_change_bytes(self) -> int | None:
        """How much higher the peak is in B; None where either is not known."""
        before, after = self.peaks
        return None if before is None or after is None else after - before

    @property
    def peaks(self) -> tuple[int | None, int | None]:
        """The two peaks."""
        return (
            self.before.peak_allocated_bytes if self.before else None,
            self.after.peak_allocated_bytes if self.after else None,
        )

    @property
    def time_ratio(self) -> float | None:
        """Step time in B over A; None where either is not known."""
        if self.before is None or self.after is None:
            return None
        before, after = self.before.step_seconds, self.after.step_seconds
        return after / before if before and after is not None else None

    @property
    def broke(self) -> bool:
        """Whether the case was ok in A and ran to no good end in B."""
        if self.before is None or self.after is None:
            return False
        return self.before.status == "ok" and self.after.status != "ok"

    def grew(self, tolerance: float) -> bool:
        """Whether the peak grew by more than a fraction of what it was."""
        before, after = self.peaks
        return before is not None and after is not None and after - before > tolerance * before


def diff(before: Report, after: Report) -> tuple[CaseChange, ...]:
    """Pair the cases of two reports, in A's order, those only in B last."""
    old = {settings_key(r.case): r for r in before.results}
    new = {settings_key(r.case): r for r in after.results}
    return tuple(CaseChange(case, old.get(case), new.get(case)) for case in {**old, **new})


def worse(changes: Iterable[CaseChange], tolerance: float) -> tuple[CaseChange, ...]:
    """Return the cases whose peak grew beyond the tolerance, or that no longer run."""
    return tuple(c for c in changes if c.broke or c.grew(tolerance))


def diff_table(changes: Iterable[CaseChange], tolerance: float) -> Table:
    """Every case with both peaks, the change, both statuses and the time ratio.

    Cases of several ranks show the highest peak of all, and what a rank sends in a step.
    """
    changes = tuple(changes)
    several = any(c.case.world != 1 for c in changes)
    return Table(
        title="A and B",
        columns=(
            "Workload", "Technique", "Backend", "Status", "Peak A", "Peak B", "Change", "Step A",
            "Step B", "Time ratio", *(("Sent A", "Sent B") if several else ()),
        ),
        numeric=8 if several else 6,
        rows=tuple(_row(c, tolerance, several=several) for c in changes),
    )  # fmt: skip


def _row(change: CaseChange, tolerance: float, *, several: bool) -> tuple[Cell, ...]:
    before, after = change.peaks
    return (
        Cell(change.case.workload),
        Cell(technique_label(change.case)),
        Cell(change.case.backend),
        _status(change),
        Cell(format_size(before)),
        Cell(format_size(after)),
        _peak_change(change, tolerance),
        Cell(format_seconds(change.before.step_seconds if change.before else None)),
        Cell(format_seconds(change.after.step_seconds if change.after else None)),
        Cell(format_factor(change.time_ratio)),
        *((_sent(change.before), _sent(change.after)) if several else ()),
    )


def _sent(result: Result | None) -> Cell:
    if result is None:
        return Cell("-", "muted")
    return Cell(format_size(most_of(result, lambda rank: sum(rank.sent_bytes.values()))))


def _status(change: CaseChange) -> Cell:
    if change.before is None:
        return Cell("only in B", "muted")
    if change.after is None:
        return Cell("only in A", "muted")
    after = status_cell(change.after.status)
    if change.before.status == change.after.status:
        return after
    return Cell(f"{status_cell(change.before.status).text} -> {after.text}", after.tone)


def _peak_change(change: CaseChange, tolerance: float) -> Cell:
    difference = change.peak_change_bytes
    if difference is None:
        return Cell("-", "muted")
    before = change.peaks[0]
    share = f" ({difference / before:+.1%})" if before and difference else ""
    tone: Tone = "bad" if change.grew(tolerance) else "good" if difference < 0 else ""
    return Cell(f"{format_change(difference)}{share}", tone)
