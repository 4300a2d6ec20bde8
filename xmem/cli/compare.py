"""`xmem compare`: the matrix of workloads, techniques and backends, and its report."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmem.errors import ReportError

if TYPE_CHECKING:
    from xmem.cli.progress import LiveProgress, PlainProgress
    from xmem.report.model import Case, Report, Result


class Stopped(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.exit_code = 128 + signal_number


@dataclass(frozen=True)
class Run:
    """What is to be run and where it goes."""

    cases: list[Case]
    folder: Path
    resume: bool
    timeout_seconds: float
    as_json: bool

    @property
    def case_folder(self) -> Path:
        """The folder of single results."""
        return self.folder / "cases"


def _a_number(seconds: float) -> float:
    if math.isnan(seconds):
        raise click.BadParameter("nan is not a time")
    return seconds


@click.command()
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    help="Backend to run; may be repeated. Default: all that are usable.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="Workload to train; may be repeated. Default: mlp, resnet18, bert, gpt2, unet3d.",
)
@click.option(
    "--technique",
    "techniques",
    multiple=True,
    metavar="NAME",
    help="Technique to apply; may be repeated. Default: all of one process, or with --world those"
    " of several ranks.",
)
@click.option(
    "--world",
    default=None,
    type=click.IntRange(min=1),
    metavar="RANKS",
    help="Train on so many ranks with data_parallel, zero1, zero3, tensor_parallel and pipeline,"
    " beside one process with the whole batch.",
)
@click.option(
    "--preset",
    default="quick",
    show_default=True,
    metavar="NAME",
    help="How large: quick, standard or paper.",
)
@click.option(
    "--device", default="auto", show_default=True, metavar="NAME", help="auto, cpu or cuda."
)
@click.option(
    "--threads",
    default=None,
    type=click.IntRange(min=1),
    help="CPU threads of each process; peaks depend on them. Default: 2; with several ranks 1.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    default=1800.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    callback=lambda _, __, seconds: _a_number(seconds),
    metavar="SECONDS",
    help="End a case that takes longer.",
)
@click.option(
    "--limit",
    default=None,
    metavar="SIZE",
    help="Refuse allocations beyond this many live bytes, e.g. 64MiB.",
)
@click.option(
    "--steps",
    default=None,
    type=click.IntRange(min=5),
    help="Train each case for so many steps, and show the loss curves; try it with --workload"
    " gpt2-text and resnet18-patterns, which learn something.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    default="xmem-report",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where results and reports go.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print only the report, as JSON, on stdout; progress goes to stderr.",
)
@click.option(
    "--resume", is_flag=True, help="Keep results of the same cases that are already in DIR."
)
def command(
    *,
    backends: Sequence[str],
    workloads: Sequence[str],
    techniques: Sequence[str],
    preset: str,
    device: str,
    threads: int | None,
    timeout_seconds: float,
    limit: str | None,
    steps: int | None,
    world: int | None,
    folder: Path,
    as_json: bool,
    resume: bool,
) -> None:
    """Train the same workloads on every backend with every technique and compare memory.

    Every case runs in a process of its own, or with --world in one for each rank; one that
    crashes, hangs or runs out of memory is a row, and the rest still runs. Writes
    DIR/report.json, report.md, report.html and DIR/cases/*.json.

    Exit status: 0 if every case is ok or unsupported (with --limit, out of memory is fine, too);
    1 if one ended with an error, a timeout, out of memory or an unavailable framework, or if
    losses differ by more than they may; 2 if the command line is wrong or no backend is usable;
    130 after Ctrl-C.
    """
    from xmem.cli.selection import check_names, choose_backends, choose_techniques
    from xmem.conformance.runner import matrix
    from xmem.sizes import parse_size
    from xmem.workloads import DEFAULT_WORKLOADS

    check_names(workloads, techniques, preset, device)
    limit_bytes = parse_size(limit) if limit is not None else None
    chosen, left_out = choose_backends(backends)
    names, ranks = choose_techniques(techniques, world)
    run = Run(
        cases=matrix(
            [info.name for info in chosen],
            list(dict.fromkeys(workloads or DEFAULT_WORKLOADS)),
            # Savings are shown as rows come, so what they are held against comes first.
            sorted(names, key=lambda name: name != "baseline"),
            preset=preset,
            device=device,
            threads=threads or (2 if ranks == 1 else 1),
            limit_bytes=limit_bytes,
            steps=steps,
            world=ranks,
        ),
        folder=folder,
        resume=resume,
        timeout_seconds=timeout_seconds,
        as_json=as_json,
    )
    notes = [f"{info.name} is left out: {info.reason}" for info in left_out]
    notes += [n for info in chosen if info.framework and (n := info.framework.first_run_note)]
    if ranks > 1 and world is None:
        notes.append(f"techniques of several ranks run on {ranks}; --world says on how many")
    if techniques and "baseline" not in techniques:
        notes.append("no savings are shown without --technique baseline")
    sys.exit(_run(run, notes, limited=limit_bytes is not None))


def _run(run: Run, notes: list[str], *, limited: bool) -> int:
    with _own_folder(run):
        return _run_alone(run, notes + _prepare(run), limited=limited)


@contextmanager
def _own_folder(run: Run) -> Iterator[None]:
    """Make the folder, and keep a second comparison from mixing its results in."""
    from filelock import FileLock, Timeout

    try:
        run.case_folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run.case_folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ReportError(
            f"another comparison is writing to {run.folder}; wait for it, or name another folder"
            " with -o"
        ) from error
    except OSError as error:
        raise ReportError(f"cannot write to {run.folder}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _run_alone(run: Run, notes: list[str], *, limited: bool) -> int:
    results: list[Result] = []
    stopped = None
    with _signals_raise(), _progress(run) as progress:
        for note in notes:
            progress.say(note)
        try:
            _collect(run, results, progress)
        except KeyboardInterrupt as interrupt:
            stopped = interrupt
    if results:
        _report(run, results)
    if stopped is not None:
        again = "" if run.resume else " again with --resume"
        click.echo(
            f"interrupted after {len(results)} of {len(run.cases)} cases; run the same command"
            f"{again} to go on from there",
            err=True,
        )
        return stopped.exit_code if isinstance(stopped, Stopped) else 130
    return exit_code(results, limited=limited)


def exit_code(results: Sequence[Result], *, limited: bool) -> int:
    """Return 0 if every case ended in a way that was to be expected, with the losses it should."""
    from xmem.report.compare import compare_frameworks, compare_techniques
    from xmem.report.write import make_report

    expected = {"ok", "unsupported"} | ({"out_of_memory"} if limited else set())
    report = make_report(results)
    agree = [c.losses_agree for c in compare_techniques(report)]
    agree += [c.losses_agree for c in compare_frameworks(report)]
    differ = False in agree
    return 0 if all(r.status in expected for r in results) and not differ else 1


def _prepare(run: Run) -> list[str]:
    """Clear results of these cases that are not to be kept."""
    from xmem.conformance.runner import finished, result_path
    from xmem.report.write import FILES

    if run.resume:
        kept = sum(finished(case, run.case_folder) is not None for case in run.cases)
        return [f"{kept} of {len(run.cases)} cases are taken from {run.case_folder}"]
    # Else an interrupted run would, resumed, take older results for its own.
    there = [p for c in run.cases if (p := result_path(c, run.case_folder)).exists()]
    for path in (*there, *(run.folder / name for name in FILES)):
        path.unlink(missing_ok=True)
    return [f"{len(there)} results in {run.case_folder} are replaced"] if there else []


def _collect(run: Run, results: list[Result], progress: LiveProgress | PlainProgress) -> None:
    from xmem.conformance.runner import run_cases
    from xmem.report.compare import BASELINE, baseline_key, compare_technique

    baselines: dict[Case, Result] = {}
    coming = run_cases(
        run.cases,
        run.case_folder,
        resume=run.resume,
        timeout_seconds=run.timeout_seconds,
        on_status=progress.say,
    )
    for case in run.cases:
        progress.begin(case)
        result = next(coming)
        results.append(result)
        key = baseline_key(case)
        if case.technique == BASELINE and result.status == "ok":
            baselines[key] = result
        progress.end(compare_technique(result, baselines.get(key)))


def _progress(run: Run) -> LiveProgress | PlainProgress:
    from xmem.cli.progress import LiveProgress, PlainProgress

    stream = sys.stderr if run.as_json else sys.stdout
    if stream.isatty():
        return LiveProgress(stream, run.cases)
    return PlainProgress(stream, len(run.cases))


def _report(run: Run, results: list[Result]) -> None:
    from xmem.report.write import make_report, write_report

    report = make_report(results)
    paths = write_report(report, run.folder)
    if run.as_json:
        click.echo(paths[0].read_text(encoding="utf-8"), nl=False)
        return
    _summary(report)
    click.echo(f"results:  {run.case_folder}")
    for path in paths:
        click.echo(f"report:   {path}")


def _summary(report: Report) -> None:
    from xmem.cli.output import print_table
    from xmem.report.facts import statuses_table
    from xmem.report.ranks import worlds_table
    from xmem.report.tables import frameworks_table

    for table in (frameworks_table(report), worlds_table(report), statuses_table(report)):
        if table is not None:
            click.echo(f"\n{table.title}")
            print_table(table)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let a polite end (kill, a closed terminal) save what is done, as Ctrl-C does."""
    import signal

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    # A signal that is ignored (SIGHUP under nohup) stays ignored.
    watched = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, stop) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
