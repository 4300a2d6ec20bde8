"""Playing a schedule around a model's own forward and backward.

A `Script` is a plan's schedule cut at the places where the framework hands over: the first forward
of each stage, which the model itself calls, and the gradient of each stage's output, which the
framework's backward delivers. A backend's run (`xmem.protocols.PlanRun`) plays the pieces:

* `sweep[i]` when stage i is called: its first forward (N or G), then all operations up to the next
  stage's (drops, mostly);
* `back[i]` when the gradient of stage i's output is complete: all operations after the backward of
  stage i+1 (or the loss), up to and without B(i); then stage i is differentiated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from xmem.errors import InvalidScheduleError
from xmem.offload.stages import Depots
from xmem.planner.schedule import Op
from xmem.predicting import Prediction
from xmem.records import Mark, Recompute, Step
from xmem.saving import Choice
from xmem.stage_options import AS_IS, choice_of

REMADE = "inputs made again"
"""The gap of backends where an input that is computed again may differ in its last bits. A stage
that is kept without its input (docs/planner.md) would be differentiated with such a one."""

PACKED = "packed stages"
"""The gap of backends that cannot pack what a stage keeps."""

AWAY = "stages away"
"""The gap of backends that cannot move what a stage keeps off the device."""


@dataclass(frozen=True)
class Script:
    """A schedule, cut at the places where the framework hands over.

    Attributes:
        ops: all operations on the stages that are called, in order.
        sweep: for each stage the numbers (in `ops`) of its first forward and what follows it.
        back: for each stage the numbers of what is done before its backward.
        backward: for each stage the number of its B.
        loss: the number of L.
        there: for each stage the j of all a_j that are held whenever it is run or differentiated.
        choices: for each operation what becomes of what it keeps: it is packed, or leaves the
            device, or stays as it is.
    """

    ops: tuple[Op, ...]
    sweep: tuple[tuple[int, ...], ...]
    back: tuple[tuple[int, ...], ...]
    backward: tuple[int, ...]
    loss: int
    there: tuple[frozenset[int], ...]
    choices: tuple[Choice, ...]

    def __len__(self) -> int:
        return len(self.sweep)

    @cached_property
    def undisturbed(self) -> frozenset[int]:
        """The stages that run once and keep everything, with their input there all along."""
        return frozenset(i for i in range(len(self.sweep)) if self._is_undisturbed(i))

    def _is_undisturbed(self, i: int) -> bool:
        first, last = self.sweep[i][0], self.backward[i]
        between = self.ops[first + 1 : last]
        again = any(op.code in "NG" and op.index == i for op in between)
        dropped = {("Ds", i), ("Da", i), ("Ds", i - 1)}
        return (
            self.ops[first].code == "G"
            and self.choices[first] == AS_IS
            and not again
            and not any((op.code, op.index) in dropped for op in between)
        )


def script(
    ops: Sequence[Op],
    stages: int,
    options: Sequence[Sequence[str]] | None = None,
    *,
    depots: Depots | None = None,
) -> Script:
    """Cut a schedule.

    Args:
        ops: a valid schedule of a chain (`xmem.planner.simulate` says so).
        stages: how many stages are called one by one. Stages beyond them are what follows the
            chain, the loss included: they run by themselves, once, and their operations are left
            out.
        options: for each stage the names of its options; None or empty: each keeps all.
        depots: where goes what leaves the device; None: they are opened for this script.

    Raises:
        InvalidScheduleError: stages are not swept in order before the loss, a stage is
            differentiated twice, or what follows the chain would be run again.
        CapabilityError: an option is asked for that cannot be executed.
        OffloadError: there is no place for what leaves the device.
    """
    kept = tuple(op for op in ops if op.code == "L" or op.index < stages + (op.code == "Da"))
    _check_rest(ops, stages)
    sweep: list[list[int]] = []
    back: list[list[int]] = [[] for _ in range(stages)]
    backward = [-1] * stages
    loss, at = -1, stages - 1
    for number, op in enumerate(kept):
        if op.code == "L":
            loss = number
        elif loss < 0:
            if op.code in "NG" and op.index == len(sweep):
                sweep.append([number])
            elif sweep and op.code != "B":
                sweep[-1].append(number)
            else:
                raise InvalidScheduleError(
                    f"operation {number}, {op}, comes before stage 0 has run"
                )
        elif op.code == "B":
            if op.index != at:
                raise InvalidScheduleError(f"operation {number}, {op}, comes out of order")
            backward[at] = number
            at -= 1
        elif at >= 0:
            back[at].append(number)
    if len(sweep) != stages or at != -1:
        raise InvalidScheduleError(
            f"the schedule runs {len(sweep)} of {stages} stages before the loss and differentiates"
            f" {stages - 1 - at}"
        )
    parts = tuple(map(tuple, sweep)), tuple(map(tuple, back)), tuple(backward)
    places = Depots() if depots is None else depots
    choices = tuple(choice_of(op, options, places) for op in kept)
    return Script(kept, *parts, loss, _there(kept, stages), choices)


def _there(ops: Sequence[Op], stages: int) -> tuple[frozenset[int], ...]:
    """Return for each stage the values that there are at all of its operations."""
    alone, kept = {0}, set[int]()  # values by themselves, and those in what stages keep
    found: list[frozenset[int] | None] = [None] * stages
    for op in ops:
        if op.code in ("N", "G", "B"):
            now, before = frozenset(alone | kept), found[op.index]
            found[op.index] = now if before is None else before & now
        if op.code == "N":
            alone.add(op.index + 1)
        elif op.code == "G":
            kept.add(op.index + 1)
        elif op.code == "Da":
            alone.discard(op.index)
        elif op.code != "L":
            kept.discard(op.index + 1)
    return tuple(f or frozenset() for f in found)


def _check_rest(ops: Sequence[Op], stages: int) -> None:
    runs = [op.index for op in ops if op.code in ("N", "G") and op.index >= stages]
    if len(runs) != len(set(runs)):
        raise InvalidScheduleError(
            f"the schedule runs stage {max(runs)} twice, which follows the chain and cannot be run"
            " again"
        )


_again = threading.local()


@contextmanager
def playing_again() -> Iterator[None]:
    """Let this thread run a stage again in the block: what it calls is no stage itself."""
    depth = getattr(_again, "depth", 0)
    _again.depth = depth + 1
    try:
        yield
    finally:
        _again.depth = depth


def is_playing_again() -> bool:
    """Say whether this thread is running a stage again."""
    return getattr(_again, "depth", 0) > 0


@runtime_checkable
class PlanRun(Protocol):
    """One forward pass of a planned model, and its backward.

    Attributes:
        value_bytes: of the value that each stage reads first, and last of what the last stage
            returns; filled as stages are called.
        reads: (j, i) where stage i reads the output of stage j-1 although it does not follow it.
        forwards: for each stage how often it has been run forward so far.
        differentiated: for each stage whether its gradient has come; it does not to one that
            nothing is trained in or before, nor to one that the loss does not depend on.
        holds: whether something that was returned so far holds the run until its backward.
    """

    value_bytes: list[int]
    reads: list[tuple[int, int]]
    forwards: list[int]
    differentiated: list[bool]
    holds: bool

    def first(
        self,
        stage: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a stage's function for the first time, as the script says; returns its output.

        Stages are called in order. Which of their inputs is the output of which stage is known by
        identity; tensors among them that the script does not hold whenever the stage needs them
        are held until the stage has been differentiated.
        Whoever else reads an output gets its value, and on PyTorch its gradient; on Jittor a
        gradient that comes to it any other way raises CompositionError.

        In backward everything is done as the script says. Recomputation sees what the first call
        saw: parameters, random numbers, precision, training flags; running statistics are updated
        once.
        """

    def marks(self) -> list[Mark]:
        """Return what each forward and backward of the script took, once the step has run.

        Only of a traced run. `HEAD` comes first, `TAIL` between the last stage's first forward and
        what its gradient sets off. Peaks start again at each mark.
        """


