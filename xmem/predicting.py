"""Predicting the peak of a training step before it is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from xmem.errors import CapabilityError
from xmem.records import HEAD, REST

if TYPE_CHECKING:
    from xmem.backend import Backend

PHASES = ("forward", "backward", "optimizer")
"""The parts of a step, in order."""

PREDICTION = "prediction"
"""The gap of backends whose `Plans` cannot follow a step without running it."""


@dataclass(frozen=True)
class Prediction:
    """What a training step will need, in bytes as `xmem.measure` counts them.

    Attributes:
        static_bytes: allocated before the step: parameters, buffers, optimizer state, the batch.
        peak_above_static_bytes: how far the step's peak rises above them.
        peak_allocated_bytes: the sum of the two.
        by_phase: the highest above the static bytes in each of `PHASES` that the step has.
        calibrated_operations: the distinct operations whose scratch memory is known because each
            was run once by itself.
        uncalibrated_operations: those for which that failed, or would have needed more memory
            than there is; their scratch is not in the figures.
        how: "fake": the step was followed without data; "profile": steps were run that recompute
            every stage, and what keeping everything takes was added up.
    """

    static_bytes: int
    peak_above_static_bytes: int
    peak_allocated_bytes: int
    by_phase: Mapping[str, int]
    calibrated_operations: int
    uncalibrated_operations: int = 0
    how: Literal["fake", "profile"] = "fake"


def predict(
    model: Any,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    optimizer: Any = None,
) -> Prediction:
    """Predict the peak of a step: forward, backward and, with an optimizer, the update.

    The step is one in the middle of training: the optimizer has its state, and gradients are made
    anew. Nothing is changed: parameters, gradients, statistics and random numbers stay. On PyTorch
    nothing is run but single operations; on Jittor the model is profiled (`xmem.profile`), which
    needs the memory of its least plans, and updates are not predicted.

    Args:
        model: a native module; on PyTorch it may be one without data (on the device "meta", or
            made under FakeTensorMode), so one that does not fit.
        batch: its inputs and targets, whatever `loss_fn` takes.
        loss_fn: `loss_fn(model, batch)` returns the loss, a scalar.
        optimizer: the update to include.

    Returns:
        A Prediction.

    Raises:
        CapabilityError: the step cannot be predicted, with the reason; `xmem.profile` and
            `xmem.measure` run it.
        CompositionError: parameters or the optimizer's states are away (offload).
        MeasurementError: a block of `xmem.measure` is open, whose peak this would change.
        UsageError: an argument is not what it should be.
    """
    from xmem.api import active
    from xmem.steps import check_step

    backend = active()
    check_step(backend, model, loss_fn, "xmem.predict")
    if PREDICTION not in backend.plans.gaps:
        return backend.plans.predict(model, batch, loss_fn, optimizer)
    if optimizer is not None:
        raise CapabilityError(
            f"on {backend.name!r} the update is not predicted: {backend.plans.gaps[PREDICTION]}."
            " Leave optimizer= out, or run a step inside xmem.measure()."
        )
    return _from_profile(backend, model, batch, loss_fn)


def _from_profile(
    backend: Backend, model: Any, batch: Any, loss_fn: Callable[[Any, Any], Any]
) -> Prediction:
    """Add up what keeping everything takes, of what single stages were measured to take."""
    from xmem.planner.schedule import Op
    from xmem.planner.simulation import World
    from xmem.profiling import profile
    from xmem.steps import every, play

    backend.measure.synchronize()
    static_bytes = backend.measure.counters().allocated_bytes
    chain = profile(backend, model, batch, loss_fn, repeats=1)
    assert chain.source is not None
    n = len(chain.source.stages.names)
    played = play(backend, chain.source, every(n))
    gradients = {played.ops[m.op].index: m.gradient_bytes for m in played.marks if m.op >= 0}
    world, backward = World(chain), 0
    for number, op in enumerate([*(Op("G", i) for i in range(n + 1)), Op("L")]):
        world.run(op, number)
    forward = world.peak_bytes
    for i in reversed(range(n + 1)):
        world.peak_bytes = 0
        world.run(Op("B", i), 2 * n + 2 - i)
        # Marks are of G and B of a stage, in this order: what was there before its backward.
        backward = max(backward, world.peak_bytes + gradients.get(i, 0))
    around = max(m.peak_bytes for m in played.marks if m.op in (HEAD, REST))
    above = max(forward, backward) - chain.batch_bytes
    backward = max(backward - chain.batch_bytes, around - played.before_bytes)
    above = max(above, backward)
    return Prediction(
        static_bytes=static_bytes,
        peak_above_static_bytes=above,
        peak_allocated_bytes=static_bytes + above,
        by_phase={"forward": forward - chain.batch_bytes, "backward": backward},
        calibrated_operations=0,
        how="profile",
    )
