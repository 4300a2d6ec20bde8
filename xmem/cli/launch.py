"""`xmem launch`: run a script on several ranks of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from xmem.distributed.supervising import Outcome


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "--ranks", required=True, type=click.IntRange(1, 1024), metavar="N", help="How many."
)
@click.option(
    "--backend",
    "backend_name",
    default=None,
    metavar="NAME",
    help="What the script uses; may be left out where one is usable.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    default=None,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="The longest wait of a rank for others, where the script's init() has none.",
)
@click.option(
    "--grace",
    "grace_seconds",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="How long ranks may take to end by themselves when one has failed, or after a signal.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    ranks: int,
    backend_name: str | None,
    timeout_seconds: float | None,
    grace_seconds: float,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT on several ranks of this host, with torchrun or mpirun as the backend needs.

    Every line that a rank prints is passed on behind its number. When a rank fails, all are ended.
    Exit status: 0; the first failing rank's, 128 + signal where one ended it; 2 if the command
    line is wrong.
    """
    from xmem.distributed.launching import Job, launch

    if not module and not Path(script).is_file():
        raise click.BadParameter(f"there is no file {script!r}; -m runs a module")
    name, launcher = _backend(backend_name)
    job = Job(
        backend=name,
        launcher=launcher,
        ranks=ranks,
        script=("-m", script, *arguments) if module else (script, *arguments),
        timeout_seconds=timeout_seconds,
        grace_seconds=grace_seconds,
    )
    with contextlib.ExitStack() as opened:
        output, errors = (_written_to(stream, opened) for stream in (sys.stdout, sys.stderr))
        outcome = launch(job, output=output, errors=errors)
    if outcome.signal == signal.SIGPIPE and sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads the rest
    elif outcome.status:
        click.echo(_last_word(outcome), err=True)
    raise SystemExit(outcome.status)


def _written_to(stream: TextIO | None, opened: contextlib.ExitStack) -> IO[bytes]:
    """Return where bytes go; nowhere for a stream that was closed before this process began."""
    if stream is None:
        return opened.enter_context(Path(os.devnull).open("wb"))
    return stream.buffer


def _backend(name: str | None) -> tuple[str, str]:
    """Return the backend to start, and its launcher."""
    from xmem.cli.selection import choose_backends
    from xmem.errors import UsageError

    infos, _ = choose_backends([name] if name else [])
    with_launcher = [info for info in infos if info.framework and info.framework.launcher]
    if not with_launcher:
        raise UsageError(
            f"the ranks of {', '.join(repr(info.name) for info in infos)} cannot be started: the"
            " backend names no launcher"
        )
    if len(with_launcher) > 1:
        names = " or ".join(f"--backend {info.name}" for info in with_launcher)
        raise UsageError(f"several backends are usable; say which one the script uses: {names}")
    info = with_launcher[0]
    if not info.usable:
        raise UsageError(f"backend {info.name!r} is not usable: {info.reason}")
    assert info.framework is not None
    return info.name, info.framework.launcher


def _last_word(outcome: Outcome) -> str:
    if outcome.signal is not None:
        return f"xmem launch: ended by {signal.Signals(outcome.signal).name}"
    ended = f"ended with {outcome.status}"
    if outcome.status > 128 and outcome.status - 128 in set(signal.Signals):
        ended = f"was ended by {signal.Signals(outcome.status - 128).name}"
    return f"xmem launch: rank {outcome.rank} {ended}, the first to fail"