@runtime_checkable
class TracedStages(Protocol):
    """A model's forward, taken apart into stages by tracing.

    Attributes:
        names: of the stages; the same model always gives the same.
        module: whose forward is taken apart: the model, or a module inside.
    """

    names: tuple[str, ...]
    module: Any

    def forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward for `module` that runs each stage as `call(i, function, args, {})`."""


@runtime_checkable
class Plans(Protocol):
    """Play plans: hook `xmem_plans`."""

    gaps: Mapping[str, str]

    def recording(self) -> bool:
        """Say whether gradients are recorded here; elsewhere a planned forward is a plain call."""

    def open(
        self, script: Script, names: Sequence[str], how: Recompute, *, traced: bool
    ) -> PlanRun:
        """Begin a forward pass, when the first stage is about to be called.

        Args:
            script: what is played.
            names: what errors call the stages.
            how: what is replayed.
            traced: note marks.
        """

    def traced(self, model: Any) -> TracedStages | None:
        """Take a model's forward apart by tracing it; None where it cannot be traced."""

    def tensors(self, tree: Any) -> list[Any]:
        """Return the tensors in nested containers."""

    def bytes_of(self, tensors: Sequence[Any]) -> int:
        """Return the bytes of the distinct allocations behind tensors."""

    def step(
        self,
        model: Any,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        gradients: bool = False,
    ) -> Step:
        """Compute `loss_fn(model, batch)` and its gradients, and leave no trace of it.

        Parameters' gradients, running statistics and random numbers are afterwards what they were
        before. Gradients of parameters are made anew in the step and dropped at its end. Peaks
        start again when it begins.

        Args:
            model: the model.
            batch: its inputs and targets, whatever `loss_fn` takes.
            loss_fn: returns the loss, a scalar.
            gradients: return them, by parameter name.
        """

    def forward_aside(self, model: Any, batch: Any, loss_fn: Callable[[Any, Any], Any]) -> None:
        """Call `loss_fn(model, batch)` without gradients, and leave no trace of it."""

    def predict(
        self, model: Any, batch: Any, loss_fn: Callable[[Any, Any], Any], optimizer: Any
    ) -> Prediction:
        """Predict a step without running it; see `xmem.predict`.

        A backend that cannot has the gap `xmem.predicting.PREDICTION`.
        """
