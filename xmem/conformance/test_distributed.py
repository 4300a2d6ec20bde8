"""Two and four ranks: exact collectives, refusals on every rank, training as one process does it.

A few programs check many things (`ranks_program`); here is said what they must have found. The
reference is one process of the same backend with the whole batch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xmem.conformance import launched, ranks_training
from xmem.conformance.plugin import gap, need, refuse_gap
from xmem.conformance.ranks_collectives import COUNT, FLOATS, INTEGERS
from xmem.conformance.ranks_program import findings_path
from xmem.conformance.ranks_training import FURTHER, SAVED, STEPS

if TYPE_CHECKING:
    from xmem.backend import Backend

WORLDS = (2, 4)
LIMIT_SECONDS = 300.0
LOG_LINES = 60
TOLERANCE = 1e-6
"""How far losses and parameters may be from one process's, relative; parameters in the L2 norm.
Sums are made in another order, in float32."""
SINGLE_TOLERANCE = 5e-6
"""How far a single parameter may be. Adam divides by the size of a gradient, so one that is nearly
zero moves by its rounding; ten steps move a parameter by up to 1e-3."""

PARAMETERS = 16
"""Weights and biases of the chain: seven blocks and a head."""

_NEEDS = {"several": (("reference", 1),), "load": tuple(("several", world) for world in WORLDS)}
"""Which parts are run before one, and on how many ranks."""

_KINDS = ("shape", "dtype", "op", "call", "count")


class Ranks:
    """What the ranks of a program found."""

    def __init__(self, world: int, by_rank: list[dict[str, Any]], log: str) -> None:
        self.world = world
        self._by_rank = by_rank
        self._log = log

    def found(self, name: str) -> list[Any]:
        """Return what each rank found; a declared gap and a failure end the test."""
        for found in self._by_rank:
            if name in found["gaps"]:
                gap(f"declared gap: {name}: {found['gaps'][name]}")
        silent = [rank for rank, found in enumerate(self._by_rank) if name not in found["facts"]]
        if silent:
            told = [
                f"rank {rank}, {found['failed']['what']}:\n{found['failed']['error']}"
                for rank, found in enumerate(self._by_rank)
                if found["failed"]
            ]
            pytest.fail(
                f"ranks {silent} of {self.world} never came to {name!r}:"
                + "\n".join(["", *(told or [self._log])])
            )
        return [found["facts"][name] for found in self._by_rank]


Programs = Callable[["Backend", str, int], Ranks]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Programs:
    """Run a part on a number of ranks, once; what it needs is run before it."""
    known: dict[tuple[str, str, int], Ranks] = {}
    folders: dict[str, Path] = {}

    def run(backend: Backend, part: str, world: int) -> Ranks:
        need(backend, "distributed", "models", "training", "measure")
        key = (backend.name, part, world)
        if key not in known:
            if backend.name not in folders:
                folders[backend.name] = tmp_path_factory.mktemp("ranks")
            for earlier in _NEEDS.get(part, ()):
                run(backend, *earlier)
            device = request.config.getoption("--device")
            known[key] = _run(backend.name, device, folders[backend.name], part, world)
        return known[key]

    return run


def _run(backend: str, device: str, folder: Path, part: str, world: int) -> Ranks:
    program = ["-m", "xmem.conformance.ranks_program", backend, device, str(folder), part]
    log = folder / f"{part}-{world}.log"
    launched.run_program(backend, world, program, log, limit_seconds=LIMIT_SECONDS)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    silent: dict[str, Any] = {"facts": {}, "gaps": {}, "failed": None}
    found = []
    for rank in range(world):
        path = findings_path(folder, part, world, rank)
        found.append(json.loads(path.read_text(encoding="utf-8")) if path.exists() else silent)
    return Ranks(world, found, "\n".join(["\nwhat was printed last:", *lines]))


@pytest.fixture(params=WORLDS, ids=[f"{world}-ranks" for world in WORLDS])
def ranks(request: pytest.FixtureRequest, backend: Backend, programs: Programs) -> Ranks:
    """What two or four ranks found."""
    return programs(backend, "several", request.param)


@pytest.fixture
def reference(backend: Backend, programs: Programs) -> dict[str, Any]:
    """What one process found, with the whole batch."""
    names = ("memory", "losses")
    found = programs(backend, "reference", 1)
    return {name: found.found(name)[0] for name in names}


def _reduced(op: str, world: int, count: int = COUNT) -> list[float]:
    numbers = range(1, world + 1)
    factor = {"sum": sum(numbers), "max": world, "mean": sum(numbers) / world}[op]
    return [float(value * factor) for value in range(1, count + 1)]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_all_reduce_is_right_for_every_type_and_operation(ranks: Ranks, dtype: str) -> None:
    """The result has the tensors' type on every rank, and what was given is as it was."""
    for op in ("sum", "max", *(("mean",) if dtype in FLOATS else ())):
        for rank, (found, values, kept) in enumerate(ranks.found(f"all_reduce {dtype} {op}")):
            assert found == dtype
            assert values == _reduced(op, ranks.world), (op, rank)
            assert kept == [n * (rank + 1.0) for n in range(1, COUNT + 1)], (op, rank)


