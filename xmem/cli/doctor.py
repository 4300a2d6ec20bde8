"""`xmem doctor`: is this environment fit, and if not, what to do."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from xmem.report.tables import Cell

Verdict = Literal["ok", "note", "problem"]
Finding = tuple[str, Verdict, str]


@click.command()
@click.option(
    "--distributed",
    is_flag=True,
    help="Also start two ranks of each usable backend, and let them communicate.",
)
def command(*, distributed: bool) -> None:
    """Check this environment: Python, compiler, backends, companions, foreign packages.

    Exit status: 0 without problems, 1 with one.
    """
    from xmem.cli.output import print_table
    from xmem.report.tables import Cell, Table

    found = list(_findings())
    if distributed:
        found += _distributed()
    rows: list[tuple[Cell, ...]] = [
        (Cell(what), Cell(verdict, _TONES[verdict]), Cell(text)) for what, verdict, text in found
    ]
    print_table(Table("Doctor", ("What", "Verdict", "Found"), 0, tuple(rows)))
    if any(verdict == "problem" for _, verdict, _ in found):
        raise SystemExit(1)


_TONES: dict[Verdict, Literal["good", "warn", "bad"]] = {
    "ok": "good",
    "note": "warn",
    "problem": "bad",
}


def _findings() -> Iterator[Finding]:
    yield "python", "ok", f"{platform.python_version()} at {sys.executable}"
    yield "system", "ok", f"{platform.system()} {platform.machine()}"
    yield _compiler()
    yield from _backends()
    yield from _foreign()


def _compiler() -> Finding:
    from xmem.native.build import find_compiler

    compiler = find_compiler()
    if compiler is None:
        return (
            "compiler",
            "note",
            "no C++ compiler; exact counting on a CPU needs one. Install g++ (Debian, Ubuntu:"
            " apt-get install g++) or name another one in the environment variable CXX.",
        )
    return "compiler", "ok", compiler


def _backends() -> Iterator[Finding]:
    from xmem.cli.selection import HOW_TO_GET_ONE
    from xmem.plugins import backend_infos

    infos = backend_infos()
    for info in infos:
        if info.usable:
            version = info.framework_version or "unknown version"
            yield f"backend {info.name}", "ok", f"{version}, from {info.distribution}"
        else:
            yield f"backend {info.name}", "note", info.reason
        for name in info.framework.companions if info.framework and info.usable else ():
            yield _companion(info.name, name)
    if not any(info.usable for info in infos):
        yield "backends", "problem", f"none is usable. {HOW_TO_GET_ONE}"


def _distributed() -> Iterator[Finding]:
    from xmem.distributed import checking
    from xmem.plugins import backend_infos

    for finding in checking.findings(backend_infos()):
        yield finding.what, finding.verdict, finding.text


def _companion(backend: str, name: str) -> Finding:
    try:
        return f"{backend}: {name}", "ok", metadata.version(name)
    except metadata.PackageNotFoundError:
        return (
            f"{backend}: {name}",
            "note",
            f"not installed; {backend} is slow or incomplete without it. Install it with:"
            f" pip install 'xmem-train[{backend}]'",
        )


def _foreign() -> Iterator[Finding]:
    from xmem import foreign

    found = foreign.find()
    if not found:
        yield "foreign xmem", "ok", "none"
    for package in found:
        yield "foreign xmem", "problem", package.message
