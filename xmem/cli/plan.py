"""`xmem plan`: profile a workload, plan it for a budget, run the plan, and draw it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from xmem.offload.depot import To
    from xmem.planner import Plan
    from xmem.planner.simulation import Instant
    from xmem.profiling import Profile


@click.command()
@click.option(
    "--workload", "workload_name", required=True, metavar="NAME", help="Workload to plan."
)
@click.option(
    "--budget",
    required=True,
    metavar="SIZE",
    help="What activations, their gradients and the batch may take: 64MiB, or a share of what a"
    " step takes that keeps everything: 0.3 or 30%.",
)
@click.option(
    "--backend", "backend_name", default=None, metavar="NAME", help="Default: the first usable."
)
@click.option("--preset", default="quick", show_default=True, metavar="NAME")
@click.option("--device", default="auto", show_default=True, metavar="NAME")
@click.option(
    "--stages",
    default="auto",
    show_default=True,
    metavar="HOW",
    help="How stages are found: traced, modules or auto.",
)
@click.option(
    "--offload",
    default=None,
    type=click.Choice(["disk", "host"]),
    help="Where plans may move what a stage keeps.",
)
@click.option(
    "--directory",
    default=None,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Of the scratch file of --offload disk. Default: $XMEM_OFFLOAD_DIR, or the system's.",
)
@click.option(
    "-o",
    "--output",
    "path",
    default=None,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the plan goes, as JSON.",
)
@click.option(
    "--picture",
    "picture",
    default=None,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where its pictures go, one HTML file. Default: beside the plan.",
)
@click.option(
    "--compare/--no-compare",
    default=True,
    show_default=True,
    help="Also run plain steps for the plan's cost in time; they keep everything.",
)
def command(
    *,
    workload_name: str,
    budget: str,
    backend_name: str | None,
    preset: str,
    device: str,
    stages: str,
    offload: To | None,
    directory: Path | None,
    path: Path | None,
    picture: Path | None,
    compare: bool,
) -> None:
    """Plan a workload for a budget, and run a step to see that it keeps to it.

    Prints what was predicted and measured. Exit status: 0; 1 if no plan fits (it says what
    would); 2 if the command line is wrong.
    """
    from xmem.cli.output import print_table
    from xmem.cli.selection import check_names, choose_backends
    from xmem.report.plan_plots import plan_table, write_pictures
    from xmem.sizes import parse_size

    asked = _budget(budget)
    if isinstance(asked, str) and not asked.endswith("%"):
        parse_size(asked)  # refuses it before anything runs
    if picture is None and path is not None:
        picture = path.with_suffix(".html")
    if picture is not None and picture == path:
        raise click.BadParameter(f"{path} cannot be both the plan and its picture")
    check_names([workload_name], [], preset, device)
    name = choose_backends([backend_name] if backend_name else [])[0][0].name
    profile, plan, instants = _planned(
        name,
        device,
        workload_name,
        preset,
        asked,
        compare,
        stages=stages,
        offload=offload,
        directory=directory,
    )
    print_table(plan_table(plan))
    click.echo(f"\n{plan}")
    if path is not None:
        plan.write(path)
        click.echo(f"\nwrote {path}")
    if picture is not None:
        write_pictures(profile, plan, picture, instants)
        click.echo(f"wrote {picture}")


def _budget(text: str) -> float | str:
    """Return a budget as `xmem.plan` takes it; a number with a point is a share."""
    try:
        return float(text) if "." in text else text
    except ValueError:
        return text


def _planned(
    backend_name: str,
    device: str,
    workload_name: str,
    preset: str,
    budget: float | str,
    compare: bool,
    **how: Any,
) -> tuple[Profile, Plan, list[Instant]]:
    import xmem
    from xmem.planning import measured_timeline
    from xmem.workloads import make_batch, make_weights, workload

    backend = xmem.use(backend_name, device=device)
    chosen = workload(workload_name, preset)
    models = backend.models
    model = models.build(chosen.model, make_weights(chosen))
    inputs, targets = (models.tensor(array) for array in make_batch(chosen, 0))

    profile = xmem.profile(
        model,
        (inputs, targets),
        lambda model, batch: models.loss(chosen.loss, model(batch[0]), batch[1]),
        **how,
        name=workload_name,
    )
    plan = xmem.plan(profile, budget=budget, compare=compare)
    return profile, plan, measured_timeline(profile, plan)