def test_large_integers_do_not_pass_through_floats(ranks: Ranks) -> None:
    """2^40 + 1 and the like are added up exactly."""
    factor = sum(range(1, ranks.world + 1))
    expected = [float((2**40 + 1) * factor), float((-(2**40) - 3) * factor)]
    assert ranks.found("all_reduce of large int64") == [expected] * ranks.world


def test_lists_go_in_buckets_in_place_and_later(ranks: Ranks) -> None:
    """Tensors of several types keep their order; buffers hold no more than single tensors."""
    counts = (3, 40, 1, 5)
    for values, held in ranks.found("all_reduce of a list"):
        assert values == [_reduced("sum", ranks.world, n) for n in counts]
        assert held <= 2 * 160, held
    sums = [_reduced("sum", ranks.world), _reduced("sum", ranks.world, 2)]
    assert ranks.found("all_reduce in place") == [sums] * ranks.world
    for first, second, again in ranks.found("all_reduce later"):
        assert first == again == _reduced("sum", ranks.world)
        assert second == _reduced("max", ranks.world)


def test_the_other_collectives_are_right(ranks: Ranks) -> None:
    """Broadcast, all-gather, reduce-scatter and all-to-all, by shape and value."""
    world = ranks.world
    numbers = range(1, world + 1)
    assert ranks.found("broadcast") == [[2.0 * n for n in range(1, COUNT + 1)]] * world
    gathered = [float(n * k) for k in numbers for n in (1, 2)]
    assert ranks.found("all_gather") == [[[world, 2], gathered]] * world
    for rank in range(world):
        pair = (2 * rank + 1, 2 * rank + 2)
        scattered = [float(n * sum(numbers)) for n in pair]
        assert ranks.found("reduce_scatter")[rank] == [[2], scattered]
        received = [float(n * k) for k in numbers for n in pair]
        assert ranks.found("all_to_all")[rank] == [[world, 2], received]


@pytest.mark.parametrize(
    ("compression", "error", "share"),
    [("bf16", 1e-2, 0.51), ("fp16", 1e-3, 0.51), ("int8", 1.5e-2, 0.27)],
)
def test_few_bits_send_fewer_bytes_and_round(
    ranks: Ranks, compression: str, error: float, share: float
) -> None:
    """Of a sum of normal numbers; no rounding at all would mean that nothing was packed."""
    for found, sent in ranks.found(f"compressed {compression}"):
        assert 1e-6 < found <= error
        assert sent <= share


def test_bytes_are_counted_by_the_usual_ring(ranks: Ranks) -> None:
    """2 (n - 1) / n of 4,800 bytes for one all-reduce, however the engine does it."""
    expected = 2 * (ranks.world - 1) * 4800 // ranks.world
    for found in ranks.found("sent bytes"):
        assert found["all_reduce"] == expected


@pytest.mark.parametrize("kind", _KINDS)
def test_a_mismatch_is_an_error_on_every_rank_and_nothing_is_stuck(ranks: Ranks, kind: str) -> None:
    """Each rank is told, none waits, and the next call is right."""
    right = str(_reduced("sum", ranks.world))
    for name, told, after in ranks.found(f"mismatch of {kind}"):
        assert name == "CollectiveMismatchError", told
        assert told
        assert after == right


@pytest.mark.parametrize("way", ["plain", "twice", "no_sync", "accumulate"])
def test_gradients_are_averaged_exactly_once(ranks: Ranks, way: str) -> None:
    """Not twice, not never; also after `no_sync` and inside `accumulate`."""
    for rank, found in enumerate(ranks.found(f"gradients {way}")):
        assert len(found) == PARAMETERS
        assert _relative(found) <= TOLERANCE, (rank, found)


