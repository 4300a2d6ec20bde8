"""A report on the terminal: rich tables, and one plain line per case where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmem.report.compare import (
    STEADY_TIME_SPREAD,
    TechniqueComparison,
    finite,
    time_spread,
)
from xmem.report.tables import (
    Table,
    Tone,
    case_label,
    clean,
    format_factor,
    format_seconds,
    status_cell,
)
from xmem.sizes import format_size

if TYPE_CHECKING:
    import rich.table
    import rich.text

_STYLES: dict[Tone, str] = {
    "": "",
    "good": "green",
    "warn": "yellow",
    "bad": "red",
    "muted": "dim",
}


def styled(text: str, tone: Tone) -> rich.text.Text:
    """Return text in the colour of its tone, without markup of its own."""
    from rich.text import Text

    return Text(clean(text), style=_STYLES[tone])


def rich_table(table: Table) -> rich.table.Table:
    """Return a table for a terminal."""
    from rich import box
    from rich.table import Table as RichTable

    rendered = RichTable(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(table.columns):
        rendered.add_column(
            styled(column, ""),
            justify="right" if table.is_numeric(index) else "left",
            overflow="fold",
        )
    for row in table.rows:
        rendered.add_row(*(styled(cell.text, cell.tone) for cell in row))
    return rendered


def plain_table(table: Table) -> str:
    """Return a table as aligned text, for pipes and log files."""
    rows = [[clean(c) for c in table.columns]]
    rows += [[clean(cell.text) for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if table.is_numeric(index) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def plain_line(comparison: TechniqueComparison) -> str:
    """Return one result as a line for a log: bytes, saving, time; or why there are none."""
    result = comparison.result
    parts = [f"{case_label(result)}: {status_cell(result.status).text}"]
    if result.status != "ok":
        if result.reason:
            parts.append(result.reason)
        return clean("; ".join(parts))
    parts.append(f"peak {format_size(result.peak_allocated_bytes)}")
    parts.append(f"above static {format_size(result.peak_above_static_bytes)}")
    if comparison.above_static_saving_factor is not None:
        parts.append(f"saving {format_factor(comparison.above_static_saving_factor)}")
    parts.append(f"step {format_seconds(result.step_seconds)}")
    if comparison.time_ratio is not None:
        parts.append(f"time {format_factor(comparison.time_ratio)}")
    parts.extend(remarks(comparison))
    return clean("; ".join(parts))


def remarks(comparison: TechniqueComparison) -> list[str]:
    """Return what a reader must not miss in a result that ended well."""
    found = []
    if not finite(comparison.result):
        found.append("LOSSES ARE NOT FINITE")
    elif comparison.losses_agree is False:
        found.append("LOSSES DIFFER from the baseline")
    if comparison.repeatable is False:
        found.append("peaks differ between steps")
    spread = time_spread(comparison.result)
    if spread is not None and spread > STEADY_TIME_SPREAD:
        found.append(f"times spread by {spread:.0%}")
    if comparison.result.warnings:
        found.append(f"warned: {comparison.result.warnings[0]}")
    return found
