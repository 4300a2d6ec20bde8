"""One checkpointed call: what torch.utils.checkpoint (2.13) leaves open, closed around it.

PyTorch replays its own random numbers and autocast, and compares how many tensors are saved, their
shapes and dtypes. Around it, for the second pass:

* what else the function reads beside its inputs is as it was; see `surroundings.py`;
* a region that ends in RReLU runs to its end: it saves its noise before it draws it, and an early
  stop would hand the noise out empty (pytorch#193671);
* what differs is named: PyTorch's hooks are taken off the stack by
  `torch._C._autograd._top_saved_tensors_default_hooks` and put back inside ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from xmem.casting import current
from xmem.deferred import settled
from xmem.errors import CompositionError, RecomputeMismatchError
from xmem.mismatch import differs, mismatch
from xmem.randomness import Streams
from xmem.records import Recompute
from xmem_torch import left
from xmem_torch.buffers import Buffers
from xmem_torch.passes import Again, apart, ends_in_rrelu, top_hooks
from xmem_torch.reach import reach, stream_kinds
from xmem_torch.statistics import statistics_untouched
from xmem_torch.surroundings import Surroundings, casts_not_cached
from xmem_torch.tensors import sample, shown, version


@contextmanager
def aside(function: Callable[..., Any]) -> Iterator[None]:
    """Let a block call a function without a trace: statistics, buffers and streams stay."""
    reached = reach(function)
    modules = reached.modules
    streams = Streams(reached.streams, stream_kinds())
    buffers = Buffers(modules)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices), statistics_untouched(modules):
            yield
    finally:
        streams.rewind()
        buffers.put_back()


class Region:
    """One call of a checkpointed function.

    Attributes:
        modules: those that the function can reach, with all that are inside them.
    """

    def __init__(self, function: Callable[..., Any], how: Recompute) -> None:
        self._function = function
        self._how = how
        self._surroundings = Surroundings(function, how)
        self.modules = self._surroundings.modules
        self._name = self._surroundings.name
        self._first: list[tuple[Any, ...]] = []
        self._second: list[tuple[Any, ...]] = []

    def first_pass(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function; its tensors are handed to PyTorch one by one, which watches them."""
        tensors, refill = apart(args, kwargs)
        # PyTorch keeps the inputs; a strong reference here would keep what it may give up.
        self._inputs = [(weakref.ref(t), version(t)) for t in tensors]
        self._surroundings.first_pass_begins()

        first = [(args, kwargs)]  # the very containers, which the function may fill

        def call(*given: torch.Tensor) -> Any:
            filled, named = first.pop() if first else refill(given)
            return settled(self._function(*filled, **named))  # all of it runs in here

        counted = nullcontext() if current() is None else left.region(tensors)
        with casts_not_cached(), counted:
            output = torch_checkpoint(
                call,
                *tensors,
                use_reentrant=False,
                preserve_rng_state=self._how.preserve_rng,
                determinism_check="none",  # made below, where it can say what differs
                context_fn=lambda: (self._watching(), Again(self._second_pass)),
            )
        self._surroundings.first_pass_ended()
        changed = self._changed_inputs()
        if changed:
            raise CompositionError(
                f"{self._name} changes {changed} in place, so it cannot be computed again from it."
                " Use the operation that is not in place, or clone the input first."
            )
        self._runs_to_end = self._first[-2:-1] == self._first[-1:] and ends_in_rrelu(output)
        return output

    def _changed_inputs(self) -> str:
        for index, (reference, was) in enumerate(self._inputs):
            tensor = reference()
            if tensor is not None and version(tensor) != was:
                return f"its input tensor {index} (shape {tuple(tensor.shape)})"
        return ""

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Note what the first pass saves, and say by name what PyTorch finds to differ."""
        pack, unpack = top_hooks()
        noted = self._first.append

        def save(tensor: torch.Tensor) -> Any:
            noted((tensor.shape, tensor.dtype))
            return pack(tensor)

        def recall(packed: Any) -> torch.Tensor:
            if not self._second:
                self._refuse_changed_inputs()
            try:
                tensor: torch.Tensor = unpack(packed)
            except CheckpointError as error:
                raise self._difference_in_number() from error
            return tensor

        checked = self._how.check_values
        hooks = self._comparing_values(save, recall) if checked else (save, recall)
        with saved_tensors_hooks(*hooks):
            yield

    def _comparing_values(
        self, save: Callable[[torch.Tensor], Any], recall: Callable[[Any], torch.Tensor]
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        samples: list[Any] = []

        def save_with_sample(tensor: torch.Tensor) -> Any:
            samples.append(self._surroundings.sampled(tensor))
            return save(tensor), len(samples) - 1

        def compare(saved: tuple[Any, int]) -> torch.Tensor:
            packed, index = saved
            tensor = recall(packed)
            if samples[index] is not None and differs(samples[index], sample(tensor)):
                what = f"saved tensor {index} ({shown(*self._first[index])}) has other values"
                raise mismatch(self._name, what, self._surroundings.cause("randomness"))
            return tensor

        return save_with_sample, compare

    def _refuse_changed_inputs(self) -> None:
        changed = self._changed_inputs()
        if changed:
            raise mismatch(self._name, f"{changed} has been changed in place", "in_place")

    @contextmanager
    def _second_pass(self) -> Iterator[None]:
        pack, unpack = top_hooks()
        self._second = second = list[tuple[Any, ...]]()
        expected, noted = iter(self._first), second.append

        def save(tensor: torch.Tensor) -> Any:
            found = tensor.shape, tensor.dtype
            noted(found)
            if next(expected, found) != found:
                raise self._difference(len(second) - 1)
            try:
                return pack(tensor)
            except _StopRecomputationError:
                if self._runs_to_end:
                    return tensor.detach()  # a node that holds its own output is never freed
                raise

        with self._surroundings.restored(), saved_tensors_hooks(save, unpack):
            yield

    def _difference(self, index: int) -> RecomputeMismatchError:
        """Say how the second pass differs in what it saves, at a place or in number."""
        first, second = self._first[index], self._second[index]
        what = f"saved tensor {index} was {shown(*first)} and is {shown(*second)}"
        likely = "cache" if first[1] == second[1] else "autocast"
        return mismatch(self._name, what, self._surroundings.cause(likely))

    def _difference_in_number(self) -> RecomputeMismatchError:
        what = (
            f"it saves {len(self._second)} tensors for backward, the first pass {len(self._first)}"
        )
        return mismatch(self._name, what, self._surroundings.cause("cache"))
