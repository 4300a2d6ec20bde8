"""Which linear layers a plan of tensor parallelism means, and whether they can be cut.

Backends list their layers; what a plan says of them is the same for all.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

from xmem.distributing import Dim
from xmem.errors import UsageError, unknown

DIMS: tuple[str, ...] = get_args(Dim)
_PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class Layer:
    """A linear layer, as far as a plan must know it.

    Attributes:
        path: in the model.
        inputs: how many it takes.
        outputs: how many it gives.
        shares: another module that has its weight too, in words; "" where none has.
    """

    path: str
    inputs: int
    outputs: int
    shares: str = ""


def chosen(
    plan: Mapping[str, str], layers: Sequence[Layer], others: Mapping[str, str], world_size: int
) -> dict[str, Dim]:
    """Return how each layer that a plan means is cut, by path in the order of the model.

    Args:
        plan: paths or patterns, to "out" or "in". A `*` matches dots too.
        layers: the model's linear layers.
        others: its other modules: path to class.
        world_size: how many parts.

    Raises:
        UsageError: an entry that names no linear layer, two that differ about one, or a layer that
            cannot be cut. Nothing has changed then.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f"{plan!r} is no plan: give paths of linear layers, or patterns, with 'out' or 'in':"
            " {'blocks.*.up': 'out', 'blocks.*.down': 'in'}"
        )
    entries: dict[str, str] = {}
    for name, dim in plan.items():
        check_dim(dim, f"plan[{name!r}]")
        found = _matches(name, layers, others)
        for path in found:
            if entries.setdefault(path, name) != name and plan[entries[path]] != dim:
                raise UsageError(
                    f"{path!r} is {plan[entries[path]]!r} by {entries[path]!r} and {dim!r} by"
                    f" {name!r}: let one entry of the plan say what it is"
                )
    result: dict[str, Dim] = {}
    for layer in layers:
        if layer.path in entries:
            dim = plan[entries[layer.path]]
            check_sizes(layer, dim, world_size)
            result[layer.path] = "out" if dim == "out" else "in"
    return result


def _matches(name: str, layers: Sequence[Layer], others: Mapping[str, str]) -> list[str]:
    if not isinstance(name, str):
        raise UsageError(f"plan[{name!r}]: the key is a path in the model, as text")
    paths = [layer.path for layer in layers]
    found = [path for path in paths if fnmatch.fnmatchcase(path, name)]
    if found:
        return found
    wrong = [path for path in others if fnmatch.fnmatchcase(path, name)]
    if wrong:
        raise UsageError(
            f"plan[{name!r}] names {wrong[0]!r}, which is a {others[wrong[0]]} and no linear layer"
            f" that can be cut.{_near(name, paths)}"
        )
    kind = "pattern" if _PATTERN & set(name) else "path"
    raise UsageError(f"plan[{name!r}]: the {kind} matches no module.{_near(name, paths)}")


def _near(name: str, paths: Sequence[str]) -> str:
    near = get_close_matches(name, paths, n=1, cutoff=0)
    if not near:
        return " The model has no linear layers."
    return f" The nearest linear layer is {near[0]!r}, of {len(paths)}"


def check_dim(dim: object, name: str = "dim") -> None:
    """Refuse what is no way to cut a layer.

    Raises:
        UsageError: it is neither "out" nor "in".
    """
    if dim not in DIMS:
        raise UsageError(f"{name}: {unknown('dim', dim, DIMS)}")


def check_sizes(layer: Layer, dim: str, world_size: int) -> None:
    """Refuse a layer that cannot be cut in equal parts.

    Raises:
        UsageError: the sizes do not divide, or it shares its weight.
    """
    name = f"{layer.path!r}" if layer.path else "the layer"
    count = layer.outputs if dim == "out" else layer.inputs
    if count % world_size:
        kind = "outputs" if dim == "out" else "inputs"
        raise UsageError(
            f"{name} has {count} {kind}, which {world_size} ranks cannot share equally. Use a"
            f" number of ranks that divides {count}, or leave it out"
        )
    if layer.shares and world_size > 1:
        raise UsageError(
            f"{name} has its weight together with {layer.shares}: cut, it would be another weight."
            " Leave it out, or untie them"
        )
