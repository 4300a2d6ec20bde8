"""`xmem monitor FILE`: what a monitor wrote, as it grows, and into dashboards afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from xmem.monitor_log import Run, StepRecord
    from xmem.report.tables import Table

_WAIT_SECONDS = 0.2


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--last",
    default=10,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="How many steps to show.",
)
@click.option("--follow", is_flag=True, help="Go on as the file grows, until Ctrl-C.")
@click.option(
    "--to",
    "target",
    default=None,
    metavar="WHERE",
    help="Also send all steps to tensorboard:FOLDER or wandb:PROJECT.",
)
def command(file: Path, *, last: int, follow: bool, target: str | None) -> None:
    """Show what xmem.Monitor wrote: the latest steps, the peak and where it was, and growth.

    A file may hold several runs; the last is shown. Lines that were cut off (by a crash, a full
    disk) are counted and left out. Exit status: 0; 2 if the file or the target is wrong.
    """
    from xmem.cli.output import print_table
    from xmem.monitor_log import parse_log

    if follow and target is not None:
        raise click.UsageError("--to sends a file as it is, and --follow waits for more of it")
    content = file.read_bytes()
    log = parse_log(file, content)
    if target is not None:
        _send(target, log.runs)
    run = log.runs[-1] if log.runs else None
    if run is None or not run.steps:
        click.echo(f"{file} has no steps yet")
    else:
        print_table(_table(run.steps[-last:]))
        click.echo()
        for line in _summary(run):
            click.echo(line)
    if len(log.runs) > 1:
        click.echo(f"earlier runs in this file, not shown: {len(log.runs) - 1}")
    if log.cut_lines:
        click.echo(f"lines that are cut off and left out: {log.cut_lines}")
    if follow:
        _follow(file, content.rfind(b"\n") + 1)


def _table(steps: Sequence[StepRecord]) -> Table:
    from xmem.report.tables import Cell, Table, format_seconds
    from xmem.sizes import format_size

    names = list(dict.fromkeys(name for s in steps for name in s.values))
    columns = ("Step", *names, "Allocated", "Peak", "Reserved", "Process", "Fragmented", "Time")
    rows = (
        (
            str(s.step),
            *(_value(s.values.get(name)) for name in names),
            format_size(s.allocated_bytes),
            format_size(s.peak_allocated_bytes),
            format_size(s.reserved_bytes),
            format_size(s.process_bytes),
            "-" if s.fragmentation is None else f"{s.fragmentation:.1%}",
            format_seconds(s.step_seconds),
        )
        for s in steps
    )
    cells = tuple(tuple(Cell(text) for text in row) for row in rows)
    return Table("Steps", columns, len(columns), cells)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else str(value)


def _summary(run: Run) -> Iterator[str]:
    """Yield what a person asks first: how much, where, and does it grow."""
    from xmem.sizes import format_size

    steps = run.steps
    if run.begin is not None:
        begin = run.begin
        yield f"{begin.backend} {begin.framework_version} on {begin.device}, {len(steps)} lines"
    top = max(steps, key=lambda s: s.peak_allocated_bytes or s.allocated_bytes)
    if top.peak_allocated_bytes is not None:
        yield f"peak {format_size(top.peak_allocated_bytes)} at step {top.step}{_since(run, top)}"
    owned = next((s.owned_bytes for s in reversed(steps) if s.owned_bytes), None)
    if owned:
        yield "owned: " + ", ".join(f"{name} {format_size(size)}" for name, size in owned.items())
    yield _growth(steps)
    refused = steps[-1].out_of_memory_count
    if refused:
        yield f"requests refused for want of memory: {refused}"
    if run.end is not None and run.end.error:
        yield f"ended by {run.end.error} after step {run.end.step}"


def _since(run: Run, top: StepRecord) -> str:
    every = run.begin.every if run.begin is not None else 1
    return "" if every == 1 else f" or one of the {every - 1} before it"


def _growth(steps: Sequence[StepRecord]) -> str:
    from xmem.sizes import format_size
    from xmem.slopes import WINDOWS, Series

    if len(steps) < WINDOWS:
        return f"growth: {WINDOWS} lines are needed to tell"
    series = Series()
    for step in steps:
        series.add(step.step, step.allocated_bytes)
    trend = series.trend()
    if trend is None:
        return "growth: none that goes on"
    growth = format_size(round(trend.per_step))
    return f"growth: {growth} a step since step {trend.since_step}; xmem.watch_leaks() names owners"


def _send(target: str, runs: Sequence[Run]) -> None:
    """Send all steps to a dashboard; steps that were run again replace nothing there."""
    from xmem.errors import UsageError
    from xmem.monitor_sinks import WeightsAndBiases, tensorboard

    kind, _, name = target.partition(":")
    makers = {"tensorboard": tensorboard, "wandb": WeightsAndBiases}
    if kind not in makers or not name:
        raise UsageError(f"--to {target}: write tensorboard:FOLDER or wandb:PROJECT")
    sink = makers[kind](name)
    count = 0
    try:
        for run in runs:
            for step in run.steps:
                sink.write(step)
                count += 1
    finally:
        sink.close()
    click.echo(f"sent {count} steps to {sink.name} {name}")


def _follow(file: Path, begin: int) -> None:
    """Print each step behind a place in the file on a line of its own, until Ctrl-C."""
    from xmem.monitor_log import EndRecord, StepRecord, parse_line
    from xmem.report.text import plain_table

    try:
        with file.open("rb") as lines:
            lines.seek(begin)
            rest = b""
            while True:
                rest += lines.read()
                *whole, rest = rest.split(b"\n")
                for line in whole:
                    record = parse_line(line)
                    if isinstance(record, StepRecord):
                        click.echo(plain_table(_table([record])).splitlines()[-1])
                    elif isinstance(record, EndRecord):
                        click.echo(f"ended after step {record.step} {record.error}".rstrip())
                if not whole:
                    time.sleep(_WAIT_SECONDS)
    except KeyboardInterrupt:
        click.echo()
