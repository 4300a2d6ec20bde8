"""Offload: bytes leave the device and come back, and nothing else changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xmem
from xmem.conformance.full_disk import files_of_at_most
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, relative_error, small_workload
from xmem.offload import activations
from xmem.offload.depot import Depot

if TYPE_CHECKING:
    from pathlib import Path

    from xmem.backend import Backend

_DEPTH = 6
_STEPS = 5
_EXACT = 1e-6
"""What a lazy framework's fusion may change; where operations run at once, nothing does."""


def _run(backend: Backend, *, rows: int = 1024, width: int = 64) -> SmallRun:
    need(backend, "saved", "offload", "measure", "models", "training", "checkpoint")
    return SmallRun(backend, small_workload(depth=_DEPTH, width=width, batch=rows))


def _adam(run: SmallRun) -> SmallRun:
    run.optimizer = run.backend.training.make_optimizer("adam", run.model, learning_rate=1e-3)
    return run


@pytest.fixture
def depots(monkeypatch: pytest.MonkeyPatch) -> list[Depot]:
    """Every depot that is made."""
    found: list[Depot] = []
    real = Depot.__init__

    def noting(self: Depot, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        found.append(self)

    monkeypatch.setattr(Depot, "__init__", noting)
    return found


def _offloaded(run: SmallRun, **options: Any) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
    with xmem.offload_activations("disk", model=run.model, **options):
        loss = run.loss()
    xmem.backward(loss, run.optimizer)
    gradients = run.backend.training.gradients(run.model, run.optimizer)
    xmem.zero_grad(run.optimizer)
    return run.backend.models.item(loss), gradients


def _peak_above(run: SmallRun, forward: Callable[[], Any]) -> int:
    with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
        xmem.backward(forward(), run.optimizer)
        run.backend.measure.synchronize()
        xmem.zero_grad(run.optimizer)
    return m.peak_above_static_bytes


def _parameters(run: SmallRun) -> dict[str, np.ndarray[Any, Any]]:
    named = dict(run.model.named_parameters())
    return {n: np.array(p.detach().clone().cpu().numpy()) for n, p in named.items()}


@pytest.mark.parametrize("prefetch", [0, "1MiB"])
def test_losses_and_gradients_do_not_change_when_activations_leave(
    backend: Backend, depots: list[Depot], prefetch: Any, tmp_path: Path
) -> None:
    """They leave, they are read, and nothing of them stays behind."""
    run = _run(backend)
    plain_loss, plain = run.loss_and_gradients()
    loss, found = _offloaded(run, prefetch=prefetch, directory=tmp_path)
    assert loss == pytest.approx(plain_loss, rel=1e-7)
    assert relative_error(found, plain) <= _EXACT
    assert sum(d.stats.written_bytes for d in depots) >= _DEPTH * 1024 * 64 * 4
    assert sum(d.stats.read_bytes for d in depots) >= _DEPTH * 1024 * 64 * 4
    assert sum(d.stats.stored_bytes for d in depots) == 0
    after_loss, after = run.loss_and_gradients()
    assert after_loss == plain_loss
    assert relative_error(after, plain) <= _EXACT, "the block has left something behind"


def test_activations_that_leave_lower_the_peak(backend: Backend) -> None:
    """Of forward and backward; a chain this deep has most of its peak in what is kept."""
    run = _run(backend)
    run.loss_and_gradients()
    plain = _peak_above(run, run.loss)

    def away() -> Any:
        with xmem.offload_activations("disk", model=run.model, prefetch=0):
            return run.loss()

    _peak_above(run, away)
    found = _peak_above(run, away)
    print(f"plain {plain} bytes, offloaded {found}")
    assert found < 0.7 * plain


def test_the_receipt_says_what_left_and_nothing_is_silent(backend: Backend) -> None:
    """A block that moves nothing warns."""
    run = _run(backend)
    with xmem.offload_activations("disk", model=run.model) as block:
        run.loss()
    receipt = block.receipt
    assert receipt.technique == "offload_activations"
    assert receipt.applied_to == len(block.layers) >= _DEPTH
    assert block.raw_bytes >= block.away_bytes >= _DEPTH * 1024 * 64 * 4
    assert receipt.expected_saving_bytes is not None
    assert block.away_bytes <= receipt.expected_saving_bytes <= block.raw_bytes
    with (
        pytest.warns(xmem.XmemWarning, match="applied to nothing"),
        xmem.offload_activations("disk", model=run.model, min_bytes="1GiB"),
    ):
        run.loss()


def test_a_disk_that_is_full_raises_within_the_step_and_training_goes_on(
    backend: Backend, tmp_path: Path
) -> None:
    """Nothing is lost: the next step without offload is the one that it would have been."""
    run, twin = _run(backend), _run(backend)
    twin.step()
    with files_of_at_most(300_000), pytest.raises(xmem.OffloadError, match="Nothing is lost"):
        _offloaded(run, directory=tmp_path)
    xmem.zero_grad(run.optimizer)
    run.step()
    assert relative_error(_parameters(run), _parameters(twin)) <= _EXACT
    assert run.step() == pytest.approx(twin.step(), rel=_EXACT)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_missing_is_refused_before_anything_changes(
    backend: Backend, tmp_path: Path
) -> None:
    """By all three functions, with the remedy."""
    run, missing = _run(backend), tmp_path / "missing"
    for function, target in (
        (xmem.offload_optimizer, run.optimizer),
        (xmem.offload_parameters, run.model),
    ):
        with pytest.raises(xmem.OffloadError, match="Give directory="):
            function(target, "disk", directory=missing)
    with (
        pytest.raises(xmem.OffloadError, match="Give directory="),
        xmem.offload_activations("disk", model=run.model, directory=missing),
    ):
        run.loss()
    run.step()
    with pytest.raises(xmem.UsageError, match="'disc'"):
        xmem.offload_optimizer(run.optimizer, "disc")  # type: ignore[arg-type]


def test_going_to_the_host_is_warned_of_at_the_users_line(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where it saves no memory of the machine."""
    if backend.device != "cpu":
        pytest.skip("the host's memory is another one")
    run = _run(backend)
    monkeypatch.setattr(activations, "_open", {})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        xmem.offload_optimizer(run.optimizer, "host").undo()
        xmem.offload_parameters(run.model, "host").undo()
        with xmem.offload_activations("host", model=run.model):
            run.loss()
    assert [w.filename for w in found if "to='host'" in str(w.message)] == [__file__] * 3


def test_an_optimizer_whose_states_are_away_steps_as_without(
    backend: Backend, depots: list[Depot]
) -> None:
    """The same losses and parameters, also when its states have come back."""
    run, twin = _adam(_run(backend, rows=32)), _adam(_run(backend, rows=32))
    twin.step()
    run.step()
    receipt = xmem.offload_optimizer(run.optimizer, "disk", block="64KiB")
    assert receipt.technique == "offload_optimizer"
    assert receipt.applied_to
    for _ in range(_STEPS):
        assert run.step() == pytest.approx(twin.step(), rel=_EXACT)
    assert relative_error(_parameters(run), _parameters(twin)) <= _EXACT
    assert sum(d.stats.written_bytes for d in depots) > 0
    receipt.undo()
    for _ in range(2):
        assert run.step() == pytest.approx(twin.step(), rel=_EXACT)
    xmem.offload_optimizer(run.optimizer, "disk")
    with pytest.raises(xmem.UsageError):
        xmem.offload_optimizer(run.optimizer, "disk")


def test_states_that_are_away_take_no_memory_of_the_device(backend: Backend) -> None:
    """At most a tenth of what they took, between steps."""
    run = _adam(_run(backend, rows=32, width=256))
    states = 8 * sum(w.size for w in run.weights.values())

    def static_bytes() -> int:
        run.step()
        with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
            pass
        return m.static_bytes

    plain = static_bytes()
    xmem.offload_optimizer(run.optimizer, "disk", block="64KiB")
    found = static_bytes()
    print(f"static {plain} bytes, {found} with states away, of which states were {states}")
    assert plain - found >= 0.9 * states


def test_a_model_whose_parameters_are_away_computes_the_same(
    backend: Backend, depots: list[Depot]
) -> None:
    """And has them again after `undo()`."""
    run = _run(backend, rows=32)
    with xmem.inference(run.model):
        plain = run.backend.models.item(run.loss())
    before = _parameters(run)
    receipt = xmem.offload_parameters(run.model, "disk")
    assert receipt.technique == "offload_parameters"
    assert receipt.applied_to
    already = sum(d.stats.read_bytes for d in depots)
    with xmem.inference(run.model):
        for _ in range(2):
            assert run.backend.models.item(run.loss()) == pytest.approx(plain, rel=1e-7)
    found = sum(d.stats.read_bytes for d in depots) - already
    assert found >= sum(w.nbytes for w in before.values()), "they were not away"
    receipt.undo()
    assert relative_error(_parameters(run), before) == 0
    run.step()
