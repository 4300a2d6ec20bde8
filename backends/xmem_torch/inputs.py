"""What a stage of a planned model is called with, and how it is called with the same again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from xmem.errors import CompositionError
from xmem.mismatch import mismatch
from xmem_torch.passes import apart
from xmem_torch.tensors import version
from xmem_torch.values import Part, Places, Value


class Inputs:
    """The inputs of one call.

    Args:
        args: the inputs.
        kwargs: those with keywords.

    Attributes:
        tensors: the distinct tensors among them, until `forget`.
        reads: the numbers of the values that they are parts of, as far as they are not held.
        leaves: which tensors of those values, by (number, leaf).
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        tensors, self._refill = apart(args, kwargs)
        distinct = {id(tensor): tensor for tensor in tensors}
        numbers = {key: number for number, key in enumerate(distinct)}
        # What was one tensor in two places is one again: attention asks whether it is.
        self._numbers = [numbers[id(tensor)] for tensor in tensors]
        self.tensors = list(distinct.values())
        self._wanting = [tensor.requires_grad for tensor in self.tensors]
        self._versions = [version(tensor) for tensor in self.tensors]
        self._sources: list[Part | Extra | None] | None = []
        self.reads: tuple[int, ...] = ()
        self.leaves: frozenset[tuple[int, int]] = frozenset()

    def find(self, places: Places, numbers: Collection[int], *, hold: bool) -> None:
        """Note which of the tensors are parts of values, and hold the others by themselves.

        What has been changed in place is not what its stage will return again.

        Args:
            places: where values lie.
            numbers: of the values that there are whenever the stage is run again.
            hold: whether others are held; without them the stage cannot be called again.
        """
        parts = [places.unchanged(tensor, numbers) for tensor in self.tensors]
        self._sources = [
            part or (Extra(tensor) if hold else None)
            for part, tensor in zip(parts, self.tensors, strict=True)
        ]
        self.leaves = frozenset((part.number, part.leaf) for part in parts if part is not None)
        self.reads = tuple(sorted({number for number, _ in self.leaves}))

    def changed(self) -> str:
        """Name a tensor that has been changed in place since; "" for none."""
        for number, (tensor, was) in enumerate(zip(self.tensors, self._versions, strict=True)):
            if version(tensor) != was:
                return f"its input tensor {number} (shape {tuple(tensor.shape)})"
        return ""

    def forget(self) -> None:
        """Let go of the tensors themselves, and of the graph behind them."""
        self.tensors = []

    def release(self) -> None:
        """Let go of what is held to call the stage again."""
        self._sources = None
        self._refill = lambda _: ((), {})

    def again(self, values: Mapping[int, Value], name: str) -> tuple[Any, Any]:
        """Return inputs like these that have no graph.

        Args:
            values: copies of those that the stage reads, by number.
            name: what errors call the stage.

        Raises:
            RecomputeMismatchError: one has been changed in place.
            CompositionError: one is not held.
        """
        if self._sources is None:
            raise CompositionError(
                f"{name!r} is differentiated a second time, and what it takes to compute it again"
                " has been given up. Call backward with retain_graph=True the first time."
            )
        given: list[torch.Tensor] = []
        for number, (source, wants) in enumerate(zip(self._sources, self._wanting, strict=True)):
            if isinstance(source, Part):
                value = values[source.number]
                found, changed = source.of(value), value.changed(source.leaf)
            elif source is not None:
                found, changed = source.tensor, source.changed
            else:
                raise CompositionError(
                    f"{name!r} has to be computed again, which its plan does not foresee, and its"
                    f" input tensor {number} is not held. Call backward once."
                )
            if changed:
                what = f"its input tensor {number} has been changed in place"
                raise mismatch(name, what, "in_place")
            if found is None:
                raise mismatch(
                    name, f"its input tensor {number} is not laid out as it was", "cache"
                )
            itself = isinstance(source, Extra) and source.itself
            given.append(found if itself else found.detach().requires_grad_(wants))
        args, kwargs = self._refill([given[number] for number in self._numbers])
        return args, kwargs


class Extra:
    """An input that is no part of a value.

    Attributes:
        itself: whether the tensor itself is held: it has no graph, e.g. it is a parameter.
        tensor: the tensor, or an alias without its graph.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.itself = tensor.is_leaf
        self.tensor = tensor if self.itself else tensor.detach()
        self._version = version(self.tensor)

    @property
    def changed(self) -> bool:
        """Whether it has been changed in place since."""
        return version(self.tensor) != self._version
