"""`xmem schema`: the JSON schema of report.json."""

from __future__ import annotations

import json

import click


@click.command()
def command() -> None:
    """Print the JSON schema of a report."""
    from xmem.report.model import schema

    click.echo(json.dumps(schema(), indent=1))
