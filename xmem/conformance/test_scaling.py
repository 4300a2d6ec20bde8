"""Losses are scaled, gradients come out unscaled, and an overflow changes nothing but the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

import xmem
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, relative_error, small_workload

if TYPE_CHECKING:
    from xmem.backend import Backend

PATTERNS = ("..", "x", "x.x.", "....x", "xxxx..", "..x..x....")
"""Which steps overflow."""


def _run(backend: Backend) -> SmallRun:
    need(backend, "precision", "models", "training")
    return SmallRun(backend, small_workload(depth=2, width=16, batch=32))


def _step(run: SmallRun, scaler: xmem.GradScaler, factor: float = 1.0) -> float:
    loss = run.loss()
    xmem.backward(scaler.scale(loss * factor), run.optimizer)
    scaler.step(run.optimizer)
    scaler.update()
    xmem.zero_grad(run.optimizer)
    return run.backend.models.item(loss)


def test_unscaled_gradients_are_those_without_a_scale(backend: Backend) -> None:
    """And scaled ones are larger by the scale."""
    run = _run(backend)
    _, plain = run.loss_and_gradients()
    scaler = xmem.GradScaler(2.0**10)
    xmem.backward(scaler.scale(run.loss()), run.optimizer)
    scaled = backend.training.gradients(run.model, run.optimizer)
    assert relative_error({n: g / 2**10 for n, g in scaled.items()}, plain) <= 1e-6
    scaler.unscale_(run.optimizer)
    found = backend.training.gradients(run.model, run.optimizer)
    assert relative_error(found, plain) <= 1e-6


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("before", [0, 2])
def test_an_overflow_changes_no_parameter_no_state_and_no_count(
    backend: Backend, optimizer: str, before: int
) -> None:
    """Training goes on as if the step had never been."""
    need(backend, "precision", "models", "training")
    losses = []
    for overflow in (False, True):
        run = _run(backend)
        run.optimizer = backend.training.make_optimizer(optimizer, run.model, learning_rate=1e-2)
        scaler = xmem.GradScaler(8.0, growth_interval=100)
        found = [_step(run, scaler) for _ in range(before)]
        if overflow:
            _step(run, scaler, math.inf)
            assert scaler.get_scale() == 4.0
        losses.append([*found, *(_step(run, scaler) for _ in range(3))])
    assert losses[1] == losses[0]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_scale_follows_the_overflows(backend: Backend, pattern: str, interval: int) -> None:
    """Halved by each, doubled after so many steps without one: the same on every backend."""
    run = _run(backend)
    scaler = xmem.GradScaler(2.0**8, growth_interval=interval)
    found = []
    for mark in pattern:
        _step(run, scaler, math.inf if mark == "x" else 1.0)
        found.append(scaler.get_scale())
    assert found == _history(pattern, 2.0**8, interval)


def _history(pattern: Sequence[str], scale: float, interval: int) -> list[float]:
    found, finite = [], 0
    for mark in pattern:
        finite = 0 if mark == "x" else finite + 1
        if mark == "x":
            scale /= 2
        elif finite == interval:
            scale, finite = scale * 2, 0
        found.append(scale)
    return found


def test_a_scale_that_is_far_too_high_backs_off_and_the_model_learns(backend: Backend) -> None:
    """From 2^40, on a loss whose gradients overflow float32 with it."""
    run = _run(backend)
    rate = 1e-1 / 1e30  # plain descent: the squares that Adam keeps would overflow unscaled
    run.optimizer = backend.training.make_optimizer("sgd", run.model, learning_rate=rate)
    scaler = xmem.GradScaler(2.0**40)
    losses = [_step(run, scaler, 1e30) for _ in range(60)]
    assert scaler.get_scale() < 2.0**40
    assert losses[0] == losses[1]  # not a single step has been made yet
    assert losses[-1] < 0.9 * losses[0]


def test_a_state_is_taken_up_by_another_scaler(backend: Backend) -> None:
    """Scale and count of finite steps go on."""
    run = _run(backend)
    first = xmem.GradScaler(2.0**8, growth_interval=3)
    _step(run, first)
    second = xmem.GradScaler()
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        _step(run, second)
    assert second.get_scale() == 2.0**9
    with pytest.raises(xmem.UsageError, match=r"enabled=False\?"):
        second.load_state_dict(xmem.GradScaler(enabled=False).state_dict())


def test_a_disabled_scaler_lets_everything_pass(backend: Backend) -> None:
    """The same loop, unscaled."""
    run, plain = _run(backend), _run(backend)
    scaler = xmem.GradScaler(enabled=False)
    assert [_step(run, scaler) for _ in range(2)] == [plain.step() for _ in range(2)]
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (("unscale_", "unscale_"), "has been called"),
        (("step", "step"), "since the last update"),
        (("step", "unscale_"), "unscale_ comes before step"),
        (("update",), "update comes after step"),
    ],
)
def test_calls_in_the_wrong_order_are_refused(
    backend: Backend, calls: tuple[str, ...], said: str
) -> None:
    """Before anything is changed twice."""
    run = _run(backend)
    scaler = xmem.GradScaler()
    xmem.backward(scaler.scale(run.loss()), run.optimizer)

    def call(name: str) -> None:
        arguments: tuple[Any, ...] = () if name == "update" else (run.optimizer,)
        getattr(scaler, name)(*arguments)

    for name in calls[:-1]:
        call(name)
    with pytest.raises(xmem.UsageError, match=said):
        call(calls[-1])


def test_gradients_of_two_scales_are_not_added(backend: Backend) -> None:
    """Backward after `unscale_`, and `unscale_` of a part of the micro-batches."""
    run = _run(backend)
    scaler = xmem.GradScaler()

    def backward() -> None:
        xmem.backward(scaler.scale(run.loss()), run.optimizer)

    backward()
    scaler.unscale_(run.optimizer)
    with pytest.raises(xmem.UsageError, match="backward after unscale_"):
        backward()
    scaler.step(run.optimizer)
    scaler.update()
    xmem.zero_grad(run.optimizer)

    def unscale_a_part() -> None:
        with xmem.accumulate(2):
            backward()
            scaler.unscale_(run.optimizer)

    with pytest.raises(xmem.UsageError, match="unscale_ was called after 1 of 2"):
        unscale_a_part()
    backward()


@pytest.mark.parametrize(
    "options",
    [{"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}],
)
def test_numbers_out_of_range_are_named(backend: Backend, options: dict[str, float]) -> None:
    """With their value."""
    need(backend, "precision")
    [(name, value)] = options.items()
    with pytest.raises(xmem.UsageError, match=f"{name}={value}"):
        xmem.GradScaler(**options)  # type: ignore[arg-type]
