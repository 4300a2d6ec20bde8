"""A report as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from xmem.report import facts, ranks
from xmem.report.model import Report
from xmem.report.tables import (
    Table,
    categories_table,
    clean,
    frameworks_table,
    results_table,
)

_SPECIAL = re.compile(r"([\\`*\[\]<>|~#&$!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def escape(text: str) -> str:
    """Return text that Markdown shows as it is: no markup, no link, no new table cell."""
    return _SPECIAL.sub(r"\\\1", clean(text))


def markdown(report: Report) -> str:
    """Return the whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield "# Memory of training, compared"
    yield ""
    yield from facts.MEANING
    yield ""
    for table in (
        results_table(report),
        facts.curves_table(report),
        frameworks_table(report),
        categories_table(report),
        facts.counts_table(report),
        ranks.worlds_table(report),
        *ranks.rank_tables(report),
    ):
        yield from _table(table)
    yield from _failures(report)
    yield from _warnings(report)
    for table in (
        facts.backends_table(report),
        facts.machine_table(report),
        facts.settings_table(report),
    ):
        yield from _table(table)


def _table(table: Table | None) -> Iterator[str]:
    if table is None:
        return
    yield f"## {escape(table.title)}"
    yield ""
    if table.note:
        yield escape(table.note)
        yield ""
    yield _row([escape(c) for c in table.columns])
    yield _row(["---:" if table.is_numeric(i) else "---" for i in range(len(table.columns))])
    for row in table.rows:
        yield _row([escape(cell.text) or " " for cell in row])
    yield ""


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _failures(report: Report) -> Iterator[str]:
    found = facts.failures(report)
    if not found:
        return
    yield "## What did not run to the end"
    yield ""
    for failure in found:
        yield f"- **{escape(failure.status.replace('_', ' '))}**: {_cases(failure.cases)}"
        yield f"  {escape(failure.reason) or 'no reason was given'}"
    yield ""


def _warnings(report: Report) -> Iterator[str]:
    found = facts.warnings(report)
    if not found:
        return
    yield "## Warnings"
    yield ""
    for message, cases in found:
        yield f"- {escape(message)}"
        yield f"  In: {_cases(cases)}"
    yield ""


def _cases(cases: tuple[str, ...]) -> str:
    return ", ".join(escape(c) for c in cases)
