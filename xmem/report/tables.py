"""The tables of a report as rows of text, the same for Markdown, HTML and the terminal.

Units for people begin here. Text from results may hold anything (a compiler's output, a hostile
name); it is made harmless by whoever renders it, and `clean` takes control characters out.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from xmem.protocols import CATEGORIES
from xmem.report.compare import (
    FRAMEWORK_LOSS_TOLERANCE,
    STEADY_TIME_SPREAD,
    FrameworkComparison,
    TechniqueComparison,
    compare_frameworks,
    compare_techniques,
    finite,
    time_spread,
)
from xmem.report.model import Case, RankResult, Report, Result, Status
from xmem.sizes import format_size

Tone = Literal["", "good", "warn", "bad", "muted"]

STATUS_TONES: dict[Status, Tone] = {
    "ok": "good",
    "unsupported": "muted",
    "unavailable": "bad",
    "out_of_memory": "warn",
    "timeout": "bad",
    "error": "bad",
}


@dataclass(frozen=True)
class Cell:
    """A piece of a row: what it says, and whether that is good news."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """Columns and rows.

    Attributes:
        title: what it shows.
        columns: the headings.
        numeric: how many of the last columns are figures, to be aligned right.
        rows: one tuple of cells per row, as long as `columns`.
        note: how to read it.
    """

    title: str
    columns: tuple[str, ...]
    numeric: int
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def is_numeric(self, index: int) -> bool:
        """Say whether a column holds figures."""
        return index >= len(self.columns) - self.numeric


def clean(text: str) -> str:
    """Return text on one line without control and direction characters."""
    spaced = " ".join(text.split())
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in spaced)


def format_seconds(seconds: float | None) -> str:
    """Render a time for people; unknown is a dash."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def format_factor(factor: float | None) -> str:
    """Render a ratio; unknown is a dash."""
    return "-" if factor is None else f"{factor:.2f}x"


def format_change(size_bytes: int | None) -> str:
    """Render a number of bytes with its sign; unknown is a dash."""
    if not size_bytes:
        return format_size(size_bytes)
    return f"{'+' if size_bytes > 0 else ''}{format_size(size_bytes)}"


def technique_label(case: Case) -> str:
    """Name a case's technique for people, with its ranks where there are several."""
    return case.technique if case.world == 1 else f"{case.technique} ({case.world} ranks)"


def case_label(result: Result) -> str:
    """Name a case for people."""
    return f"{result.case.workload} / {technique_label(result.case)} / {result.case.backend}"


def status_cell(status: Status) -> Cell:
    """Say how a case ended."""
    return Cell(status.replace("_", " "), STATUS_TONES[status])


def loss_cell(difference: float | None, agree: bool | None) -> Cell:
    """Say how far losses are apart and whether that is within the tolerance."""
    if difference is None:
        return Cell("-", "muted")
    text = "not finite" if math.isnan(difference) else f"{difference:.1e}" if difference else "0"
    if agree is None:
        return Cell(text)
    return Cell(f"{text} ({'agrees' if agree else 'DIFFERS'})", "good" if agree else "bad")


def time_cell(result: Result) -> Cell:
    """Say how long a step took, and how far steps are apart where that is much."""
    spread = time_spread(result)
    if spread is None or spread <= STEADY_TIME_SPREAD:
        return Cell(format_seconds(result.step_seconds))
    return Cell(f"{format_seconds(result.step_seconds)} (spread {spread:.0%})", "warn")


def _factor_cell(factor: float | None, *, lower_is_better: bool) -> Cell:
    if factor is None:
        return Cell("-", "muted")
    if lower_is_better:
        return Cell(format_factor(factor))
    return Cell(format_factor(factor), "good" if factor > 1.01 else "bad" if factor < 0.99 else "")


def results_table(report: Report) -> Table:
    """Every case with its bytes, its time, and both beside the baseline's."""
    return Table(
        title="Results",
        columns=(
            "Workload", "Technique", "Backend", "Status", "Static", "Peak", "Above static",
            "Peak saved", "Saving above static", "Step time", "Time vs baseline",
            "Loss vs baseline", "Same peak each step",
        ),
        numeric=9,
        rows=tuple(_results_row(c) for c in compare_techniques(report)),
        note=(
            "Savings and ratios are against the same backend's baseline: one process with the whole"
            " batch. Peak saved: how much"
            " lower the peak is. Saving above static: the baseline's bytes above static over this"
            " row's. Loss: the largest relative difference over all steps, held against the"
            " technique's tolerance. Step time: the median; a spread (slowest less fastest step"
            f" over the median) is shown beyond {STEADY_TIME_SPREAD:.0%}, and then the machine was"
            " busy with something else and time ratios say little."
        ),
    )  # fmt: skip