@pytest.mark.parametrize(
    ("ranks", "variant"),
    [(world, variant) for world in WORLDS for variant in ranks_training.variants(world)],
    ids=lambda value: f"{value}-ranks" if isinstance(value, int) else value,
    indirect=["ranks"],
)
def test_ten_steps_are_those_of_one_process(
    ranks: Ranks, reference: dict[str, Any], variant: str
) -> None:
    """Losses of every step, and every parameter after the last; compositions on two ranks."""
    found = ranks.found(f"train {variant}")
    for rank, trained in enumerate(found):
        assert len(trained["losses"]) == STEPS
        for step, loss in enumerate(trained["losses"]):
            expected = reference["losses"][step]
            assert abs(loss - expected) <= TOLERANCE * expected, (rank, step, loss, expected)
    differences = {name: d for trained in found for name, d in trained["parameters"].items()}
    assert len(differences) == PARAMETERS
    assert _relative(differences) <= TOLERANCE, differences
    assert max(largest for *_, largest in differences.values()) <= SINGLE_TOLERANCE, differences


def _relative(differences: dict[str, list[float]]) -> float:
    """Return the distance over all arrays, relative to their norm."""
    squares = [sum(values) for values in zip(*differences.values(), strict=True)]
    return float((squares[0] / squares[1]) ** 0.5)


def test_training_learns_in_the_reference(reference: dict[str, Any]) -> None:
    """What everything is held against is no standstill."""
    assert reference["losses"][-1] < 0.999 * reference["losses"][0]


def test_zero1_keeps_a_share_of_the_optimizers_states(
    ranks: Ranks, reference: dict[str, Any]
) -> None:
    """Of the bytes that one process keeps; whole parameters may be a rank's own."""
    whole = reference["memory"]["by_category"]
    if whole is None:
        gap("the backend's source cannot split the peak")
    for trained in ranks.found("train zero1"):
        share = trained["memory"]["by_category"]["optimizer"] / whole["optimizer"]
        assert share <= 1 / ranks.world + 0.03, share


def test_zero3_keeps_a_share_of_what_data_parallel_keeps(ranks: Ranks) -> None:
    """Parameters and states before the step, on every rank."""
    pairs = zip(ranks.found("train zero3"), ranks.found("train data_parallel"), strict=True)
    for sharded, whole in pairs:
        small, large = (found["memory"]["static_bytes"] for found in (sharded, whole))
        assert small <= (1 / ranks.world + 0.08) * large, (small, large)


def test_tensor_and_pipeline_parallel_keep_less_than_one_process(
    ranks: Ranks, reference: dict[str, Any]
) -> None:
    """Before the step, on every rank."""
    whole = reference["memory"]["static_bytes"]
    for variant, share in (("tensor_parallel", 0.75), ("pipeline", 0.75)):
        for found in ranks.found(f"train {variant}"):
            static = found["memory"]["static_bytes"]
            assert static <= share * whole, (variant, static, whole)


def test_what_a_step_communicates_is_counted(ranks: Ranks) -> None:
    """Gradients once around the ring for data parallel; the others send something, too."""
    parameters = 8 * (128 * 128 + 128) * 4
    ring = 2 * (ranks.world - 1) * parameters / ranks.world
    for found in ranks.found("train data_parallel"):
        sent = sum(found["memory"]["sent_bytes"].values())
        assert ring <= sent <= 1.1 * ring + 4096, (sent, ring, found["memory"]["sent_bytes"])
    for variant in ("zero1", "zero3", "tensor_parallel", "pipeline"):
        found = ranks.found(f"train {variant}")
        assert sum(sum(f["memory"]["sent_bytes"].values()) for f in found) > 0, variant


@pytest.mark.parametrize("technique", SAVED)
def test_what_one_process_saved_goes_on_sharded(
    ranks: Ranks, reference: dict[str, Any], technique: str
) -> None:
    """Parameters and states of ten steps; the next losses are the reference's."""
    for found in ranks.found(f"go on with {technique}"):
        _same_losses(found, reference)


@pytest.mark.parametrize("technique", SAVED)
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world}-ranks")
def test_what_several_ranks_saved_goes_on_in_one_process(
    backend: Backend, programs: Programs, reference: dict[str, Any], technique: str, world: int
) -> None:
    """One unsharded file."""
    refuse_gap(backend.distributed, technique)
    (found,) = programs(backend, "load", 1).found(f"go on from {technique}-{world}")
    _same_losses(found, reference)


def _same_losses(found: list[float], reference: dict[str, Any]) -> None:
    expected = reference["losses"][-FURTHER:]
    assert len(found) == FURTHER
    for loss, wanted in zip(found, expected, strict=True):
        assert abs(loss - wanted) <= 2 * TOLERANCE * wanted, (found, expected)


def test_the_suite_starts_ranks_with_this_python(backend: Backend) -> None:
    """What is launched is what is tested."""
    need(backend, "distributed")
    assert sys.executable in launched.command_of(backend.name, 2, ["-m", "this"])
