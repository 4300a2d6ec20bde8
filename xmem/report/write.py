"""Gather results into a report and write every form of it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from xmem.report.model import Machine, Report, Result, write_json, write_whole

FILES = ("report.json", "report.md", "report.html")


def make_report(results: Iterable[Result]) -> Report:
    """Gather results, made on this machine, into a report."""
    import xmem

    return Report(
        results=tuple(results),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        xmem_version=xmem.__version__,
        machine=Machine.here(),
    )


def write_report(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write report.json, report.md and report.html; returns their paths."""
    from xmem.report.html import html
    from xmem.report.markdown import markdown

    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name for name in FILES)
    write_json(report, paths[0])
    write_whole(markdown(report).encode(), paths[1])
    write_whole(html(report).encode(), paths[2])
    return paths
