"""What ranks find out about training: the same gradients, losses and parameters as one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import xmem
import xmem.distributed as xd
from xmem.conformance.partition import linear_pairs, share, stage_weights, stages
from xmem.conformance.sharded import SHARE_THE_BATCH
from xmem.conformance.small import small_workload
from xmem.workloads import make_batch, make_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xmem.conformance.ranks_program import Findings

Arrays = dict[str, np.ndarray[Any, Any]]

WORKLOAD = replace(small_workload(depth=7, width=128, batch=64), learning_rate=1e-4)
STEPS = 10
FURTHER = 3
MICRO_BATCHES = 8
ACCUMULATE = 2

# What is trained for ten steps: the technique, and what is composed with it.
VARIANTS: dict[str, tuple[str, str]] = {
    "data_parallel": ("data_parallel", ""),
    "data_parallel accumulate": ("data_parallel", "accumulate"),
    "data_parallel checkpoint": ("data_parallel", "checkpoint"),
    "zero1": ("zero1", ""),
    "zero1 accumulate": ("zero1", "accumulate"),
    "zero1 checkpoint": ("zero1", "checkpoint"),
    "zero3": ("zero3", ""),
    "zero3 accumulate": ("zero3", "accumulate"),
    "zero3 checkpoint": ("zero3", "checkpoint"),
    "tensor_parallel": ("tensor_parallel", ""),
    "tensor_parallel accumulate": ("tensor_parallel", "accumulate"),
    "tensor_parallel checkpoint": ("tensor_parallel", "checkpoint"),
    "pipeline": ("pipeline", "1f1b"),
    "pipeline gpipe": ("pipeline", "gpipe"),
    "pipeline checkpoint": ("pipeline", "checkpoint"),
}
WITH_FOUR_RANKS = tuple(name for name, (_, extra) in VARIANTS.items() if extra in ("", "1f1b"))
SAVED = ("zero1", "zero3", "tensor_parallel")


def variants(world: int) -> tuple[str, ...]:
    """Return what is trained on a number of ranks."""
    return tuple(VARIANTS) if world == 2 else WITH_FOUR_RANKS


def state_path(folder: Path, variant: str, world: int) -> Path:
    """Return where a state lies that was saved after ten steps."""
    return folder / f"{variant}-{world}.state"


def reference(findings: Findings) -> None:
    """Train on the whole batch in one process, and keep all that others are held against."""
    trained = Trained(findings, "data_parallel", "alone")
    np.savez(findings.folder / "gradients.npz", **trained.gradients())
    losses = [trained.step() for _ in range(STEPS - 1)]
    measured, loss = trained.measured_step()
    findings.facts["memory"] = measured
    np.savez(findings.folder / "parameters.npz", **trained.parameters())
    xd.save(state_path(findings.folder, "reference", 1), trained.model, trained.optimizer)
    findings.facts["losses"] = [*losses, loss, *(trained.step() for _ in range(FURTHER))]


def load(findings: Findings) -> None:
    """Go on in one process from every state that several ranks have saved."""
    for path in sorted(findings.folder.glob("*.state")):
        if path.stem.startswith("reference"):
            continue
        findings.find(f"go on from {path.stem}", partial(_go_on, findings, "alone", path))


def _go_on(findings: Findings, technique: str, path: Path) -> list[float]:
    extra = "alone" if technique == "alone" else ""
    trained = Trained(findings, technique, extra, is_empty=True)
    xd.load(path, trained.model, trained.optimizer)
    return [trained.step() for _ in range(FURTHER)]


def run(findings: Findings) -> None:
    """Train in all variants; save, and go on from what one process saved."""
    for way in ("plain", "twice", "no_sync", "accumulate"):
        findings.find(f"gradients {way}", partial(_gradients, findings, way), "data_parallel")
    for variant in variants(findings.here.size):
        technique = VARIANTS[variant][0]
        findings.find(f"train {variant}", partial(_train, findings, variant), technique)
    for technique in SAVED:
        findings.find(
            f"go on with {technique}",
            partial(_go_on, findings, technique, state_path(findings.folder, "reference", 1)),
            technique,
        )


def _gradients(findings: Findings, way: str) -> dict[str, list[float]]:
    found = Trained(findings, "data_parallel", "").gradients(way)
    return _differences(found, dict(np.load(findings.folder / "gradients.npz")))


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return squared norms of the difference and of what was expected, and the largest."""
    apart = {name: array.astype(np.float64) - expected[name] for name, array in found.items()}
    return {
        name: [
            float(np.sum(difference**2)),
            float(np.sum(expected[name].astype(np.float64) ** 2)),
            float(np.max(np.abs(difference))),
        ]
        for name, difference in apart.items()
    }


