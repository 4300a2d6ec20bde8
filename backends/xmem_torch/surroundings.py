"""What a function reads beside its inputs: noted in its first pass, put back for a second.

* running statistics are not updated again (pytorch#96136), and other buffers that the function
  writes start from what they were;
* parameters, buffers and tensors in attributes that have been exchanged since (functional_call,
  spectral_norm's weight) are those of the first pass;
* training flags, and what else `xmem.autocast` does than PyTorch's, are those of the first pass;
* Python's, NumPy's and held generators draw again what they drew;
* a parameter that has been changed in place and is read raises, as it does without checkpointing,
  where autograd saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from xmem.casting import current
from xmem.errors import RecomputeMismatchError
from xmem.mismatch import as_they_were, function_name, mismatch
from xmem.randomness import Streams
from xmem.records import Recompute
from xmem_torch import precision
from xmem_torch.buffers import Buffers, Places
from xmem_torch.passes import Guarded
from xmem_torch.reach import reach, stream_kinds
from xmem_torch.statistics import statistics_untouched
from xmem_torch.tensors import sample, versions_of


class Surroundings:
    """What one call of a function reads beside its inputs.

    `first_pass_begins` and `first_pass_ended` stand around the first pass; then `restored` may be
    entered as often as it is computed again.

    Args:
        function: what is called.
        how: what is replayed.

    Attributes:
        modules: those that the function can reach, with all that are inside them.
        name: what errors call it.
    """

    def __init__(self, function: Callable[..., Any], how: Recompute) -> None:
        self._how = how
        self._reached = reach(function)
        self.modules = self._reached.modules
        self.name = how.name or function_name(function)
        self._training = [module.training for module in self.modules]
        self._casting = precision.capture()

    def first_pass_begins(self) -> None:
        """Note what is there."""
        self._places = Places(self.modules, attributes=self._reached.attributes)
        self._buffers = Buffers(self.modules)
        self._streams = (
            Streams(self._reached.streams, stream_kinds()) if self._how.preserve_rng else None
        )

    def first_pass_ended(self) -> None:
        """Note what has been written and drawn, and let go of the rest."""
        if self._streams is not None:
            self._streams.first_pass_ended()
        self._buffers.first_pass_ended()
        self._places.first_pass_ended()
        self._read = self._around()
        self._versions = versions_of(self._read)

    @property
    def modes_changed(self) -> bool:
        """Whether training flags differ from those of the first pass."""
        return [module.training for module in self.modules] != self._training

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the block see what the first pass saw, and update no statistics."""
        with ExitStack() as stack:
            for differing in self._to_restore():
                stack.enter_context(differing)
            with statistics_untouched(self.modules):
                yield

    def cause(self, otherwise: str) -> str:
        """Return why a second pass probably differs, a key of `xmem.mismatch.CAUSES`."""
        if otherwise == "autocast":
            return otherwise
        if not self._how.preserve_rng:
            return "randomness"
        return "mode" if self.modes_changed else otherwise

    def sampled(self, tensor: torch.Tensor) -> Any:
        """Return some of a saved tensor's values, or None where they may differ."""
        # Running statistics are saved too, and move on; training does not read them.
        buffers = (b for m in self.modules for b in m._buffers.values() if b is not None)
        if tensor.layout != torch.strided or tensor.data_ptr() in {b.data_ptr() for b in buffers}:
            return None
        return sample(tensor)

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

    def _to_restore(self) -> Iterator[AbstractContextManager[Any]]:
        """Yield what puts back what has changed since the first pass; most often nothing has."""
        if self.modes_changed:
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
        return mismatch(self.name, f"it reads {what}, changed in place since", "in_place")


@contextmanager
def casts_not_cached() -> Iterator[None]:
    """Let autocast hold no half weights through the block."""
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caching)
