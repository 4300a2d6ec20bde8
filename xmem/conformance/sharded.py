"""A workload on several ranks: the techniques that divide batch, states, parameters or layers.

Every rank runs this in a process of its own. The weights, the data and the number of steps are
those of the baseline, so losses can be held against those of one process with the whole batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import xmem
import xmem.distributed as xd
from xmem.conformance.measured import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    told_categories,
    told_losses,
)
from xmem.conformance.partition import (
    has_batch_norm,
    linear_pairs,
    share,
    stage_weights,
    stages,
)
from xmem.errors import CapabilityError
from xmem.report.model import Case, RankResult, Result
from xmem.workloads import make_batch, make_weights, workload

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.distributing import World
    from xmem.meter import Measurement
    from xmem.workloads.catalog import Workload

MICRO_BATCHES_PER_STAGE = 2
SHARE_THE_BATCH = ("data_parallel", "zero1", "zero3")


@dataclass(frozen=True)
class Parts:
    """A workload divided.

    Attributes:
        model: this rank's module, as the meter is to see it.
        optimizer: of its parameters.
        callable: what is called with a batch.
        pipeline: what runs the batch where the model is cut into stages.
    """

    model: Any
    optimizer: Any
    callable: Any = None
    pipeline: Any = None


@dataclass(frozen=True)
class Setting:
    """What a technique divides.

    Attributes:
        backend: the backend in use.
        workload: what is trained.
        weights: its weights by name, whole.
        world: how many ranks there are.
        rank: which of them this is.
    """

    backend: Backend
    workload: Workload
    weights: dict[str, np.ndarray[Any, Any]]
    world: int
    rank: int

    def build(self) -> Any:
        """Build the whole model."""
        return self.backend.models.build(self.workload.model, self.weights)

    def optimizer(self, model: Any) -> Any:
        """Make the workload's optimizer."""
        return self.backend.training.make_optimizer(
            self.workload.optimizer, model, learning_rate=self.workload.learning_rate
        )

    def loss(self, output: Any, target: Any) -> Any:
        """Make the workload's loss."""
        return self.backend.models.loss(self.workload.loss, output, target)


def _data_parallel(setting: Setting) -> Parts:
    model = setting.build()
    optimizer = setting.optimizer(model)
    return Parts(model, optimizer, xd.data_parallel(model, optimizer))


def _zero1(setting: Setting) -> Parts:
    model = setting.build()
    optimizer = xd.shard_optimizer(setting.optimizer(model))
    return Parts(model, optimizer, xd.data_parallel(model, optimizer))


def _zero3(setting: Setting) -> Parts:
    model = setting.build()
    model = xd.shard_model(model, blocks=setting.backend.models.blocks(model))
    return Parts(model, setting.optimizer(model), model)


def _tensor_parallel(setting: Setting) -> Parts:
    plan = linear_pairs(setting.workload.model, setting.world)
    model = xd.tensor_parallel(setting.build(), plan)
    return Parts(model, setting.optimizer(model), model)


def _pipeline(setting: Setting) -> Parts:
    pipeline = xd.pipeline(
        [
            lambda stage=stage: setting.backend.models.build(
                stage, stage_weights(stage, setting.weights)
            )
            for stage in stages(setting.workload, setting.world)
        ],
        micro_batches=micro_batches(setting.workload, setting.world),
        loss_fn=setting.loss,
    )
    return Parts(pipeline.module, setting.optimizer(pipeline.module), pipeline=pipeline)


WAYS: dict[str, Callable[[Setting], Parts]] = {
    "data_parallel": _data_parallel,
    "zero1": _zero1,
    "zero3": _zero3,
    "tensor_parallel": _tensor_parallel,
    "pipeline": _pipeline,
}


def micro_batches(workload: Workload, world: int) -> int:
    """Return into how many parts a pipeline cuts the workload's batch.

    Raises:
        CapabilityError: the batch cannot be cut so.
    """
    rows, count = workload.input_shape[0], MICRO_BATCHES_PER_STAGE * world
    if rows % count:
        raise CapabilityError(f"a batch of {rows} cannot be cut into {count} micro-batches")
    return count


def check(backend: Backend, workload: Workload, technique: str, world: int) -> None:
    """See to it that a technique can divide a workload so that its losses stay the same.

    Raises:
        CapabilityError: it cannot; with the reason.
    """
    gaps = backend.distributed.gaps
    if technique in gaps:
        raise CapabilityError(f"{backend.name} declares {technique} missing: {gaps[technique]}")
    if world == 1:
        return
    parts = technique in SHARE_THE_BATCH or technique == "pipeline"
    synchronised = technique in SHARE_THE_BATCH and "batch_statistics" not in gaps
    if parts and not synchronised and has_batch_norm(workload.model):
        raise CapabilityError(
            f"{workload.name} normalises over its batch, and a rank sees a part of it: its losses"
            " cannot be those of one process"
            + (f" ({gaps['batch_statistics']})" if "batch_statistics" in gaps else "")
        )
    if technique in SHARE_THE_BATCH:
        share(np.empty(workload.input_shape[:1]), 0, world)
    elif technique == "tensor_parallel":
        linear_pairs(workload.model, world)
    else:
        stages(workload, world)
        micro_batches(workload, world)


