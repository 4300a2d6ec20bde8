"""Plays plans on PyTorch (2.13): see `playing.py` for how."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from xmem.containers import leaves
from xmem.errors import MeasurementError, XmemWarning
from xmem.meter import collect_garbage
from xmem.native.build import find_compiler
from xmem.playing import Script, TracedStages
from xmem.predicting import Prediction
from xmem.records import Recompute, Step
from xmem_torch import tensors as of_tensors
from xmem_torch.aside import accumulating, gradients_aside, put_back
from xmem_torch.local_parts import refuse_sharded
from xmem_torch.marks import Marks, NoMarks, Watched, under_way
from xmem_torch.masters import master_of
from xmem_torch.measure import Measure
from xmem_torch.playing import PlanRun

_PLAN = "A plan"
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
        """Say so while gradients are recorded, but by neither torch.compile nor torch.func.

        Those differentiate in their own ways, which nothing here is told of.
        """
        if torch.compiler.is_compiling():
            return _compiled()
        return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None

    def open(
        self, script: Script, names: Sequence[str], how: Recompute, *, traced: bool
    ) -> PlanRun:
        """Begin with nothing in the graph; marks need xmem's own allocator, or CUDA's counters."""
        if traced and self._measure.source == "profiler":
            raise MeasurementError(f"{_NO_MARKS}. Install g++, so that it can be compiled.")
        marks = Marks(self._measure, script) if traced else NoMarks()
        return PlanRun(script, names, how, marks)

    def traced(self, model: Any) -> TracedStages | None:
        """Trace it with torch.fx."""
        from xmem_torch.tracing import traced

        refuse_sharded(model, _PLAN)
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
        """Let the step update statistics as any step does, and put copies back.

        All that gets a gradient is left with the one it had, not the parameters alone. Hooks that
        take complete gradients (an optimizer in backward) do not run.
        """
        refuse_sharded(model, _PLAN)
        collect_garbage(model)  # freed in the middle of the step it would seem to be the step's
        with (
            put_back(model, loss_fn),
            gradients_aside(model, loss_fn) as aside,
            self._counting(),
            torch.enable_grad(),
        ):
            watched = Watched(self._measure, list(model.parameters()))
            with under_way(watched):
                loss = loss_fn(model, batch)
                variables = accumulating(loss)
                aside.take(variables)
                watched.count([v for v in variables if isinstance(v, torch.nn.Parameter)])
                del variables
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
        with put_back(model, loss_fn), torch.no_grad():
            loss_fn(model, batch)

    def predict(
        self, model: Any, batch: Any, loss_fn: Callable[[Any, Any], Any], optimizer: Any
    ) -> Prediction:
        """Follow the step on fake tensors."""
        from xmem_torch.predict import Predict

        return Predict(self._device, self._measure).predict(model, batch, loss_fn, optimizer)


# What torch.compile calls while it traces, and never after: a call that it cannot trace would break
# the graph in two, or fail with fullgraph=True (PyTorch 2.13).
@torch.compiler.assume_constant_result
def _compiled() -> bool:
    """Return False, and warn the first time."""
    _warn_compiled()
    return False


@functools.cache
def _warn_compiled() -> None:
    warnings.warn(
        "a planned model is compiled by torch.compile, which decides for itself what is kept: the"
        " plan is not followed. Train it without torch.compile, or undo the plan.",
        XmemWarning,
        stacklevel=2,
    )


def _as_arrays(model: Any) -> dict[str, Any]:
    return {
        name: gradient.detach().to_dense().float().cpu().numpy().copy()
        for name, parameter in model.named_parameters()
        if (gradient := master_of(parameter).grad) is not None
    }
