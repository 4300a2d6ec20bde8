"""A small model for tests inside one process: quick to build, exact to check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import xmem
from xmem.workloads import make_batch, make_weights
from xmem.workloads.catalog import Workload
from xmem.workloads.models import mlp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xmem.backend import Backend


def small_workload(*, depth: int = 3, width: int = 64, batch: int = 512) -> Workload:
    """Return a chain whose activations outweigh its parameters."""
    shape = (batch, width)
    model = mlp(depth=depth, width=width)
    return Workload("small", "quick", model, "real", shape, shape, "mse", 0)


class SmallRun:
    """A model, its optimizer and its batch on a backend."""

    def __init__(
        self,
        backend: Backend,
        workload: Workload,
        weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> None:
        self.backend = backend
        self.weights = dict(weights if weights is not None else make_weights(workload))
        self.model = backend.models.build(workload.model, self.weights)
        self.optimizer = backend.training.make_optimizer(
            workload.optimizer, self.model, learning_rate=workload.learning_rate
        )
        inputs, targets = make_batch(workload)
        self.batch = (backend.models.tensor(inputs), backend.models.tensor(targets))
        self._loss_kind = workload.loss

    def loss(self) -> Any:
        """Run the forward pass."""
        inputs, targets = self.batch
        return self.backend.models.loss(self._loss_kind, self.model(inputs), targets)

    def loss_and_gradients(self) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
        """Run forward and backward, and forget the gradients on the framework's side."""
        loss = self.loss()
        xmem.backward(loss, self.optimizer)
        gradients = self.backend.training.gradients(self.model, self.optimizer)
        xmem.zero_grad(self.optimizer)
        return self.backend.models.item(loss), gradients

    def step(self) -> float:
        """Run one training step."""
        loss = self.loss()
        xmem.backward(loss, self.optimizer)
        xmem.optimizer_step(self.optimizer)
        xmem.zero_grad(self.optimizer)
        return self.backend.models.item(loss)


def relative_error(
    found: Mapping[str, np.ndarray[Any, Any]], expected: Mapping[str, np.ndarray[Any, Any]]
) -> float:
    """Return the L2 distance over all arrays, relative to the expected ones' norm."""
    if found.keys() != expected.keys():
        raise AssertionError(f"different names: {sorted(found.keys() ^ expected.keys())}")
    difference = sum(
        float(np.sum((found[n].astype(np.float64) - expected[n]) ** 2)) for n in expected
    )
    norm = sum(float(np.sum(expected[n].astype(np.float64) ** 2)) for n in expected)
    return float(np.sqrt(difference / norm)) if norm else float(np.sqrt(difference))