def _results_row(comparison: TechniqueComparison) -> tuple[Cell, ...]:
    result = comparison.result
    same = comparison.repeatable
    return (
        Cell(result.case.workload),
        Cell(technique_label(result.case)),
        Cell(result.case.backend),
        status_cell(result.status),
        Cell(format_size(result.static_bytes)),
        Cell(format_size(result.peak_allocated_bytes)),
        Cell(format_size(result.peak_above_static_bytes)),
        Cell(format_size(comparison.peak_saving_bytes)),
        _factor_cell(comparison.above_static_saving_factor, lower_is_better=False),
        time_cell(result),
        _factor_cell(comparison.time_ratio, lower_is_better=True),
        loss_cell(comparison.loss_difference, comparison.losses_agree)
        if finite(result)
        else Cell("not finite", "bad"),
        Cell("-", "muted") if same is None else Cell("yes") if same else Cell("no", "warn"),
    )


def frameworks_table(report: Report) -> Table | None:
    """The baselines of different backends beside each other; None with fewer than two."""
    comparisons = compare_frameworks(report)
    if not comparisons:
        return None
    return Table(
        title="Across frameworks",
        columns=(
            "Workload", "Backends", "Loss difference", "Peaks", "Peak ratio", "Step times",
            "Time ratio",
        ),
        numeric=5,
        rows=tuple(_frameworks_row(c) for c in comparisons),
        note=(
            "Baselines only: the same weights, data and steps, in float32. Losses must agree to"
            f" {FRAMEWORK_LOSS_TOLERANCE:g} before bytes are compared; ratios are the second"
            " backend's over the first's."
        ),
    )  # fmt: skip


def _frameworks_row(comparison: FrameworkComparison) -> tuple[Cell, ...]:
    pair = (comparison.first, comparison.second)
    return (
        Cell(comparison.first.case.workload),
        Cell(" vs ".join(_backend_on_device(r) for r in pair)),
        loss_cell(comparison.loss_difference, comparison.losses_agree),
        Cell(" vs ".join(format_size(r.peak_allocated_bytes) for r in pair)),
        Cell(format_factor(comparison.peak_ratio)),
        Cell(" vs ".join(format_seconds(r.step_seconds) for r in pair)),
        Cell(format_factor(comparison.time_ratio)),
    )


def _backend_on_device(result: Result) -> str:
    device = f" ({result.device})" if result.device else ""
    return f"{result.case.backend}{device}"


def categories_in(results: Iterable[Result | RankResult]) -> tuple[str, ...]:
    """Return the categories that occur, known ones first and in their usual order."""
    found = dict.fromkeys(name for r in results for name in r.by_category or {})
    usual = ("parameter", "buffer", "optimizer", "input", "gradient", "activation", "temporary")
    known = dict.fromkeys((*usual, *CATEGORIES))
    return tuple(n for n in known if n in found) + tuple(n for n in found if n not in known)


def categories_table(report: Report) -> Table | None:
    """Bytes by category at the instant of the peak; None where no backend can tell."""
    rows = [r for r in report.results if r.by_category]
    if not rows:
        return None
    names = categories_in(rows)
    return Table(
        title="What the peak is made of",
        columns=("Workload", "Technique", "Backend", "Peak", *(n.capitalize() for n in names)),
        numeric=len(names) + 1,
        rows=tuple(
            (
                Cell(r.case.workload),
                Cell(technique_label(r.case)),
                Cell(r.case.backend),
                Cell(format_size(r.peak_allocated_bytes)),
                *(_share_cell(r, n) for n in names),
            )
            for r in rows
        ),
        note=(
            "Bytes alive at the instant of the peak, with their share. Activation: allocated in"
            " forward and alive when backward began. Temporary: all else that the step"
            " allocated, recomputed activations and scratch inside kernels included."
        ),
    )


def _share_cell(result: Result, category: str) -> Cell:
    size = (result.by_category or {}).get(category)
    if not size:
        return Cell("-", "muted")
    if not result.peak_allocated_bytes:
        return Cell(format_size(size))
    return Cell(f"{format_size(size)} ({size / result.peak_allocated_bytes:.0%})")
