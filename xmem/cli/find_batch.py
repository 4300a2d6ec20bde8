"""`xmem find-batch`: the largest batch of a workload that trains within a budget."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from xmem.batch_records import BatchSize, Try
    from xmem.report.tables import Table


@click.command()
@click.option("--workload", "workload_name", required=True, metavar="NAME", help="Workload to fit.")
@click.option(
    "--budget",
    default=None,
    metavar="SIZE",
    help="What allocated bytes may reach, all included, e.g. 64MiB. Default on a GPU: what is"
    " free there; on a CPU it has to be given.",
)
@click.option(
    "--backend", "backend_name", default=None, metavar="NAME", help="Default: the first usable."
)
@click.option("--preset", default="quick", show_default=True, metavar="NAME")
@click.option("--device", default="auto", show_default=True, metavar="NAME")
@click.option(
    "--technique",
    "technique_name",
    default="baseline",
    show_default=True,
    metavar="NAME",
    help="How it is trained, e.g. checkpoint.",
)
@click.option("--minimum", default=1, show_default=True, metavar="N")
@click.option("--maximum", default=None, type=int, metavar="N")
@click.option("--multiple-of", default=1, show_default=True, metavar="N")
@click.option("--inference", is_flag=True, help="Forward passes, without gradients.")
@click.option(
    "--margin", default=0.02, show_default=True, metavar="SHARE", help="Held back of the budget."
)
@click.option("--threads", default=2, show_default=True, metavar="N", help="On a CPU.")
@click.option(
    "--time-limit", default=None, type=float, metavar="SECONDS", help="Then the best so far."
)
def command(
    *,
    workload_name: str,
    budget: str | None,
    backend_name: str | None,
    preset: str,
    device: str,
    technique_name: str,
    minimum: int,
    maximum: int | None,
    multiple_of: int,
    inference: bool,
    margin: float,
    threads: int,
    time_limit: float | None,
) -> None:
    """Find the largest batch of a workload that trains within a budget.

    Each size is run under the budget as a limit, in a process of its own. Exit status: 0; 1 if not
    even the minimum fits (it says what would help); 2 if the command line is wrong.
    """
    from xmem.cli.output import print_table
    from xmem.cli.selection import check_names, choose_backends
    from xmem.errors import UsageError
    from xmem.sizes import format_size, parse_size

    if budget is not None:
        parse_size(budget)  # refuses it before anything runs
    if threads < 1:
        raise UsageError(f"--threads {threads}: at least 1")
    check_names([workload_name], [technique_name], preset, device)
    chosen = choose_backends([backend_name] if backend_name else [])[0][0].name
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)

    import xmem
    from xmem.batch_size import find_batch_size

    xmem.use(chosen, device=device)
    found = find_batch_size(
        WorkloadStep(workload_name, preset, technique_name, inference=inference),
        budget=budget,
        minimum=minimum,
        maximum=maximum,
        multiple_of=multiple_of,
        margin=margin,
        for_inference=inference,
        time_limit=time_limit,
        on_try=lambda made: click.echo(str(made), err=True),
    )
    print_table(tries_table(found))
    click.echo(
        f"\n{int(found)} is the largest batch size of {workload_name} on {chosen}"
        f" ({_WHY[found.limited_by]}): peak {format_size(found.peak_bytes)} of"
        f" {format_size(found.budget_bytes)}, {found.full_steps} steps"
    )


_WHY = {
    "budget": "the next one does not fit",
    "maximum": "no larger one was to be tried",
    "time": "so far: time was up",
}


@dataclasses.dataclass(frozen=True)
class WorkloadStep:
    """Makes the step of a workload at a batch size; can be sent to another process.

    Attributes:
        workload: its name.
        preset: how large the model is.
        technique: how it is trained.
        inference: the step is a forward pass.
    """

    workload: str
    preset: str
    technique: str
    inference: bool

    def __call__(self, size: int) -> Callable[[], Any]:
        """Build model, optimizer and batch, and return the step."""
        import xmem
        from xmem.conformance.techniques import Target, technique
        from xmem.workloads import make_batch, make_weights, workload

        declared = workload(self.workload, self.preset)
        sized = dataclasses.replace(
            declared,
            input_shape=(size, *declared.input_shape[1:]),
            target_shape=(size, *declared.target_shape[1:]),
        )
        backend = xmem.active()
        models = backend.models
        model = models.build(sized.model, make_weights(sized))
        inputs, targets = (models.tensor(array) for array in make_batch(sized))

        def loss_of(model: Any, batch: tuple[Any, Any]) -> Any:
            return models.loss(sized.loss, model(batch[0]), batch[1])

        target = Target(model, models.blocks(model), (inputs, targets), loss_of)
        applied = technique(self.technique).apply(backend, target)

        def forward() -> Any:
            with applied.forward_context():
                return model(inputs)

        if self.inference:
            return forward
        optimizer = backend.training.make_optimizer(
            sized.optimizer, model, learning_rate=sized.learning_rate
        )

        def step() -> Any:
            with applied.forward_context():
                loss = loss_of(model, (inputs, targets))
            xmem.backward(loss, optimizer)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
            return loss

        return step


def tries_table(found: BatchSize) -> Table:
    """Return what was tried, in order."""
    from xmem.report.tables import Table

    return Table(
        title="Tries",
        columns=("Batch size", "How", "Predicted", "Peak", "Of the limit", "Steps", "Seconds"),
        numeric=5,
        rows=tuple(_row(made, found) for made in found.tries),
        note=(
            "Predicted: from the peaks of the two sizes before it. Steps that failed count, too."
        ),
    )


def _row(made: Try, found: BatchSize) -> tuple[Any, ...]:
    from xmem.report.tables import Cell, format_seconds
    from xmem.sizes import format_size

    peak = made.peak_bytes
    return (
        Cell(str(made.size), "good" if made.size == found else ""),
        Cell(made.how, "good" if made.fits else "warn"),
        Cell(format_size(made.predicted_bytes)),
        Cell(format_size(peak)),
        Cell("-" if peak is None else f"{peak / found.limit_bytes:.1%}"),
        Cell(str(made.steps)),
        Cell(format_seconds(made.seconds)),
    )
