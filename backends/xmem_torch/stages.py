"""One stage of a planned model: its first pass, and the same again in backward.

A stage runs under saved-tensor hooks (`torch.autograd.graph.saved_tensors_hooks`, PyTorch 2.13), so
that its part of the graph holds numbers in the place of tensors. What they stand for is kept here
or not, as the plan says, and made again by a second pass, which saves the same tensors in the same
order on a graph that is then dropped. A saved tensor that is a value which the stage reads, or a
view of one, is read from whatever copy of that value there is in backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from xmem.casting import current
from xmem.containers import leaves
from xmem.deferred import settled
from xmem.errors import CompositionError
from xmem.mismatch import differs, mismatch
from xmem.playing import playing_again
from xmem.records import Recompute
from xmem.saving import Choice
from xmem.stage_options import AS_IS
from xmem_torch import left
from xmem_torch.generators import Generators
from xmem_torch.inputs import Inputs
from xmem_torch.kept import Keeper, taken
from xmem_torch.surroundings import Surroundings, casts_not_cached
from xmem_torch.tensors import shown
from xmem_torch.values import Part, Places, Value

_DEVICES = ("cpu", "cuda")


class StageCall:
    """One call of a stage's function.

    Args:
        number: of the stage.
        function: what is called.
        inputs: what it is called with.
        how: what is replayed.

    Attributes:
        name: what errors call it.
        running: whether the first pass is under way.
        kept: what it keeps, by the numbers that stand in the graph; None where it keeps nothing.
    """

    def __init__(
        self, number: int, function: Callable[..., Any], inputs: Inputs, how: Recompute
    ) -> None:
        self._number = number
        self._function = function
        self._inputs = inputs
        self._how = how
        self._surroundings = Surroundings(function, how)
        self._facts: list[tuple[Any, ...]] = []
        self.name = self._surroundings.name
        self._released = False
        self.running = False
        self.kept: list[Any] | None = None

    def first_pass(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        places: Places,
        *,
        keep: bool,
        choice: Choice,
        recall: Callable[[tuple[int, int]], torch.Tensor],
        around: AbstractContextManager[Any],
    ) -> Any:
        """Run the function for the first time.

        Args:
            args: its inputs.
            kwargs: those with keywords.
            places: where the values so far lie.
            keep: what it saves for backward.
            choice: what becomes of that.
            recall: is asked for a saved tensor by (stage, number).
            around: stands around the call itself.

        Raises:
            CompositionError: it changes an input in place.
        """
        self._surroundings.first_pass_begins()
        self._random = Generators(self._inputs.tensors) if self._how.preserve_rng else None
        self._autocast = _autocast()
        number, facts = self._number, self._facts
        keeper = self._keeper(places, choice) if keep else None
        self.kept = None if keeper is None else keeper.kept
        now = [keeper]  # nodes hold the hook, which must not hold what is kept
        del keeper

        def save(tensor: torch.Tensor) -> tuple[int, int]:
            [keeper] = now
            facts.append(self._fact(tensor))
            if keeper is not None:
                keeper.save(tensor, sys._getframe(1))
            return number, len(facts) - 1

        counted = keep or current() is None
        self.running = True
        try:
            with (
                casts_not_cached(),
                nullcontext() if counted else left.region(self._inputs.tensors),
                saved_tensors_hooks(save, recall),
                around,
            ):
                output = settled(self._function(*args, **kwargs))
                if now[0] is not None:
                    now[0].ended(leaves(output, torch.Tensor))
            changed = self._inputs.changed()
        finally:
            self.running = False
            now.clear()
            self._inputs.forget()  # the graph behind them holds this
        self._surroundings.first_pass_ended()
        if self._random is not None:
            self._random.first_pass_ended()
        if changed:
            raise CompositionError(
                f"{self.name} changes {changed} in place, so it cannot be computed again from it."
                " Use the operation that is not in place, or clone the input first."
            )
        return output

    def second_pass(
        self,
        values: Mapping[int, Value],
        *,
        keep: bool,
        around: AbstractContextManager[Any],
        choice: Choice = AS_IS,
    ) -> Value:
        """Run the function again; returns its output.

        Args:
            values: copies of those that it reads, by number.
            keep: what it saves for backward.
            choice: what becomes of that.
            around: stands around the call itself.

        Raises:
            RecomputeMismatchError: it does not do what it did before.
        """
        args, kwargs = self._inputs.again(values, self.name)
        places = Places()
        for number in self.reads if keep else ():
            places.add(number, values[number].tensors)
        keeper = self._keeper(places, choice)
        count = 0

        def save(tensor: torch.Tensor) -> None:
            nonlocal count
            self._compare(count, tensor)
            count += 1
            if keep:
                keeper.save(tensor, sys._getframe(1))

        def recall(_: object) -> torch.Tensor:
            raise differentiated_inside(self.name)

        with ExitStack() as stack:
            for device, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(casts_not_cached())
            stack.enter_context(playing_again())
            stack.enter_context(self._surroundings.restored())
            if self._random is not None:
                stack.enter_context(self._random.replayed())
            stack.enter_context(saved_tensors_hooks(save, recall))
            stack.enter_context(around)
            made = Value(leaves(settled(self._function(*args, **kwargs)), torch.Tensor))
            keeper.ended(made.tensors)
        if count != len(self._facts):
            what = f"it saves {count} tensors for backward, the first pass {len(self._facts)}"
            raise mismatch(self.name, what, self._surroundings.cause("cache"))
        if keep:
            self.kept = keeper.kept
        return made

    def there(self, index: int) -> bool:
        """Say whether a saved tensor is kept."""
        return self.kept is not None and self.kept[index] is not None

    @property
    def reads(self) -> tuple[int, ...]:
        """The numbers of the values that it is run again with."""
        return self._inputs.reads

    def value_of(self, index: int) -> int | None:
        """Return the number of the value that a saved tensor that is kept is a part of."""
        found = None if self.kept is None else self.kept[index]
        return found.number if isinstance(found, Part) else None

    def take(self, index: int, value: Value | None, *, give_up: bool) -> torch.Tensor:
        """Return a saved tensor that is kept.

        Args:
            index: its number.
            value: a copy of the value that it is a part of.
            give_up: keep it no longer.

        Raises:
            RecomputeMismatchError: it has been changed in place.
        """
        assert self.kept is not None
        found = self.kept[index]
        if give_up:
            self.kept[index] = None
        tensor, changed = taken(found, value)
        if changed:
            what = f"a tensor that it saved, {shown(*self._facts[index][:2])}, has been changed in"
            raise mismatch(self.name, f"{what} place", "in_place")
        if tensor is None:
            raise mismatch(self.name, "its input is not laid out as it was", "cache")
        return tensor

    def release(self) -> None:
        """Give up all that a further pass would take."""
        self.kept = None
        if not self._released:
            self._released = True
            self._inputs.release()
            del self._function, self._surroundings  # they may have closed over the graph

    def _keeper(self, places: Places, choice: Choice) -> Keeper:
        return Keeper(places, self._inputs.leaves, choice, self._surroundings.modules)

    def _fact(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        values = self._surroundings.sampled(tensor) if self._how.check_values else None
        return tensor.shape, tensor.dtype, values

    def _compare(self, index: int, tensor: torch.Tensor) -> None:
        """Hold a tensor that a second pass saves to what the first one saved."""
        if index >= len(self._facts):
            return
        shape, dtype, values = self._facts[index]
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            found = shown(tensor.shape, tensor.dtype)
            what = f"saved tensor {index} was {shown(shape, dtype)} and is {found}"
            likely = "cache" if tensor.dtype == dtype else "autocast"
            raise mismatch(self.name, what, self._surroundings.cause(likely))
        if values is not None and differs(values, self._surroundings.sampled(tensor)):
            what = f"saved tensor {index} ({shown(shape, dtype)}) has other values"
            raise mismatch(self.name, what, self._surroundings.cause("randomness"))


class PlainCall:
    """A call of a stage that runs once and keeps everything: PyTorch's own graph does.

    Args:
        name: what errors call it.

    Attributes:
        reads: nothing: it is not run again.
        kept: not None until it has been differentiated.
    """

    reads: tuple[int, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: list[Any] | None = []

    def second_pass(
        self,
        values: Mapping[int, Value],
        *,
        keep: bool,
        around: AbstractContextManager[Any],
        choice: Choice = AS_IS,
    ) -> Value:
        """Refuse: only a second backward can ask for it."""
        raise CompositionError(
            f"{self.name!r} is differentiated a second time, and its graph has been given up. Call"
            " backward with retain_graph=True the first time."
        )

    def release(self) -> None:
        """Give up what is not held anyway."""
        self.kept = None


def differentiated_inside(name: str) -> CompositionError:
    """Return the error for a stage whose forward calls backward."""
    return CompositionError(
        f"{name!r} differentiates inside its forward, of which its plan keeps nothing. Leave it out"
        " of the planned stages."
    )


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    """Return the state of autocast, by device."""
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
