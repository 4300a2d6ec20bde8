"""A plan on a model: its stages' forwards are played by the backend as the plan says."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xmem import api
from xmem.checkpointing import is_recomputed
from xmem.errors import CapabilityError, CompositionError, UsageError, XmemWarning
from xmem.layouts import modules_of
from xmem.offload.stages import Depots
from xmem.planner.chain import LOSS_STAGE
from xmem.planner.plan import Plan
from xmem.planner.schedule import Op
from xmem.playing import AWAY, PACKED, PlanRun, Script, is_playing_again, script
from xmem.receipts import Receipt, issue
from xmem.records import Recompute
from xmem.staging import Stages, named_stages

if TYPE_CHECKING:
    from xmem.backend import Backend


@dataclass(eq=False)
class Conductor:
    """Hands the calls of a model's stages to the run of their forward pass.

    An object and not a closure, so that it is copied and pickled with its model.

    Attributes:
        backend: the name of the backend that plays.
        names: of the stages.
        script: what is played.
        how: what is replayed.
        traced: whether runs note marks.
        runs: those of the forward passes so far, if they are traced.
    """

    backend: str
    names: tuple[str, ...]
    script: Script
    how: Recompute
    traced: bool = False
    runs: list[PlanRun] = field(default_factory=list)
    _local: Any = field(default_factory=threading.local)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_local": None, "runs": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def call(
        self,
        places: Sequence[int],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a stage.

        Args:
            places: the numbers of the stages that the function is; several if it is called more
                than once.
            function: the stage's own forward.
            args: its inputs.
            kwargs: its inputs by name.
        """
        plans = api.loaded(self.backend).plans
        now = self._local
        # A stage may call another one, in its first pass or when it is run again.
        if getattr(now, "busy", False) or is_playing_again() or not plans.recording():
            return function(*args, **kwargs)
        stage = getattr(now, "next", 0)
        run = now.run() if stage else None
        if stage not in places or (stage and run is None):
            if 0 not in places:
                return self._out_of_order(places, function, args, kwargs)
            stage, run = 0, None
        if run is None:
            run = plans.open(self.script, self.names, self.how, traced=self.traced)
            if self.traced:
                self.runs.append(run)
        now.next, now.busy, now.held = 0, True, None
        try:
            output = run.first(stage, function, args, kwargs)
        finally:
            now.busy = False
        now.next = (stage + 1) % len(self.script)
        if now.next:
            # Held by what it has returned, so that nothing stays if the next stage is never called.
            now.run = weakref.ref(run)
            now.held = None if run.holds else run
        return output

    def _out_of_order(
        self,
        places: Sequence[int],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        warnings.warn(
            f"stage {self.names[places[0]]!r} of a planned model was called out of the plan's"
            " order, so it runs as if there were no plan",
            XmemWarning,
            stacklevel=4,
        )
        return function(*args, **kwargs)


@dataclass(frozen=True)
class PlannedForward:
    """What a planned module runs instead of its forward.

    Attributes:
        conductor: of its model.
        places: the numbers of the stages that it is.
        forward: its own forward, bound to it.
    """

    conductor: Conductor
    places: tuple[int, ...]
    forward: Callable[..., Any]
    recomputes: ClassVar = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, planned."""
        return self.conductor.call(self.places, self.forward, args, kwargs)


def apply_plan(
    plan: Plan, model: Any, *, preserve_rng: bool = True, directory: str | Path | None = None
) -> Receipt:
    """Let a model run as a plan says; see `xmem.planner.Plan.apply`."""
    backend = api.active()
    if not backend.checkpoint.is_module(model):
        raise UsageError(f"{model!r} is no module of the active backend; pass its own modules")
    refuse_recomputed(backend, model)
    names = [n for n in plan.stage_names if n != LOSS_STAGE]
    stages = named_stages(backend, model, names, traced=plan.traced)
    conductor = conduct(
        backend,
        stages,
        plan.ops,
        options=plan.option_names,
        preserve_rng=preserve_rng,
        depots=Depots(directory),
    )
    undo = install(backend, stages, conductor)
    try:
        return issue(
            Receipt(
                technique="plan",
                backend=backend.name,
                applied_to=len(stages.names),
                names=stages.names,
                expected_saving_bytes=plan.store_all_peak_bytes - _predicted(plan),
                note=f"{plan.overhead:.1%} more time than with everything kept",
                _undo=undo,
            )
        )
    except BaseException:  # whole or not at all, also if an observer raises
        undo()
        raise


def _predicted(plan: Plan) -> int:
    return plan.peak_bytes if plan.verified is None else plan.verified.predicted_peak_bytes


def refuse_recomputed(backend: Backend, model: Any) -> None:
    """Refuse a model of which anything is checkpointed or planned.

    Raises:
        CompositionError: something is, with its path.
    """
    for path, module in [("", model), *modules_of(backend.checkpoint, model)]:
        if any(is_recomputed(value) for value in vars(module).values()):
            raise CompositionError(
                f"{path or type(model).__name__!r} is checkpointed or planned already; undo that"
                " first (receipt.undo())"
            )


def conduct(
    backend: Backend,
    stages: Stages,
    ops: Sequence[Op],
    *,
    options: Sequence[Sequence[str]] | None = None,
    preserve_rng: bool = True,
    traced: bool = False,
    depots: Depots | None = None,
) -> Conductor:
    """Return what plays a schedule on stages; `options` names each stage's."""
    played = script(ops, len(stages.names), options, depots=depots)
    for gap, does, asked in (
        (PACKED, "packs what stages keep", any(c.bits for c in played.choices)),
        (AWAY, "moves what stages keep off the device", any(c.away for c in played.choices)),
    ):
        if asked and gap in backend.plans.gaps:
            raise CapabilityError(
                f"the plan {does}, which {backend.name!r} does not offer: {backend.plans.gaps[gap]}"
            )
    how = Recompute(preserve_rng=preserve_rng)
    return Conductor(backend.name, stages.names, played, how, traced)


def install(backend: Backend, stages: Stages, conductor: Conductor) -> Callable[[], None]:
    """Let the stages' forwards be played; returns what undoes it.

    Raises:
        CompositionError: a stage is checkpointed or planned already, or cannot be recomputed.
    """
    undos: list[Callable[[], None]] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    for path, module in stages.modules:
        reason = backend.checkpoint.obstacle(module)
        if reason is not None:
            raise CompositionError(f"stage {path!r} cannot be recomputed: {reason}")
    replace = backend.checkpoint.replace_forward
    try:
        if stages.traced is not None:
            made = stages.traced.forward(_Calls(conductor))
            undos.append(
                replace(
                    stages.traced.module,
                    lambda own: _unless_taken(own, TracedForward(made, own, backend.name)),
                )
            )
        for module, places in stages.places():
            wrap = functools.partial(_planned, conductor, places)
            undos.append(replace(module, wrap))
    except BaseException:
        undo()
        raise
    return undo


@dataclass(frozen=True)
class TracedForward:
    """What a planned module whose forward was traced runs instead of it.

    Attributes:
        stages: runs the stages.
        forward: the module's own forward, bound to it.
        backend: the name of the backend that plays.
    """

    stages: Callable[..., Any]
    forward: Callable[..., Any]
    backend: str
    recomputes: ClassVar = True

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages where gradients are recorded, else the module's own forward."""
        if is_playing_again() or not api.loaded(self.backend).plans.recording():
            return self.forward(*args, **kwargs)
        return self.stages(*args, **kwargs)


@dataclass(frozen=True)
class _Calls:
    """Runs the stages of a traced forward."""

    conductor: Conductor

    def __call__(
        self,
        stage: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if stage >= len(self.conductor.names):  # runs once, with the loss
            return function(*args, **kwargs)
        return self.conductor.call((stage,), function, args, kwargs)


def _planned(
    conductor: Conductor, places: tuple[int, ...], forward: Callable[..., Any]
) -> PlannedForward:
    planned: PlannedForward = _unless_taken(forward, PlannedForward(conductor, places, forward))
    return planned


def _unless_taken(forward: Any, made: Any) -> Any:
    """Return what was made, unless the forward that it replaces recomputes already."""
    if is_recomputed(forward):
        raise CompositionError(
            "a stage is checkpointed or planned already; undo that first (receipt.undo())"
        )
    return made
