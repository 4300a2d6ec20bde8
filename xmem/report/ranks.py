"""The tables of cases with several ranks: what each rank holds and sends.

As in `xmem.report.tables`, everything here is text that its renderer has yet to make harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from xmem.report.compare import compare_techniques
from xmem.report.model import RankResult, Report, Result
from xmem.report.tables import (
    Cell,
    Table,
    case_label,
    categories_in,
    format_factor,
    format_seconds,
)
from xmem.sizes import format_size

_MAY_BE_EMPTY = ("Buffers", "In communication")


def _of_ranks(report: Report) -> list[Result]:
    return [r for r in report.results if r.status == "ok" and r.ranks]


def worlds_table(report: Report) -> Table | None:
    """Each case of several ranks beside one process, with what the ranks tell each other."""
    rows = _of_ranks(report)
    if not rows:
        return None
    baselines = {id(c.result): c.baseline for c in compare_techniques(report)}
    table = Table(
        title="Several ranks beside one process",
        columns=(
            "Workload", "Technique", "Backend", "Ranks", "Engine", "Static",
            "Static, of one process", "Peak", "Peak, of one process", "Sent a step",
            "Calls a step", "Buffers", "In communication",
        ),
        numeric=8,
        rows=tuple(_world_row(r, baselines[id(r)]) for r in rows),
        note=(
            "Of the rank with the most; one process has the whole batch, the same weights and"
            " steps. Sent: what one rank hands to others in one step, by the usual ring or"
            " pairwise algorithm. Buffers: the most that buckets and packed copies took at once,"
            " which is what aggregation itself costs; a batch that fits on one device may not fit"
            " on several for it. A dash, or no such column: tensors are sent from where they lie."
            " In communication: seconds of a step inside calls or waiting for other ranks, where"
            " the backend can tell."
        ),
    )  # fmt: skip
    return _without_empty(table)


def _without_empty(table: Table) -> Table:
    """Return a table without those columns of what aggregation costs in which nothing stands."""
    kept = [
        index
        for index, name in enumerate(table.columns)
        if name not in _MAY_BE_EMPTY or any(row[index].text != "-" for row in table.rows)
    ]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        numeric=sum(table.is_numeric(index) for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
    )


def _world_row(result: Result, baseline: Result | None) -> tuple[Cell, ...]:
    statics = [r.static_bytes for r in result.ranks]
    return (
        Cell(result.case.workload),
        Cell(result.case.technique),
        Cell(result.case.backend),
        Cell(str(result.case.world)),
        Cell(result.engine or "-"),
        Cell(format_size(_most(statics))),
        _share(_most(statics), baseline.static_bytes if baseline else None),
        Cell(format_size(result.peak_allocated_bytes)),
        _share(result.peak_allocated_bytes, baseline.peak_allocated_bytes if baseline else None),
        Cell(format_size(most_of(result, lambda rank: sum(rank.sent_bytes.values())))),
        Cell(_count(most_of(result, lambda rank: sum(rank.calls.values())))),
        Cell(format_size(most_of(result, lambda rank: rank.buffer_bytes))),
        Cell(format_seconds(_slowest(result))),
    )


def most_of(result: Result, read: Callable[[RankResult], int | None]) -> int | None:
    """Return the highest figure over ranks; None where none is known."""
    return _most([read(rank) for rank in result.ranks])


def _slowest(result: Result) -> float | None:
    known = [r.communication_seconds for r in result.ranks if r.communication_seconds is not None]
    return max(known, default=None)


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def _share(size: int | None, whole: int | None) -> Cell:
    if size is None or not whole:
        return Cell("-", "muted")
    return Cell(format_factor(size / whole), "good" if size < 0.99 * whole else "")


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def rank_tables(report: Report) -> tuple[Table, ...]:
    """One table for each case of several ranks: memory by category, bytes sent by kind."""
    return tuple(_rank_table(result) for result in _of_ranks(report))


def _rank_table(result: Result) -> Table:
    categories = categories_in(result.ranks)
    kinds = tuple(dict.fromkeys(kind for rank in result.ranks for kind in rank.sent_bytes))
    columns = (
        "Rank", "Static", "Peak", "Above static", *(name.capitalize() for name in categories),
        *(f"Sent: {kind.replace('_', ' ')}" for kind in kinds), "Buffers", "In communication",
        "Step time", "Process peak",
    )  # fmt: skip
    return _without_empty(
        Table(
            title=f"By rank: {case_label(result)}",
            columns=columns,
            numeric=len(columns) - 1,
            rows=tuple(_rank_row(rank, categories, kinds) for rank in result.ranks),
        )
    )


def _rank_row(
    rank: RankResult, categories: Iterable[str], kinds: Iterable[str]
) -> tuple[Cell, ...]:
    return (
        Cell(str(rank.rank)),
        Cell(format_size(rank.static_bytes)),
        Cell(format_size(rank.peak_allocated_bytes)),
        Cell(format_size(rank.peak_above_static_bytes)),
        *(_part(rank.by_category, name) for name in categories),
        *(_sent(rank, kind) for kind in kinds),
        Cell(format_size(rank.buffer_bytes)),
        Cell(format_seconds(rank.communication_seconds)),
        Cell(format_seconds(rank.step_seconds)),
        Cell(format_size(rank.peak_process_bytes)),
    )


def _part(sizes: Mapping[str, int] | None, name: str) -> Cell:
    size = (sizes or {}).get(name)
    return Cell(format_size(size)) if size else Cell("-", "muted")


def _sent(rank: RankResult, kind: str) -> Cell:
    calls = rank.calls.get(kind)
    if not calls:
        return Cell("-", "muted")
    return Cell(f"{format_size(rank.sent_bytes.get(kind))} in {calls}")
