"""How a workload is divided over ranks: rows of a batch, pairs of layers, stages.

Declarations and arrays only; whatever the framework, the parts are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from xmem.distributing import Dim
from xmem.errors import CapabilityError
from xmem.workloads.catalog import Workload
from xmem.workloads.spec import (
    Activation,
    BatchNorm,
    Block,
    Layer,
    Linear,
    Sequential,
    children,
    parameters,
)

Array: TypeAlias = np.ndarray[Any, Any]
Path: TypeAlias = tuple[str, ...]


def share(array: Array, rank: int, world: int) -> Array:
    """Return a rank's rows of a batch.

    Raises:
        CapabilityError: the rows cannot be shared out evenly.
    """
    rows = len(array)
    if rows % world:
        raise CapabilityError(f"a batch of {rows} cannot be shared out evenly over {world} ranks")
    return array[rank * rows // world : (rank + 1) * rows // world]


def has_batch_norm(layer: Layer) -> bool:
    """Say whether a model computes statistics over its batch."""
    if isinstance(layer, BatchNorm):
        return True
    return any(has_batch_norm(child) for _, child in children(layer))


def linear_pairs(layer: Layer, world: int) -> dict[str, Dim]:
    """Return a plan of tensor parallelism: two linear layers with an activation between.

    The first keeps a part of the outputs on each rank, the second of the inputs.

    Raises:
        CapabilityError: the model has no such pair whose width can be divided.
    """
    plan: dict[str, Dim] = {}
    for chain in _chains(layer, ""):
        index = 0
        while index + 2 < len(chain):
            (first_path, first), (_, between), (second_path, second) = chain[index : index + 3]
            if (
                isinstance(first, Linear)
                and isinstance(between, Activation)
                and isinstance(second, Linear)
                and first.outputs % world == 0
            ):
                plan |= {first_path: "out", second_path: "in"}
                index += 3
            else:
                index += 1
    if not plan:
        raise CapabilityError(
            f"it has no two linear layers with an activation between them whose width can be"
            f" divided by {world}"
        )
    return plan


def _chains(layer: Layer, path: str) -> Iterator[list[tuple[str, Layer]]]:
    """Yield the lists of layers that run one after the other, with their paths."""
    chain: list[tuple[str, Layer]] = []
    branches: list[tuple[str, Layer]] = []

    def flatten(inner: Layer, at: str) -> None:
        if isinstance(inner, (Sequential, Block)):
            for name, child in children(inner):
                flatten(child, f"{at}{name}.")
        else:
            chain.append((at.removesuffix("."), inner))
            branches.extend((f"{at}{name}.", child) for name, child in children(inner))

    flatten(layer, path)
    yield chain
    for at, branch in branches:
        yield from _chains(branch, at)


def stages(workload: Workload, count: int) -> list[Layer]:
    """Cut a model into stages that run one after the other; parameters keep their names.

    Stages are contiguous and as even as can be in parameters and blocks.

    Raises:
        CapabilityError: it has fewer layers one after the other than stages are asked for.
    """
    items = list(_items(workload.model, ()))
    if len(items) < count:
        raise CapabilityError(
            f"{workload.name} is a chain of {len(items)} layers; {count} stages cannot be cut"
        )
    costs = [_cost(layer) for _, layer in items]
    cuts = _even_cuts(costs, count)
    return [_nested(items[begin:end]) for begin, end in itertools.pairwise(cuts)]


def stage_weights(stage: Layer, weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of a stage."""
    return {name: weights[name] for name, _ in parameters(stage)}


def _items(layer: Layer, path: Path) -> Iterator[tuple[Path, Layer]]:
    if isinstance(layer, Sequential):
        for name, child in layer.layers:
            yield from _items(child, (*path, name))
    else:
        yield path, layer


def _cost(layer: Layer) -> int:
    """Return what a layer weighs when stages are evened out; layers without parameters, 1."""
    return 1 + sum(int(np.prod(parameter.shape)) for _, parameter in parameters(layer))


def _even_cuts(costs: list[int], count: int) -> list[int]:
    """Return where to cut so that the heaviest part is as light as can be."""
    whole = len(costs)
    sums = [0, *np.cumsum(costs).tolist()]
    best: list[dict[int, tuple[int, list[int]]]] = [{0: (0, [0])}]
    for part in range(1, count + 1):
        found: dict[int, tuple[int, list[int]]] = {}
        for end in range(part, whole - (count - part) + 1):
            found[end] = min(
                (max(heaviest, sums[end] - sums[begin]), [*cuts, end])
                for begin, (heaviest, cuts) in best[-1].items()
                if begin < end
            )
        best.append(found)
    return best[-1][whole][1]


def _nested(items: list[tuple[Path, Layer]]) -> Layer:
    """Put layers back under the names that they had."""
    grouped: dict[str, list[tuple[Path, Layer]]] = {}
    for path, layer in items:
        grouped.setdefault(path[0], []).append((path[1:], layer))
    return Sequential(
        tuple(
            (name, inner[0][1] if not inner[0][0] else _nested(inner))
            for name, inner in grouped.items()
        )
    )
