"""Printing: colours and tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from xmem.report.tables import Table


def print_table(table: Table) -> None:
    """Print a table to stdout, as rich draws it on a terminal and as plain text elsewhere."""
    from xmem.report import text

    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(text.rich_table(table))
    else:
        click.echo(text.plain_table(table))
