"""The command line: one module per verb, imported when the verb is used."""

from __future__ import annotations

import importlib
from typing import Any

import click

import xmem
from xmem.errors import BackendNotFoundError, ReportError, UsageError, XmemError, unknown

_VERBS = (
    "backends",
    "compare",
    "conformance",
    "diff",
    "doctor",
    "find-batch",
    "launch",
    "monitor",
    "plan",
    "schema",
)
_USAGE_ERRORS = (UsageError, BackendNotFoundError, ReportError)


class WrongInput(click.ClickException):
    """What the caller can correct; nothing has been run."""

    exit_code = 2


class Verbs(click.Group):
    """The group of verbs; each lives in `xmem.cli.<verb>` as `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs."""
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb."""
        if cmd_name not in _VERBS:
            return None
        command: click.Command = importlib.import_module(
            f"xmem.cli.{cmd_name.replace('-', '_')}"
        ).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that was asked for, or say which is nearest."""
        if args and not args[0].startswith("-") and args[0] not in _VERBS:
            raise click.UsageError(unknown("command", args[0], _VERBS), ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; an error of ours is a message, not a traceback."""
        try:
            return super().invoke(ctx)
        except XmemError as error:
            kind = WrongInput if isinstance(error, _USAGE_ERRORS) else click.ClickException
            raise kind(str(error)) from error


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(xmem.__version__, prog_name="xmem")
def main() -> None:
    """Train in the memory you have, on PyTorch or on Jittor, and see exact bytes.

    Start with `xmem backends`, then `xmem compare`.
    """
    from xmem import foreign

    for found in foreign.find():
        click.echo(f"warning: {found.message}", err=True)
