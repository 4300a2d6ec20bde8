"""Show cases as they come: a table that grows above a bar on a terminal, else lines."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Protocol

import click

from xmem.report.tables import (
    Tone,
    clean,
    format_factor,
    format_seconds,
    status_cell,
    technique_label,
)
from xmem.report.text import plain_line, remarks, styled
from xmem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from xmem.report.compare import TechniqueComparison
    from xmem.report.model import Case


class Progress(Protocol):
    """Someone is told of every case."""

    def say(self, message: str) -> None:
        """Say something that is no result."""

    def begin(self, case: Case) -> None:
        """Say that a case starts."""

    def end(self, comparison: TechniqueComparison) -> None:
        """Say how a case ended."""


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """One line per case, flushed at once, without colours: for pipes, logs and CI."""

    def __init__(self, stream: IO[str], count: int) -> None:
        self._stream = stream
        self._count = count
        self._done = 0

    def __exit__(self, *_: object) -> None:
        """Do nothing: every line is out."""

    def say(self, message: str) -> None:
        """Print a line."""
        click.echo(clean(message), file=self._stream)

    def begin(self, case: Case) -> None:
        """Print nothing; the line comes with the result."""

    def end(self, comparison: TechniqueComparison) -> None:
        """Print the result."""
        self._done += 1
        width = len(str(self._count))
        self.say(f"[{self._done:{width}}/{self._count}] {plain_line(comparison)}")


def _names(case: Case) -> tuple[str, str, str]:
    return case.workload, technique_label(case), case.backend


class LiveProgress(AbstractContextManager["LiveProgress"]):
    """A row per case under one heading, and a bar below that says what runs now."""

    def __init__(self, stream: IO[str], cases: Sequence[Case]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._console = Console(file=stream, highlight=False)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=len(cases))
        headings = ("workload", "technique", "backend")
        self._widths = tuple(
            max(map(len, column)) for column in zip(headings, *map(_names, cases), strict=True)
        )
        self._last_reason = ""

    def __enter__(self) -> LiveProgress:
        """Print the heading and start the bar."""
        self._row(
            ("workload", "technique", "backend"),
            styled("status", "muted"),
            *("peak", "above", "saving", "step", "time"),
        )
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._console.print(styled(message, "muted"))

    def begin(self, case: Case) -> None:
        """Name the case beside the bar."""
        self._bar.update(self._task, description=clean(" ".join(_names(case))))

    def end(self, comparison: TechniqueComparison) -> None:
        """Print the row, and the reason of a bad end where it is not the last one again."""
        result = comparison.result
        names = _names(result.case)
        status = status_cell(result.status)
        if result.status == "ok":
            self._row(
                names,
                styled(f"{status.text:6}", status.tone),
                format_size(result.peak_allocated_bytes, digits=1),
                format_size(result.peak_above_static_bytes, digits=1),
                format_factor(comparison.above_static_saving_factor),
                format_seconds(result.step_seconds),
                format_factor(comparison.time_ratio),
            )
            for remark in remarks(comparison):
                self._below(remark, "warn")
        else:
            self._row(names, styled(status.text, status.tone))
            if result.reason and result.reason != self._last_reason:
                self._below(result.reason, "muted")
                self._last_reason = result.reason
        self._bar.advance(self._task)

    def _row(self, names: tuple[str, str, str], status: Text, *figures: str) -> None:
        """Print a row that fits into 80 columns with the names of this distribution."""
        from rich.text import Text

        row = Text()
        for name, width in zip(names, self._widths, strict=True):
            row.append(f"{clean(name):{width}} ")
        row.append_text(status)
        for figure, width in zip(figures, (10, 11, 8, 9, 6), strict=False):
            row.append(f"{figure:>{width}}")
        self._console.print(row, no_wrap=True, overflow="ignore", crop=False)

    def _below(self, text: str, tone: Tone) -> None:
        from rich.padding import Padding

        self._console.print(Padding(styled(text, tone), (0, 0, 0, 2)))
