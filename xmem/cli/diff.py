"""`xmem diff A B`: what changed between two reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from xmem.report.model import Report


@click.command()
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--tolerance",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0),
    metavar="PERCENT",
    help="How much a peak may grow.",
)
def command(a: Path, b: Path, *, tolerance: float) -> None:
    """Compare two reports: report.json files, or folders that hold one.

    Exit status: 0 if no peak grew by more than the tolerance, 1 if one did, or if a case that was
    ok in A is not ok in B; 2 if a report cannot be read. Cases of only one report are shown and
    do not count.
    """
    from xmem.cli.output import print_table
    from xmem.report.diff import diff, diff_table, worse

    fraction = tolerance / 100
    changes = diff(_read(a), _read(b))
    print_table(diff_table(changes, fraction))
    bad = worse(changes, fraction)
    click.echo(f"{len(bad)} of {len(changes)} cases are worse in B (tolerance {tolerance:g} %)")
    if bad:
        raise SystemExit(1)


def _read(path: Path) -> Report:
    from xmem.errors import ReportError
    from xmem.report.model import Report, read_json

    file = path / "report.json" if path.is_dir() else path
    if not file.is_file():
        raise ReportError(f"there is no report.json in {path}; `xmem compare -o {path}` writes one")
    return read_json(file, Report)
