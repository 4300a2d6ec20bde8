"""`xmem schema`: the JSON schemas of the files that xmem writes."""

from __future__ import annotations

import json
from importlib import import_module

import click

_SCHEMAS = {
    "report": "xmem.report.model",
    "snapshot": "xmem.snapshots",
    "diagnosis": "xmem.diagnosis",
    "monitor": "xmem.monitor_log",
}


@click.command()
@click.argument("kind", type=click.Choice(list(_SCHEMAS)), default="report")
def command(*, kind: str) -> None:
    """Print a JSON schema.

    KIND: report (report.json, the default), snapshot (xmem.pool.snapshot), diagnosis
    (diagnosis.json of xmem.oom_guard), monitor (a line of xmem.Monitor).
    """
    click.echo(json.dumps(import_module(_SCHEMAS[kind]).schema(), indent=1))
