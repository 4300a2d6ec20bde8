"""Gather results into a report and write every form of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from xmem.report.model import Machine, Report, Result, write_json

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
    _write_text(markdown(report), paths[1])
    _write_text(html(report), paths[2])
    return paths


def _write_text(text: str, path: Path) -> None:
    """Write a text in one step: a reader sees all of it or nothing."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
