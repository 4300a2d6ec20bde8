"""One checkpointed call: what torch.utils.checkpoint (2.13) leaves open, closed around it.

PyTorch replays its own random numbers and autocast, and compares how many tensors are saved, their
shapes and dtypes. Around it, for the second pass:

* running statistics are not updated again (pytorch#96136), and other buffers that the function
  writes start from what they were;
* parameters, buffers and tensors in attributes that have been exchanged since (functional_call,
  spectral_norm's weight) are those of the first pass;
* training flags, and what else `xmem.autocast` does than PyTorch's, are those of the first pass;
* Python's, NumPy's and held generators draw again what they drew;
* a parameter that has been changed in place and is read raises, as it does without checkpointing,
  where autograd saved it;
* a region that ends in RReLU runs to its end: it saves its noise before it draws it, and an early
  stop would hand the noise out empty (pytorch#193671);
* what differs is named: PyTorch's hooks are taken off the stack by
  `torch._C._autograd._top_saved_tensors_default_hooks` and put back inside ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from xmem.casting import current
from xmem.deferred import settled
from xmem.errors import CompositionError, RecomputeMismatchError
from xmem.mismatch import as_they_were, differs, function_name, mismatch
from xmem.randomness import Streams
from xmem.records import Recompute
from xmem_torch import left, precision
from xmem_torch.buffers import Buffers, Places
from xmem_torch.passes import Again, Guarded, apart, ends_in_rrelu, top_hooks
from xmem_torch.reach import reach, stream_kinds
from xmem_torch.statistics import statistics_untouched
from xmem_torch.tensors import sample, shown, version, versions_of


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
        self._reached = reach(function)
        self.modules = self._reached.modules
        self._training = [module.training for module in self.modules]
        self._casting = precision.capture()
        self._first: list[tuple[Any, ...]] = []
        self._second: list[tuple[Any, ...]] = []

    @property
    def _name(self) -> str:
        return self._how.name or function_name(self._function)

    def first_pass(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function; its tensors are handed to PyTorch one by one, which watches them."""
        tensors, refill = apart(args, kwargs)
        # PyTorch keeps the inputs; a strong reference here would keep what it may give up.
        self._inputs = [(weakref.ref(t), version(t)) for t in tensors]
        self._places = Places(self.modules, attributes=self._reached.attributes)
        self._buffers = Buffers(self.modules)
        self._streams = (
            Streams(self._reached.streams, stream_kinds()) if self._how.preserve_rng else None
        )

        first = [(args, kwargs)]  # the very containers, which the function may fill

        def call(*given: torch.Tensor) -> Any:
            filled, named = first.pop() if first else refill(given)
            return settled(self._function(*filled, **named))  # all of it runs in here

        counted = nullcontext() if current() is None else left.region(tensors)
        caching = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # it would hold half weights through the region
        try:
            with counted:
                output = torch_checkpoint(
                    call,
                    *tensors,
                    use_reentrant=False,
                    preserve_rng_state=self._how.preserve_rng,
                    determinism_check="none",  # made below, where it can say what differs
                    context_fn=lambda: (self._watching(), Again(self._second_pass)),
                )
        finally:
            torch.set_autocast_cache_enabled(caching)
        if self._streams is not None:
            self._streams.first_pass_ended()
        self._buffers.first_pass_ended()
        self._places.first_pass_ended()
        changed = self._changed_inputs()
        if changed:
            raise CompositionError(
                f"{self._name} changes {changed} in place, so it cannot be computed again from it."
                " Use the operation that is not in place, or clone the input first."
            )
        self._runs_to_end = self._first[-2:-1] == self._first[-1:] and ends_in_rrelu(output)
        self._read = self._around()
        self._versions = versions_of(self._read)
        return output

    def _modes_changed(self) -> bool:
        return [module.training for module in self.modules] != self._training

    def _around(self) -> list[torch.Tensor]:
        """Return the tensors that the function may read beside its inputs, and does not write."""
        found = list(self._reached.tensors)
        for module in self.modules:
            if module._parameters:
                found += module._parameters.values()
            if module._buffers and not (module.training and isinstance(module, _NormBase)):
                written = self._buffers.wrote(module)
                found += (b for name, b in module._buffers.items() if name not in written)
        return [tensor for tensor in found if tensor is not None]

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
            samples.append(self._sampled(tensor))
            return save(tensor), len(samples) - 1

        def compare(saved: tuple[Any, int]) -> torch.Tensor:
            packed, index = saved
            tensor = recall(packed)
            if samples[index] is not None and differs(samples[index], sample(tensor)):
                what = f"saved tensor {index} ({shown(*self._first[index])}) has other values"
                raise mismatch(self._name, what, self._cause("randomness"))
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

        with ExitStack() as stack:
            for differing in self._to_restore():
                stack.enter_context(differing)
            with statistics_untouched(self.modules), saved_tensors_hooks(save, unpack):
                yield

    def _to_restore(self) -> Iterator[AbstractContextManager[Any]]:
        """Yield what puts back what has changed since the first pass; most often nothing has."""
        if self._modes_changed():
            flags = list(zip(self.modules, self._training, strict=True))
            yield as_they_were(flags, "training")
        if self._places.exchanged():
            yield self._places.as_they_were()
        if self._buffers.written:
            yield self._buffers.as_they_were()
        if self._streams is not None and self._streams.drawn:
            yield self._streams.replayed()
        if self._casting is not None or current() is not None:
            yield precision.entered(self._casting)
        versions = versions_of(self._read)
        if versions != self._versions:
            pairs = zip(self._read, versions, self._versions, strict=True)
            changed = {id(tensor): tensor for tensor, now, was in pairs if now != was}
            yield Guarded(changed, self._changed_parameter)

    def _changed_parameter(self, tensor: torch.Tensor) -> RecomputeMismatchError:
        what = f"a tensor of shape {tuple(tensor.shape)}"
        for module in self.modules:
            for name, held in (*module._parameters.items(), *module._buffers.items()):
                if held is tensor:
                    what = f"{name!r} of {type(module).__name__}"
        return mismatch(self._name, f"it reads {what}, changed in place since", "in_place")

    def _difference(self, index: int) -> RecomputeMismatchError:
        """Say how the second pass differs in what it saves, at a place or in number."""
        first, second = self._first[index], self._second[index]
        what = f"saved tensor {index} was {shown(*first)} and is {shown(*second)}"
        likely = "cache" if first[1] == second[1] else "autocast"
        return mismatch(self._name, what, self._cause(likely))

    def _difference_in_number(self) -> RecomputeMismatchError:
        what = (
            f"it saves {len(self._second)} tensors for backward, the first pass {len(self._first)}"
        )
        return mismatch(self._name, what, self._cause("cache"))

    def _cause(self, otherwise: str) -> str:
        if otherwise == "autocast":
            return otherwise
        if not self._how.preserve_rng:
            return "randomness"
        if self._modes_changed():
            return "mode"
        return otherwise

    def _sampled(self, tensor: torch.Tensor) -> Any:
        """Return some of a saved tensor's values, or None where they may differ."""
        # Running statistics are saved too, and move on; training does not read them.
        buffers = (b for m in self.modules for b in m._buffers.values() if b is not None)
        if tensor.layout != torch.strided or tensor.data_ptr() in {b.data_ptr() for b in buffers}:
            return None
        return sample(tensor)
