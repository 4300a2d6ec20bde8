"""Optimizers with states in few bits: their bytes, and that they train as those in float32."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import xmem
from xmem import optim
from xmem.conformance.plugin import need, refuse_gap
from xmem.conformance.small import SmallRun, small_workload
from xmem.optim_rules import state_bytes
from xmem.report.compare import final_loss
from xmem.workloads import make_batch, workload

if TYPE_CHECKING:
    from xmem.backend import Backend

Maker = Callable[..., Any]

_WIDTH = 128
_RULES: dict[str, tuple[Maker, int]] = {"adamw": (optim.AdamW, 2), "lion": (optim.Lion, 1)}
"""By name: what makes one, and how many moments it keeps."""
_MAKERS: dict[str, Maker] = {
    "adamw": optim.AdamW,
    "lion": optim.Lion,
    "adafactor": lambda params, lr, **options: optim.Adafactor(params, lr, beta1=0.9, **options),
}


def _run(backend: Backend) -> SmallRun:
    need(backend, "quantize", "models", "training")
    refuse_gap(backend.quantize, "optimizers")
    return SmallRun(backend, small_workload(depth=2, width=_WIDTH, batch=32))


def _parameters(run: SmallRun) -> list[Any]:
    return list(run.model.parameters())


def _state_bytes(run: SmallRun) -> int:
    """Return the bytes of the optimizer's states, once there are any."""
    need(run.backend, "measure")
    run.step()
    with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
        run.step()
    if m.by_category is None:
        pytest.skip("the backend's measure knows no categories")
    return m.by_category["optimizer"]


def _expected_bytes(run: SmallRun, bits: int, moments: int) -> int:
    sizes = [w.size for w in run.weights.values()]
    return moments * sum(state_bytes(size, bits if size >= 4096 else 32) for size in sizes)


@pytest.mark.parametrize(("bits", "most"), [(8, 1.03), (4, 0.55), (32, 4.0)])
@pytest.mark.parametrize("rule", _RULES)
def test_states_take_the_bytes_that_are_said(
    backend: Backend, rule: str, bits: int, most: float
) -> None:
    """To 1 %, which leaves counts of steps to the framework; at most so many a number."""
    run = _run(backend)
    make, moments = _RULES[rule]
    run.optimizer = make(_parameters(run), state_bits=bits, min_elements=0)
    found = _state_bytes(run)
    count = sum(w.size for w in run.weights.values())
    expected = moments * sum(state_bytes(w.size, bits) for w in run.weights.values())
    print(f"{found} bytes, {expected} expected, {found / count:.3f} a parameter")
    assert abs(found - expected) <= 0.01 * expected
    assert found <= 1.01 * most * moments * count


@pytest.mark.parametrize("bits", [8, 4])
def test_states_of_small_parameters_stay_in_float32(backend: Backend, bits: int) -> None:
    """Biases, that is, unless `min_elements` says otherwise."""
    run = _run(backend)
    run.optimizer = optim.AdamW(_parameters(run), state_bits=bits)
    found, expected = _state_bytes(run), _expected_bytes(run, bits, 2)
    print(f"{found} bytes, {expected} expected")
    assert abs(found - expected) <= 0.01 * expected


def test_adafactor_keeps_rows_and_columns(backend: Backend) -> None:
    """Of matrices; a vector's second moment is all there."""
    run = _run(backend)
    run.optimizer = optim.Adafactor(_parameters(run))
    expected = 4 * sum(sum(w.shape) for w in run.weights.values())
    assert abs(_state_bytes(run) - expected) <= 0.05 * expected


@pytest.mark.parametrize("bits", [8, 4])
def test_a_running_optimizer_goes_on_in_fewer_bytes(backend: Backend, bits: int) -> None:
    """The suite's Adam, after three steps of its own."""
    plain = _run(backend)
    expected = [plain.step() for _ in range(14)]
    del plain
    run = _run(backend)
    assert [run.step() for _ in range(3)] == expected[:3]
    run.optimizer = optim.quantize_optimizer(run.optimizer, bits)
    losses = [run.step() for _ in range(9)]
    assert losses != expected[3:12]
    assert losses == pytest.approx(expected[3:12], rel=2e-2 if bits == 8 else 1e-1)
    found, wanted = _state_bytes(run), _expected_bytes(run, bits, 2)
    print(f"{found} bytes, {wanted} expected")
    assert abs(found - wanted) <= 0.01 * wanted


def _text_losses(backend: Backend, bits: int, *, steps: int) -> list[float]:
    shape = (4, 64)
    chosen = replace(workload("gpt2-text"), input_shape=shape, target_shape=shape)
    run = SmallRun(backend, chosen)
    run.optimizer = optim.AdamW(_parameters(run), 1e-3, state_bits=bits)
    losses = []
    for step in range(steps):
        inputs, targets = make_batch(chosen, step)
        run.batch = (backend.models.tensor(inputs), backend.models.tensor(targets))
        losses.append(run.step())
    return losses


