"""Which modules' parameters come and go together, and what a receipt says of them.

A layer is a block with all that is inside, or the parameters that a module outside of blocks has of
its own. A parameter that several layers hold comes with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.errors import CompositionError, UsageError, unknown
from xmem.layouts import Named, find_blocks, modules_of
from xmem.receipts import Receipt
from xmem.sizes import format_size

if TYPE_CHECKING:
    from xmem.protocols import Checkpoint

Own = Callable[[Any], Iterable[Named]]
"""What a module itself holds: its parameters by name, without those of the modules inside."""


@dataclass(frozen=True, eq=False)
class Layer:
    """What comes and goes together.

    Attributes:
        path: of its module; "" for the model itself.
        module: while it runs, the parameters are there.
        inside: modules inside, outer ones first, that hold some of the parameters; also `module`
            if it does.
        parameters: each once, by the names that they have in the model.
    """

    path: str
    module: Any
    inside: tuple[Any, ...]
    parameters: tuple[Named, ...]


@dataclass(frozen=True)
class Stays:
    """A parameter that stays on the device.

    Attributes:
        name: in the model.
        nbytes: what it takes.
        reason: why it stays.
    """

    name: str
    nbytes: int
    reason: str


def find_layers(
    capability: Checkpoint,
    model: Any,
    blocks: Sequence[Any] | None,
    own: Own,
    runs: Callable[[Any], bool] = lambda _: True,
) -> list[Layer]:
    """Return the layers of a model that hold parameters, in the order of its modules.

    Args:
        capability: knows modules.
        model: a module.
        blocks: modules or their paths; None: elements of lists of modules (`find_blocks`).
        own: see `Own`.
        runs: whether a module is called by itself; what others hold comes with the module around
            them that is.

    Raises:
        UsageError: the model is no module, or a block is none of its modules.
        CompositionError: a block was listed twice, or lies inside another one.
    """
    if not capability.is_module(model):
        raise UsageError(f"{type(model).__name__} is no module of the active backend")
    roots = _blocks(capability, model, blocks)
    held: dict[int, _Holder] = {}
    _walk(capability, ("", model), None, roots, held, own, runs)
    return [holder.layer() for holder in held.values() if holder.parameters]


class _Holder:
    """A layer that is being found."""

    def __init__(self, path: str, module: Any, *, whole: bool) -> None:
        self.path, self.module, self.whole = path, module, whole
        self.inside: dict[int, Any] = {}
        self.parameters: dict[int, Named] = {}

    def layer(self) -> Layer:
        inside, parameters = tuple(self.inside.values()), tuple(self.parameters.values())
        return Layer(self.path, self.module, inside, parameters)


def _walk(
    capability: Checkpoint,
    named: Named,
    around: _Holder | None,
    roots: Mapping[int, str],
    held: dict[int, _Holder],
    own: Own,
    runs: Callable[[Any], bool],
) -> None:
    """Give what a module and those inside hold to their layers; `around` is the layer around."""
    path, module = named
    holder = around
    if holder is None or not holder.whole:
        whole = id(module) in roots
        if whole or around is None or runs(module):
            # One in several places is one layer, under the first of its paths.
            holder = held.setdefault(id(module), _Holder(path, module, whole=whole))
    assert holder is not None
    for name, parameter in own(module):
        holder.inside.setdefault(id(module), module)
        full = f"{path}.{name}" if path else name
        holder.parameters.setdefault(id(parameter), (full, parameter))
    for name, child in capability.children(module):
        below = f"{path}.{name}" if path else name
        _walk(capability, (below, child), holder, roots, held, own, runs)


def _blocks(capability: Checkpoint, model: Any, blocks: Sequence[Any] | None) -> Mapping[int, str]:
    """Return the paths of blocks by the modules' ids."""
    if blocks is None:
        found = find_blocks(capability, model)
        return {id(module): path for listed in found for path, module in listed}
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise UsageError(f"blocks={blocks!r}: give a list of modules, or of their paths")
    paths = {"": model, **dict(modules_of(capability, model))}
    names = {id(module): path for path, module in reversed(paths.items())}
    chosen: dict[int, str] = {}
    for block in blocks:
        if isinstance(block, str) and block not in paths:
            raise UsageError(unknown("module", block, paths))
        module = paths[block] if isinstance(block, str) else block
        if id(module) not in names:
            raise UsageError(
                f"a block is a {type(block).__name__} that is not in {type(model).__name__}: give"
                " its own modules, or their paths"
            )
        if id(module) in chosen:
            raise CompositionError(f"block {names[id(module)]!r} was listed twice")
        chosen[id(module)] = names[id(module)]
    for number, path in chosen.items():
        inside = {id(m) for _, m in modules_of(capability, paths[path])}
        for other in inside & chosen.keys() - {number}:
            raise CompositionError(
                f"block {chosen[other]!r} lies inside block {path!r}: list one of the two"
            )
    return chosen


def make_receipt(
    backend: str,
    layers: Sequence[Layer],
    sizes: Mapping[int, int],
    stays: Sequence[Stays],
    undo: Callable[[], None],
) -> Receipt:
    """Return the receipt of layers whose parameters are away.

    Args:
        backend: its name.
        layers: all that were found; those without any parameter away are left out.
        sizes: the bytes of what is away, by the parameters' ids.
        stays: what is not.
        undo: brings all back.
    """
    away = [(layer, _bytes(layer, sizes)) for layer in layers]
    away = [(layer, nbytes) for layer, nbytes in away if nbytes]
    total, largest = sum(sizes.values()), max((nbytes for _, nbytes in away), default=0)
    notes = []
    if away:
        notes.append(
            f"{format_size(total)} are away, of which the largest layer takes"
            f" {format_size(largest)}."
        )
    elif not stays:
        notes.append("The model has no parameters.")
    if stays:
        first = "; ".join(f"{one.name}: {one.reason}" for one in stays[:_TOLD])
        more = f"; and {len(stays) - _TOLD} more" if len(stays) > _TOLD else ""
        held = format_size(sum(one.nbytes for one in stays))
        notes.append(f"{held} stay on the device ({first}{more}).")
    return Receipt(
        technique="offload_parameters",
        backend=backend,
        applied_to=len(away),
        names=tuple(layer.path or type(layer.module).__name__ for layer, _ in away),
        expected_saving_bytes=total - largest,
        note=" ".join(notes),
        _undo=undo,
    )


_TOLD = 5


def _bytes(layer: Layer, sizes: Mapping[int, int]) -> int:
    return sum(sizes.get(id(parameter), 0) for _, parameter in layer.parameters)
