"""Compressed activations: fewer bytes, the same losses, gradients off by the rounding alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xmem
from xmem.codec import packed_bytes
from xmem.conformance.plugin import need
from xmem.conformance.small import SmallRun, relative_error, small_workload
from xmem.layouts import modules_of

if TYPE_CHECKING:
    from xmem.backend import Backend

_DEPTH = 6


def _run(backend: Backend) -> SmallRun:
    need(backend, "saved", "measure", "models", "training", "checkpoint")
    return SmallRun(backend, small_workload(depth=_DEPTH, width=64, batch=1024))


def _gradients(run: SmallRun, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    with xmem.compress_activations(**{"model": run.model, **options}):
        loss = run.loss()
    xmem.backward(loss, run.optimizer)
    gradients = run.backend.training.gradients(run.model, run.optimizer)
    xmem.zero_grad(run.optimizer)
    return gradients


def _peak_above(run: SmallRun, **options: Any) -> int:
    """Return the bytes above static that forward and backward take."""
    run.loss_and_gradients()
    with xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.batch) as m:
        if options:
            with xmem.compress_activations(model=run.model, **options):
                loss = run.loss()
        else:
            loss = run.loss()
        xmem.backward(loss, run.optimizer)
        run.backend.measure.synchronize()
        xmem.zero_grad(run.optimizer)
    return m.peak_above_static_bytes


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 1e-6, 1e-2), (4, 1e-3, 2e-1)])
def test_losses_are_the_same_and_gradients_close(
    backend: Backend, bits: int, least: float, most: float
) -> None:
    """An error of zero would mean that nothing was packed."""
    run = _run(backend)
    plain_loss, plain = run.loss_and_gradients()
    with xmem.compress_activations(bits=bits, model=run.model):
        loss = run.loss()
    assert run.backend.models.item(loss) == pytest.approx(plain_loss, rel=1e-6)
    del loss
    error = relative_error(_gradients(run, bits=bits), plain)
    assert least < error < most, error
    loss_after, after = run.loss_and_gradients()
    assert loss_after == plain_loss
    assert relative_error(after, plain) <= 1e-6, "the block has left something behind"


def test_fewer_bits_take_fewer_bytes(backend: Backend) -> None:
    """At the peak of forward and backward."""
    run = _run(backend)
    plain, eight, four = _peak_above(run), _peak_above(run, bits=8), _peak_above(run, bits=4)
    print(f"plain {plain}, 8 bits {eight}, 4 bits {four}")
    assert four < eight < 0.7 * plain


def test_the_rounding_is_unbiased(backend: Backend) -> None:
    """The mean of gradients under many seeds comes closer to the exact ones, by the root of 16.

    At 8 bits: at 4 the error of what is not linear (GELU's derivative) is no longer small.
    """
    run = _run(backend)
    _, plain = run.loss_and_gradients()
    found = [_gradients(run, bits=8, seed=seed) for seed in range(16)]
    single = np.mean([relative_error(g, plain) for g in found])
    mean = {n: np.mean([g[n] for g in found], axis=0) for n in plain}
    assert relative_error(mean, plain) < 0.4 * single


def test_the_same_seed_gives_the_same_gradients(backend: Backend) -> None:
    """And another one others."""
    run = _run(backend)
    first, again = (_gradients(run, bits=8, seed=3) for _ in range(2))
    assert relative_error(again, first) <= 1e-7
    assert relative_error(_gradients(run, bits=8, seed=4), first) > 1e-6


def test_the_receipt_counts_exactly(backend: Backend) -> None:
    """Packed bytes are those of the codec; what is made of other packed tensors takes none."""
    run = _run(backend)
    with xmem.compress_activations(bits=8, model=run.model) as block:
        run.loss()
    receipt = block.receipt
    assert receipt.applied_to == len(block.layers) >= _DEPTH
    assert all(bits == 8 for bits in block.layers.values())
    elements = sum(count for count, _ in block.sizes.values())
    assert block.raw_bytes == 4 * elements
    each = packed_bytes(1024 * 64, 8)
    assert block.packed_bytes % each == 0
    assert _DEPTH * each <= block.packed_bytes <= elements // (1024 * 64) * each
    assert receipt.expected_saving_bytes == block.raw_bytes - block.packed_bytes


def test_what_is_skipped_is_kept(backend: Backend) -> None:
    """By path; and all of it, which is worth a warning."""
    run = _run(backend)
    with xmem.compress_activations(bits=8, model=run.model) as block:
        run.loss()
    first = next(iter(block.layers))
    with xmem.compress_activations(bits=8, model=run.model, skip=(first,)) as fewer:
        run.loss()
    assert set(fewer.layers) == set(block.layers) - {first}
    assert fewer.kept_bytes["skipped"] > 0
    with (
        pytest.warns(xmem.XmemWarning, match="applied to nothing"),
        xmem.compress_activations(bits=8, model=run.model, min_bytes="1GiB"),
    ):
        run.loss()


@pytest.mark.parametrize("bits", [3, 16, "8", True])
def test_other_bits_are_refused(backend: Backend, bits: Any) -> None:
    """Before the block is entered."""
    need(backend, "saved")
    with pytest.raises(xmem.UsageError, match="8, 4 and 2"):
        xmem.compress_activations(bits=bits)


def test_bits_by_layer(backend: Backend) -> None:
    """Layers that are not named stay uncompressed."""
    run = _run(backend)
    with xmem.compress_activations(bits=8, model=run.model) as block:
        run.loss()
    first, second, *_ = block.layers
    with xmem.compress_activations(bits={first: 8, second: 4}, model=run.model) as mixed:
        run.loss()
    assert mixed.layers == {first: 8, second: 4}


def _path_without_activations(layers: Iterable[str]) -> str:
    """Return the path of a module inside of which layers save, and which saves nothing itself."""
    return min({path.rpartition(".")[0] for path in layers} - {"", *layers})


@pytest.mark.parametrize("argument", ["bits", "skip"])
def test_a_path_that_leads_nowhere_is_refused(backend: Backend, argument: str) -> None:
    """With the nearest one that there is, and before anything is entered."""
    run = _run(backend)
    with xmem.compress_activations(bits=8, model=run.model) as block:
        run.loss()
    first = next(iter(block.layers))
    wrong = f"{first}x"
    given: dict[str, Any] = {"bits": {wrong: 8}} if argument == "bits" else {"skip": (wrong,)}
    with (
        pytest.raises(xmem.UsageError, match=f"layer in {argument} '{wrong}'. Did you mean"),
        xmem.compress_activations(model=run.model, **given),
    ):
        pytest.fail("it was entered")
    _, plain = run.loss_and_gradients()
    _, again = run.loss_and_gradients()
    assert relative_error(again, plain) <= 1e-6, "the block has left something behind"


@pytest.mark.parametrize("argument", ["bits", "skip"])
def test_a_name_that_changes_nothing_is_warned_of(backend: Backend, argument: str) -> None:
    """Without a model, paths are those of what ran; what did something is not named."""
    run = _run(backend)
    with xmem.compress_activations(bits=8) as block:
        run.loss()
    first = next(iter(block.layers))
    given: dict[str, Any] = (
        {"bits": {first: 8, "nowhere": 4}} if argument == "bits" else {"skip": (first, "nowhere")}
    )
    with (
        pytest.warns(xmem.XmemWarning, match="of 'nowhere' nothing was saved") as warned,
        xmem.compress_activations(**given),
    ):
        run.loss()
    assert len(warned) == 1
    assert first in str(warned[0].message)


def test_a_layer_is_skipped_with_all_inside(backend: Backend) -> None:
    """Whether it is named by its path, is given itself, or by its class."""
    run = _run(backend)
    with xmem.compress_activations(bits=8, model=run.model) as block:
        run.loss()
    path = _path_without_activations(block.layers)
    module = dict(modules_of(backend.checkpoint, run.model))[path]
    found = []
    for item in (path, module, type(module)):
        with xmem.compress_activations(bits=8, model=run.model, skip=(item,)) as fewer:
            run.loss()
        found.append(set(fewer.layers))
    inside = {layer for layer in block.layers if layer.startswith(f"{path}.")}
    assert found[0] == found[1] == set(block.layers) - inside
    assert not found[2] & inside


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 8.0}, "8, 4 and 2"),
        ({"skip": "head"}, "give a sequence"),
        ({"skip": None}, "give a sequence"),
        ({"seed": "x"}, "whole number"),
        ({"batch": 1}, 'bits="auto"'),
    ],
)
def test_other_options_are_refused(backend: Backend, given: dict[str, Any], message: str) -> None:
    """Before the block is entered."""
    need(backend, "saved")
    with pytest.raises(xmem.UsageError, match=message):
        xmem.compress_activations(**given)


def test_bits_are_chosen_within_an_error(backend: Backend) -> None:
    """What is chosen keeps to the error that was asked for, and more error needs fewer bytes."""
    run = _run(backend)
    need(backend, "plans")
    backend_loss = run.backend.models.loss

    def loss_fn(model: Any, batch: Any) -> Any:
        return backend_loss("mse", model(batch[0]), batch[1])

    for wrong in (0, "small"):
        with pytest.raises(xmem.UsageError, match="error that gradients may have"):
            xmem.choose_bits(run.model, run.batch, loss_fn, error=wrong)  # type: ignore[arg-type]
    tight, loose = (
        xmem.choose_bits(run.model, run.batch, loss_fn, error=error) for error in (0.01, 0.1)
    )
    assert tight.error <= 0.01
    assert loose.error <= 0.1
    assert loose.packed_bytes < tight.packed_bytes < tight.raw_bytes
    _, plain = run.loss_and_gradients()
    assert relative_error(_gradients(run, bits=loose, seed=7), plain) <= 0.15
    with xmem.compress_activations(
        "auto", model=run.model, batch=run.batch, loss_fn=loss_fn, error=0.1
    ) as block:
        run.loss()
    assert dict(block.layers) == {p: b for p, b in loose.items() if b != 32}
