"""`xmem conformance`: the shared suite on a backend, through pytest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

import click


@click.command()
@click.option(
    "--backend",
    "backends",
    multiple=True,
    required=True,
    metavar="NAME",
    help="Backend to hold to the suite; may be repeated.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="Only this workload; may be repeated.",
)
@click.option(
    "--technique",
    "techniques",
    multiple=True,
    metavar="NAME",
    help="Only this technique; may be repeated.",
)
@click.option("--preset", default=None, metavar="NAME", help="How large: quick, standard, paper.")
@click.option("--device", default=None, metavar="NAME", help="auto, cpu or cuda.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    backends: Sequence[str],
    workloads: Sequence[str],
    techniques: Sequence[str],
    preset: str | None,
    device: str | None,
    pytest_arguments: Sequence[str],
) -> None:
    """Run the conformance suite on installed backends.

    A front for `python -m pytest --pyargs xmem.conformance -p xmem.conformance.plugin`; what
    follows `--` goes to pytest. The exit status is pytest's; 2 if it could not start.
    """
    from xmem.cli import WrongInput
    from xmem.cli.selection import check_names, known_backends

    known_backends(backends)
    check_names(workloads, techniques, preset or "quick", device or "auto")
    if importlib.util.find_spec("pytest") is None:
        raise WrongInput(
            "the conformance suite needs pytest, which is not installed. Install it with:"
            " pip install 'xmem-train[test]'"
        )
    options = [("--backend", name) for name in backends]
    options += [("--workload", name) for name in workloads]
    options += [("--technique", name) for name in techniques]
    options += [("--preset", preset)] if preset else []
    options += [("--device", device)] if device else []
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "xmem.conformance",
         "-p", "xmem.conformance.plugin", *(part for pair in options for part in pair),
         *pytest_arguments],
        check=False,
    ).returncode  # fmt: skip
    raise SystemExit(code if code >= 0 else 128 - code)