def test_a_gpt_learns_as_with_states_in_float32(backend: Backend) -> None:
    """The project's own text, 30 steps, new text in each."""
    need(backend, "quantize", "models", "training")
    refuse_gap(backend.quantize, "optimizers")
    plain = _text_losses(backend, 32, steps=30)
    end = final_loss(plain)
    assert end is not None
    assert end < 0.9 * plain[0]
    for bits in (8, 4):
        losses = _text_losses(backend, bits, steps=30)
        found = final_loss(losses)
        print(f"{bits} bits: {found}, 32 bits: {end}")
        assert losses != plain
        assert found == pytest.approx(end, rel=1e-2)


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("rule", _MAKERS)
def test_a_state_that_is_taken_up_goes_on_exactly(backend: Backend, rule: str, bits: int) -> None:
    """Another optimizer over the same parameters does what the first would have done."""
    straight, run = _run(backend), _run(backend)
    straight.optimizer = _MAKERS[rule](_parameters(straight), 1e-3, state_bits=bits)
    expected = [straight.step() for _ in range(6)]
    run.optimizer = _MAKERS[rule](_parameters(run), 1e-3, state_bits=bits)
    losses = [run.step() for _ in range(3)]
    state = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer = _MAKERS[rule](_parameters(run), 1e-3, state_bits=bits)
    run.optimizer.load_state_dict(state)
    losses += [run.step() for _ in range(3)]
    assert losses == expected
    assert losses[-1] < losses[0]


def test_groups_have_rates_of_their_own(backend: Backend) -> None:
    """Of a group with a rate of 0 nothing moves; of one with a rate, everything as without."""

    def losses(first: float, second: float) -> list[float]:
        run = _run(backend)
        held = _parameters(run)
        groups = [{"params": held[:2], "lr": first}, {"params": held[2:], "lr": second}]
        run.optimizer = optim.AdamW(groups, 1.0, weight_decay=0.0)
        return [run.step() for _ in range(3)]

    still, both = losses(0.0, 0.0), losses(1e-3, 1e-3)
    one, other = losses(1e-3, 0.0), losses(0.0, 1e-3)
    assert still[0] == still[1] == still[2]
    alone = _run(backend)
    alone.optimizer = optim.AdamW(_parameters(alone), 1e-3, weight_decay=0.0)
    assert [alone.step() for _ in range(3)] == both
    assert both[2] < min(one[2], other[2])
    assert max(one[2], other[2]) < still[2]


def test_a_skipped_step_changes_nothing(backend: Backend) -> None:
    """A scaler's: states, counts and parameters go on as if it had never been."""
    need(backend, "precision")
    found = []
    for overflow in (False, True):
        run = _run(backend)
        run.optimizer = optim.AdamW(_parameters(run), 1e-3)
        scaler = xmem.GradScaler(8.0, growth_interval=100)
        losses = []
        for factor in (1.0, 1.0, math.inf, 1.0, 1.0)[: None if overflow else 4]:
            if math.isinf(factor) and not overflow:
                continue
            loss = run.loss()
            xmem.backward(scaler.scale(loss * factor), run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            xmem.zero_grad(run.optimizer)
            if not math.isinf(factor):
                losses.append(run.backend.models.item(loss))
        found.append(losses)
    shorter, longer = found
    assert longer[: len(shorter)] == shorter


def test_accumulated_and_clipped_gradients_are_stepped_once(backend: Backend) -> None:
    """Two micro-batches of the same data are one batch."""
    found = []
    for steps in (1, 2):
        run = _run(backend)
        run.optimizer = optim.AdamW(_parameters(run), 1e-3)
        losses = []
        for _ in range(3):
            with xmem.accumulate(steps):
                for _ in range(steps):
                    loss = run.loss()
                    xmem.backward(loss, run.optimizer)
            xmem.clip_grad_norm_(run.optimizer, 1e-3)
            xmem.optimizer_step(run.optimizer)
            xmem.zero_grad(run.optimizer)
            losses.append(run.backend.models.item(loss))
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0][-1] < found[0][0]


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"state_bits": 16}, {"min_elements": -1}]
)
def test_options_out_of_range_are_named(backend: Backend, options: dict[str, Any]) -> None:
    """With their value, before anything is made."""
    run = _run(backend)
    [(name, value)] = options.items()
    with pytest.raises(xmem.UsageError, match=name) as caught:
        optim.AdamW(_parameters(run), **options)
    assert repr(value) in str(caught.value)