class RankRun:
    """This rank's part of a workload under a technique."""

    def __init__(self, setting: Setting, technique: str) -> None:
        self._setting = setting
        self._technique = technique
        self._step = 0
        self.batch = self._batch()
        self.parts = WAYS[technique](setting)

    def _batch(self) -> tuple[Any, Any]:
        setting = self._setting
        inputs, targets = make_batch(setting.workload, self._step)
        tensor = setting.backend.models.tensor
        if self._technique in SHARE_THE_BATCH:
            inputs, targets = (share(a, setting.rank, setting.world) for a in (inputs, targets))
        elif self._technique == "pipeline":
            # What a stage does not read must not lie in its memory.
            first, last = setting.rank == 0, setting.rank == setting.world - 1
            return tensor(inputs) if first else None, tensor(targets) if last else None
        return tensor(inputs), tensor(targets)

    def next_batch(self) -> None:
        """Take the data of the next step."""
        self._step += 1
        if self._setting.workload.input_kind in ("text", "patterns"):
            self.batch = self._batch()

    def step(self) -> Any:
        """Run one step; returns its loss, a number or a tensor of one."""
        inputs, targets = self.batch
        parts = self.parts
        if parts.pipeline is not None:
            loss = parts.pipeline.step(inputs, targets, parts.optimizer)
        else:
            loss = self._setting.loss(parts.callable(inputs), targets)
            xmem.backward(loss, parts.optimizer)
        xmem.optimizer_step(parts.optimizer)
        xmem.zero_grad(parts.optimizer)
        return loss

    def measured_step(self) -> tuple[Measurement, Any, xd.Traffic]:
        """Run one step under the meter."""
        xd.traffic(reset=True)
        inputs = [part for part in self.batch if part is not None]
        with xmem.measure(
            model=self.parts.model, optimizer=self.parts.optimizer, inputs=inputs
        ) as measurement:
            loss = self.step()
        return measurement, loss, xd.traffic()

    def value(self, loss: Any) -> float:
        """Return a loss as a number."""
        return loss if isinstance(loss, float) else self._setting.backend.models.item(loss)


def run(case: Case, backend: Backend) -> Result:
    """Run this rank's part of a case; the result has this rank alone.

    Raises:
        Exception: whatever went wrong.
    """
    what = workload(case.workload, case.preset)
    check(backend, what, case.technique, case.world)
    here = xd.init()
    if here.size != case.world:
        raise CapabilityError(f"{here.size} ranks were started for a case of {case.world}")
    setting = Setting(backend, what, make_weights(what), here.size, here.rank)
    current = RankRun(setting, case.technique)
    setting.weights.clear()  # host memory that no rank needs any more
    losses: list[float] = []
    measured: list[tuple[Measurement, xd.Traffic]] = []
    for number in range(max(WARM_UP_STEPS + MEASURED_STEPS, case.steps or 0)):
        if number:
            current.next_batch()
        measurement, loss, traffic = current.measured_step()
        losses.append(current.value(loss))
        del loss
        if WARM_UP_STEPS <= number < WARM_UP_STEPS + MEASURED_STEPS:
            measured.append((measurement, traffic))
    return _result(case, backend, here, measured, losses)


def _seconds(traffic: list[xd.Traffic]) -> float | None:
    """Return the median over steps; None where calls were counted and no time: it is not known."""
    seconds = statistics.median(t.seconds for t in traffic)
    return seconds if seconds or not any(t.calls for t in traffic) else None


def _result(
    case: Case,
    backend: Backend,
    here: World,
    measured: list[tuple[Measurement, xd.Traffic]],
    losses: list[float],
) -> Result:
    measurements = [m for m, _ in measured]
    highest = max(measurements, key=lambda m: m.peak_allocated_bytes)
    times = [m.seconds for m in measurements]
    last = measured[-1][1]
    rank = RankResult(
        rank=here.rank,
        static_bytes=highest.static_bytes,
        peak_allocated_bytes=highest.peak_allocated_bytes,
        peaks_bytes=tuple(m.peak_allocated_bytes for m in measurements),
        peak_process_bytes=measurements[-1].peak_process_bytes,
        by_category=told_categories(highest),
        step_seconds=statistics.median(times),
        calls=dict(last.calls),
        sent_bytes=dict(last.sent_bytes),
        communication_seconds=_seconds([traffic for _, traffic in measured]),
        # 0 is what a backend says that does not tell.
        buffer_bytes=max(t.buffer_bytes for _, t in measured) or None,
    )
    return Result(
        case=case,
        status="ok",
        device=backend.device,
        losses=told_losses(losses),
        step_seconds=rank.step_seconds,
        step_seconds_spread=max(times) - min(times),
        peak_reserved_bytes=highest.peak_reserved_bytes,
        gpu_process_bytes=measurements[-1].gpu_process_bytes,
        allocation_count=measurements[-1].allocation_count,
        source=highest.source,
        framework_version=backend.framework_version,
        distribution=backend.distribution,
        settings=backend.measure.settings(),
        engine=here.engine,
        ranks=(rank,),
    )
