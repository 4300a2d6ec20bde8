"""Steps of a model under a schedule, traced or not, that leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xmem import meter
from xmem.errors import UsageError
from xmem.offload.stages import Depots
from xmem.planned import conduct, install
from xmem.planner.plan import Plan
from xmem.planner.schedule import Op
from xmem.records import Mark, Step
from xmem.staging import Stages

if TYPE_CHECKING:
    from xmem.backend import Backend

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Source:
    """How to run a step of the model that was profiled.

    Attributes:
        model: the model, which is held as long as the profile is.
        batch: what `loss_fn` takes.
        loss_fn: returns the loss, a scalar.
        stages: of the model.
        plans: those that have been verified with it.
        depots: where goes what stages offload in steps of it.
    """

    model: Any
    batch: Any
    loss_fn: LossFunction
    stages: Stages
    plans: list[Plan] = field(default_factory=list)
    depots: Depots = field(default_factory=Depots)


@dataclass(frozen=True)
class Played:
    """A traced step.

    Attributes:
        step: the step.
        ops: the script's operations, which the marks' numbers are of.
        marks: of the run, `REST` last; the rest is empty if it was not traced.
        forwards: how often each stage was run forward.
        differentiated: whether each stage's gradient came.
        value_bytes: of what each stage read first, and of what the last one returned.
        reads: (j, i) where stage i read the output of stage j-1 although it does not follow it.
    """

    step: Step
    ops: tuple[Op, ...] = ()
    marks: Sequence[Mark] = ()
    forwards: Sequence[int] = ()
    differentiated: Sequence[bool] = ()
    value_bytes: Sequence[int] = ()
    reads: Sequence[tuple[int, int]] = ()

    @property
    def before_bytes(self) -> int:
        """What was allocated when the step began."""
        return self.marks[0].before_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated, beyond what was before and gradients of parameters."""
        return max(m.peak_bytes - m.gradient_bytes for m in self.marks) - self.before_bytes


def check_step(backend: Backend, model: Any, loss_fn: Any, what: str) -> None:
    """See to it that a step of a model can be run and measured.

    Raises:
        UsageError: the model is no module, or the loss no function.
        MeasurementError: a block of `xmem.measure` is open.
    """
    if not backend.checkpoint.is_module(model):
        raise UsageError(f"{model!r} is no module of the active backend; pass its own modules")
    if not callable(loss_fn):
        raise UsageError(f"loss_fn={loss_fn!r} is no function; give loss_fn(model, batch) -> loss")
    meter.refuse_open_block(what)


def every(stages: int, option: int = 0) -> list[Op]:
    """Return the schedule in which each of some stages is recomputed just before its backward.

    Args:
        stages: how many are called.
        option: by which they are kept then.
    """
    ops = [Op("N", i) for i in range(stages)] + [Op("G", stages), Op("L"), Op("B", stages)]
    for i in reversed(range(stages)):
        # Its output goes when it has been read; sooner would hide what the loss leaves.
        ops += [Op("G", i, option), Op("B", i), Op("Da", i + 1)]
    return ops


def play(
    backend: Backend,
    source: Source,
    ops: Sequence[Op],
    *,
    options: Sequence[Sequence[str]] | None = None,
    traced: bool = True,
) -> Played:
    """Run a step under a schedule; leaves the model as it was.

    Args:
        backend: of the model.
        source: the model.
        ops: the schedule.
        options: the names of each stage's options; None: each has one, which keeps all.
        traced: note what each operation takes.

    Raises:
        UsageError: the model's stages are not called.
    """
    conductor = conduct(
        backend, source.stages, ops, options=options, traced=traced, depots=source.depots
    )
    undo = install(backend, source.stages, conductor)
    try:
        step = backend.plans.step(source.model, source.batch, source.loss_fn)
        if not traced:
            return Played(step)
        if len(conductor.runs) > 1:
            raise UsageError(
                f"loss_fn calls the model {len(conductor.runs)} times with gradients, and a plan is"
                " for one forward pass: let it call the model once, e.g. on one larger batch"
            )
        run = conductor.runs[0] if conductor.runs else None
        if run is None or len(run.value_bytes) <= len(source.stages.names):
            raise UsageError(
                "the stages of the model were not all called in the step, in their order; does"
                " loss_fn call the model, with gradients?"
            )
        marks = run.marks()
    finally:
        undo()
        conductor.runs.clear()
    ops = conductor.script.ops
    facts = run.forwards, run.differentiated, run.value_bytes, run.reads
    return Played(step, ops, marks, *facts)
