"""`xmem backends`: what is installed, usable or why not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from xmem.plugins import BackendInfo
    from xmem.report.tables import Table


def backends_table(infos: list[BackendInfo]) -> Table:
    """Return the installed backends as a table."""
    from xmem.report.tables import Cell, Table

    return Table(
        title="Backends",
        columns=("Backend", "Distribution", "Framework version", "Usable"),
        numeric=0,
        rows=tuple(
            (
                Cell(info.name),
                Cell(info.distribution),
                Cell(info.framework_version or "-"),
                Cell("yes", "good") if info.usable else Cell(f"no: {info.reason}", "bad"),
            )
            for info in infos
        ),
    )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, as_json: bool) -> None:
    """List the installed backends, usable or why not."""
    from xmem.cli.output import print_table
    from xmem.plugins import backend_infos

    infos = backend_infos()
    if as_json:
        click.echo(json.dumps([_record(info) for info in infos], indent=1))
    elif infos:
        print_table(backends_table(infos))
    else:
        click.echo("no distribution that offers a backend is installed")


def _record(info: BackendInfo) -> dict[str, object]:
    return {
        "name": info.name,
        "distribution": info.distribution,
        "framework_version": info.framework_version,
        "usable": info.usable,
        "reason": info.reason,
    }