def _train(findings: Findings, variant: str) -> dict[str, Any]:
    technique, extra = VARIANTS[variant]
    trained = Trained(findings, technique, extra)
    losses = [trained.step() for _ in range(STEPS - 1)]
    measured, loss = trained.measured_step()
    found: dict[str, Any] = {"losses": [*losses, loss], "memory": measured}
    expected = dict(np.load(findings.folder / "parameters.npz"))
    found["parameters"] = _differences(trained.parameters(), expected)
    if variant in SAVED:
        path = state_path(findings.folder, variant, findings.here.size)
        xd.save(path, trained.model, trained.optimizer)
    return found


class Trained:
    """The small chain under a technique, on this rank.

    `technique` "alone" divides nothing. A loss is of the whole batch: the ranks' mean.
    """

    def __init__(
        self, findings: Findings, technique: str, extra: str, *, is_empty: bool = False
    ) -> None:
        self._backend = findings.backend
        self._here = findings.here
        self._extra = extra
        self.technique = "alone" if extra == "alone" else technique
        weights = make_weights(WORKLOAD)
        if is_empty:  # what a state is loaded into must not be right by chance
            weights = {name: 0.5 * array for name, array in weights.items()}
        self._pipeline: Any = None
        self.batch = self._tensors(self._arrays())
        self.model, self.optimizer, self._callable = self._divided(weights)

    def _arrays(self) -> list[Any]:
        """Return this rank's inputs and targets."""
        batch = make_batch(WORKLOAD)
        if self.technique not in SHARE_THE_BATCH:
            return list(batch)
        return [share(array, self._here.rank, self._here.size) for array in batch]

    def _tensors(self, arrays: Any) -> tuple[Any, Any]:
        tensor = self._backend.models.tensor
        return tensor(arrays[0]), tensor(arrays[1])

    def _make_optimizer(self, model: Any) -> Any:
        return self._backend.training.make_optimizer(
            WORKLOAD.optimizer, model, learning_rate=WORKLOAD.learning_rate
        )

    def _divided(self, weights: Arrays) -> tuple[Any, Any, Any]:
        if self.technique == "pipeline":
            return self._staged(weights)
        model = self._backend.models.build(WORKLOAD.model, weights)
        blocks = self._backend.models.blocks(model)
        if self._extra == "checkpoint":
            xmem.apply_checkpointing(model, "every", blocks=blocks)
        if self.technique == "zero3":
            model = xd.shard_model(model, blocks=blocks)
        if self.technique == "tensor_parallel":
            model = xd.tensor_parallel(model, linear_pairs(WORKLOAD.model, self._here.size))
        optimizer = self._make_optimizer(model)
        if self.technique == "zero1":
            optimizer = xd.shard_optimizer(optimizer)
        if self.technique in ("data_parallel", "zero1"):
            return model, optimizer, xd.data_parallel(model, optimizer)
        return model, optimizer, model

    def _staged(self, weights: Arrays) -> tuple[Any, Any, Any]:
        def build(stage: Any) -> Any:
            model = self._backend.models.build(stage, stage_weights(stage, weights))
            if self._extra == "checkpoint":
                blocks = self._backend.models.blocks(model)
                xmem.apply_checkpointing(model, "every", blocks=blocks)
            return model

        parts = stages(WORKLOAD, self._here.size)
        self._pipeline = xd.pipeline(
            [partial(build, part) for part in parts],
            micro_batches=MICRO_BATCHES,
            loss_fn=self._loss,
            schedule="gpipe" if self._extra == "gpipe" else "1f1b",
        )
        model = self._pipeline.module
        return model, self._make_optimizer(model), model

    def _loss(self, output: Any, target: Any) -> Any:
        return self._backend.models.loss(WORKLOAD.loss, output, target)

    def _halves(self) -> list[tuple[Any, Any]]:
        """Return this rank's batch in micro-batches."""
        inputs, targets = (np.split(array, ACCUMULATE) for array in self._arrays())
        parts = zip(inputs, targets, strict=True)
        return [self._tensors(part) for part in parts]

    def _backward(self, batch: tuple[Any, Any]) -> Any:
        loss = self._loss(self._callable(batch[0]), batch[1])
        xmem.backward(loss, self.optimizer)
        return loss

    def _accumulated(self) -> float:
        losses = []
        wrapped = {"model": self._callable} if self.technique in ("data_parallel", "zero1") else {}
        with xmem.accumulate(ACCUMULATE, **wrapped):
            for batch in self._halves():
                losses.append(xmem.log_value(self._backward(batch)))
        return sum(losses) / len(losses)

    def step(self) -> float:
        """Run one step; returns the loss of the whole batch."""
        if self._pipeline is not None:
            loss = float(self._pipeline.step(*self.batch, self.optimizer))
        elif self._extra == "accumulate":
            loss = self._accumulated()
        else:
            loss = xmem.log_value(self._backward(self.batch))
        xmem.optimizer_step(self.optimizer)
        xmem.zero_grad(self.optimizer)
        return self._mean(loss)

    def _mean(self, loss: float) -> float:
        if self.technique not in SHARE_THE_BATCH:
            return loss
        found = self._backend.distributed.exchange(loss.hex().encode())
        return sum(float.fromhex(value.decode()) for value in found) / len(found)

    def measured_step(self) -> tuple[dict[str, Any], float]:
        """Run one step under the meter; returns bytes, and the loss."""
        xd.traffic(reset=True)
        with xmem.measure(
            model=self.model, optimizer=self.optimizer, inputs=self.batch
        ) as measurement:
            loss = self.step()
        sent = xd.traffic()
        return {
            "static_bytes": measurement.static_bytes,
            "peak_allocated_bytes": measurement.peak_allocated_bytes,
            "by_category": measurement.by_category,
            "sent_bytes": sent.sent_bytes,
            "calls": sent.calls,
        }, loss

    def gradients(self, way: str = "plain") -> Arrays:
        """Return averaged gradients, however they were made, scaled to one pass over the batch."""
        scale = 1.0
        if way == "accumulate":
            self._accumulated()
        elif way == "no_sync":
            first, second = self._halves()
            with xd.no_sync(self._callable):
                self._backward(first)
            self._backward(second)
            scale = 1 / ACCUMULATE
        else:
            self._backward(self.batch)
        if way == "twice":
            xmem.zero_grad(self.optimizer)
            self._backward(self.batch)
        found = self._backend.training.gradients(self.model, self.optimizer)
        xmem.zero_grad(self.optimizer)
        return {name: scale * array for name, array in found.items()}

    def parameters(self) -> Arrays:
        """Return the parameters by name: all of them on rank 0; of a pipeline, a stage's own."""
        if self._pipeline is not None:
            state = self.model.state_dict()
        else:
            whole = xd.full_state(self.model)
            state = {} if whole is None else whole["model"]
        return {name: _array(value) for name, value in state.items()}


def _array(value: Any) -> np.ndarray[Any, Any]:
    numpy: Callable[[], Any] | None = getattr(value, "numpy", None)
    return np.asarray(value if numpy is None else numpy())
