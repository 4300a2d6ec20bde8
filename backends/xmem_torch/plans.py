"""Plays plans on PyTorch (2.13): see `playing.py` for how."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from xmem.containers import leaves
from xmem.errors import MeasurementError
from xmem.native.build import find_compiler
from xmem.playing import Script, TracedStages
from xmem.predicting import Prediction
from xmem.randomness import Streams
from xmem.records import Recompute, Step
from xmem_torch import tensors as of_tensors
from xmem_torch.marks import Marks, Watched, under_way
from xmem_torch.masters import master_of
from xmem_torch.measure import Measure
from xmem_torch.playing import PlanRun
from xmem_torch.reach import reach, stream_kinds

_NO_MARKS = (
    "PyTorch's profiler, which counts bytes here, loses some when it is read inside backward; only"
    " xmem's own allocator can mark single operations"
)


class Plans:
    """Plays plans; see `xmem.playing.Plans`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.gaps: Mapping[str, str] = {}
        if device == "cpu" and find_compiler() is None:
            self.gaps = {"marks": _NO_MARKS}

    @functools.cached_property
    def _measure(self) -> Measure:
        return Measure(self._device)

    def _counting(self) -> AbstractContextManager[None]:
        """Let the profiler, where it counts, run in the block: it knows peaks there only."""
        if self._measure.source != "profiler":
            return nullcontext()
        return self._measure.watch(None, None, lambda _: None)

    def recording(self) -> bool:
        """Say so while gradients are recorded and torch.compile does not trace."""
        return torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def open(
        self, script: Script, names: Sequence[str], how: Recompute, *, traced: bool
    ) -> PlanRun:
        """Begin with nothing in the graph; marks need xmem's own allocator, or CUDA's counters."""
        if traced and self._measure.source == "profiler":
            raise MeasurementError(f"{_NO_MARKS}. Install g++, so that it can be compiled.")
        return PlanRun(script, names, how, Marks(self._measure) if traced else None)

    def traced(self, model: Any) -> TracedStages | None:
        """Trace it with torch.fx."""
        from xmem_torch.tracing import traced

        found: TracedStages | None = traced(model)
        return found

    def tensors(self, tree: Any) -> list[Any]:
        """Return the torch.Tensors."""
        return leaves(tree, torch.Tensor)

    def bytes_of(self, tensors: Sequence[Any]) -> int:
        """Add up distinct storages."""
        return of_tensors.bytes_of(tensors)

    def step(
        self,
        model: Any,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        gradients: bool = False,
    ) -> Step:
        """Let the step update statistics as any step does, and put copies back."""
        parameters = list(model.parameters())
        gc.collect()  # what is freed in the middle of the step would seem to be the step's
        with (
            _put_back(model),
            _gradients_aside(parameters),
            self._counting(),
            torch.enable_grad(),
        ):
            watched = Watched(self._measure, parameters)
            with under_way(watched):
                loss = loss_fn(model, batch)
                loss.backward()
            watched.finish()
            seconds = time.perf_counter() - watched.started
            return Step(
                before_bytes=watched.before_bytes,
                peak_bytes=watched.peak_bytes,
                gradient_bytes=watched.gradient_bytes,
                seconds=seconds,
                loss=float(loss.detach()),
                gradients=_as_arrays(model) if gradients else None,
            )

    def forward_aside(self, model: Any, batch: Any, loss_fn: Callable[[Any, Any], Any]) -> None:
        """Call it under torch.no_grad."""
        with _put_back(model), torch.no_grad():
            loss_fn(model, batch)

    def predict(
        self, model: Any, batch: Any, loss_fn: Callable[[Any, Any], Any], optimizer: Any
    ) -> Prediction:
        """Follow the step on fake tensors."""
        from xmem_torch.predict import Predict

        return Predict(self._device, self._measure).predict(model, batch, loss_fn, optimizer)


def _as_arrays(model: Any) -> dict[str, Any]:
    return {
        name: gradient.detach().float().cpu().numpy().copy()
        for name, parameter in model.named_parameters()
        if (gradient := master_of(parameter).grad) is not None
    }


@contextmanager
def _gradients_aside(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let parameters have no gradients in the block, and theirs again after it."""
    holders = {id(p): p for parameter in parameters for p in (parameter, master_of(parameter))}
    before = [(holder, holder.grad) for holder in holders.values()]
    for holder, _ in before:
        holder.grad = None
    try:
        yield
    finally:
        for holder, gradient in before:
            holder.grad = gradient


@contextmanager
def _put_back(model: Any) -> Iterator[None]:
    """Let the block run a model, whose buffers and random numbers are then what they were."""
    reached = reach(model)
    streams = Streams(reached.streams, stream_kinds())
    before = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in reached.modules
        for name, buffer in module._buffers.items()
    ]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        streams.rewind()
        for module, name, buffer, copied in before:
            if copied is not None:
                # Kernels write statistics without counting their versions up; so does this.
                buffer.data.copy_(copied)
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
