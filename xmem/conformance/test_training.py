"""Gradients and updates are right before any technique is judged by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, relative_error, small_workload

if TYPE_CHECKING:
    from xmem.backend import Backend

Arrays = dict[str, np.ndarray[Any, Any]]


def test_gradients_agree_with_finite_differences(backend: Backend) -> None:
    """Along random directions: (L(w + e d) - L(w - e d)) / 2e = g . d, within 1 %."""
    need(backend, "models", "training")
    workload = small_workload(depth=2, width=16, batch=32)
    run = SmallRun(backend, workload)
    _, gradients = run.loss_and_gradients()
    generator = np.random.default_rng(7)
    for _ in range(3):
        direction = {n: generator.standard_normal(w.shape) for n, w in run.weights.items()}
        expected = sum(float(np.sum(gradients[n] * direction[n])) for n in direction)
        epsilon = 1e-3
        high, low = (
            SmallRun(backend, workload, _moved(run.weights, direction, sign * epsilon))
            for sign in (1, -1)
        )
        difference = (backend.models.item(high.loss()) - backend.models.item(low.loss())) / (
            2 * epsilon
        )
        assert abs(difference - expected) <= 1e-2 * abs(expected), (difference, expected)


def _moved(weights: Arrays, direction: Arrays, step: float) -> Arrays:
    return {n: (w + step * direction[n]).astype(np.float32) for n, w in weights.items()}


def test_adam_follows_its_rule(backend: Backend) -> None:
    """Three steps against the rule in NumPy, float64, with the backend's own gradients."""
    need(backend, "models", "training")
    workload = small_workload(depth=2, width=16, batch=32)
    run = SmallRun(backend, workload)
    weights: Arrays = {n: w.astype(np.float64) for n, w in run.weights.items()}
    first = {n: np.zeros_like(w) for n, w in weights.items()}
    second = {n: np.zeros_like(w) for n, w in weights.items()}
    stepped = SmallRun(backend, workload)
    for t in (1, 2, 3):
        _, gradients = stepped.loss_and_gradients()
        stepped.step()
        for n, g in gradients.items():
            first[n] = 0.9 * first[n] + 0.1 * g
            second[n] = 0.999 * second[n] + 0.001 * g.astype(np.float64) ** 2
            corrected = np.sqrt(second[n] / (1 - 0.999**t)) + 1e-8
            weights[n] -= workload.learning_rate * (first[n] / (1 - 0.9**t)) / corrected
    expected = SmallRun(backend, workload, {n: w.astype(np.float32) for n, w in weights.items()})
    _, after = stepped.loss_and_gradients()
    _, wanted = expected.loss_and_gradients()
    assert relative_error(after, wanted) <= 1e-4


def test_forgotten_gradients_are_gone(backend: Backend) -> None:
    """A second backward starts from nothing: gradients do not add up."""
    need(backend, "models", "training")
    run = SmallRun(backend, small_workload(depth=2, width=16, batch=32))
    _, once = run.loss_and_gradients()
    _, again = run.loss_and_gradients()
    assert relative_error(again, once) <= 1e-6
