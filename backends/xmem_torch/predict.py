"""Predicting the peak of a step on PyTorch (2.13): on fake tensors, to the byte.

`fakes.py` exchanges the tensors, `followed.py` follows the step, `scratch.py` knows what kernels
take. Nothing of the step is computed, so neither its memory nor its time is needed, only that of
its single operations. What depends on data (`item()` in a forward, `nonzero`) cannot be followed.

Limits: memory that is not the dispatcher's (C++ extensions of one's own), hooks on parameters.
Figures hold for the number of threads, as kernels choose by it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from xmem.containers import leaves
from xmem.errors import CapabilityError, CompositionError, UsageError
from xmem.predicting import Prediction
from xmem.randomness import Streams
from xmem_torch.fakes import Fakes, held_by, mode_of, state_of
from xmem_torch.followed import Followed
from xmem_torch.masters import parameters_of
from xmem_torch.measure import Measure
from xmem_torch.reach import reach, stream_kinds
from xmem_torch.streamed_states import is_streamed

_REMEDY = "Run it instead: xmem.profile(model, batch, loss_fn), or a step inside xmem.measure()."
_AWAY = (
    "the optimizer's states are away (xmem.offload_optimizer), and a step that is followed without"
    " memory would read them: call undo() of the receipt first, or run a step inside xmem.measure()"
)
_NO_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

LossFunction = Callable[[Any, Any], Any]


class Predict:
    """Predicts steps.

    Args:
        device: "cpu" or "cuda"; what is on another is not counted.
        measure: counts bytes where single operations are run.
    """

    def __init__(self, device: str, measure: Measure) -> None:
        self._device = device
        self._measure = measure

    def predict(
        self, model: Any, batch: Any, loss_fn: LossFunction, optimizer: Any = None
    ) -> Prediction:
        """Predict a step; see `xmem.predict`."""
        if optimizer is not None and is_streamed(optimizer):
            raise CompositionError(_AWAY)
        modules = list(dict.fromkeys([*model.modules(), *reach(loss_fn).modules]))
        held = held_by(modules)
        _refuse_hooks(held)
        state = [] if optimizer is None else state_of(optimizer)
        mode = mode_of([*held, *leaves(batch, torch.Tensor), *state])
        fakes = Fakes(mode, self._device)
        streams = Streams(reach(model).streams, stream_kinds())
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with ExitStack() as stack:
            stack.callback(streams.rewind)
            stack.enter_context(torch.random.fork_rng(devices))
            inputs = fakes.inside(batch)
            stack.enter_context(fakes.in_modules(modules))
            if optimizer is not None:
                stack.enter_context(fakes.in_optimizer(optimizer))
            fakes.forget()
            stack.enter_context(_errors_named())
            stack.enter_context(mode)
            stack.enter_context(torch.enable_grad())
            step = _Step(model, inputs, loss_fn, optimizer, modules)
            if optimizer is not None and _lacks_state(optimizer):
                with Followed(mode, self._device, self._measure) as followed:
                    for _ in step.run(followed):
                        pass
                step.forget_gradients()
            gc.collect()
            followed = Followed(mode, self._device, self._measure)
            return _followed(step, followed)


def _followed(step: _Step, followed: Followed) -> Prediction:
    for tensor in step.static():
        followed.hold(tensor)
    static_bytes = followed.current_bytes
    by_phase: dict[str, int] = {}
    followed.peak_bytes = static_bytes
    with followed:
        for phase in step.run(followed):
            by_phase[phase] = followed.peak_bytes - static_bytes
            followed.peak_bytes = followed.current_bytes
    above = max(by_phase.values())
    return Prediction(
        static_bytes=static_bytes,
        peak_above_static_bytes=above,
        peak_allocated_bytes=static_bytes + above,
        by_phase=by_phase,
        calibrated_operations=len(followed.calibrated),
        uncalibrated_operations=len(followed.uncalibrated),
        how="fake",
    )


class _Step:
    """A training step on fake tensors."""

    def __init__(
        self,
        model: Any,
        inputs: Any,
        loss_fn: LossFunction,
        optimizer: Any,
        modules: Sequence[Any],
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._modules = modules

    def static(self) -> list[Any]:
        """Return what is there before the step."""
        found = [*held_by(self._modules), *leaves(self._inputs, torch.Tensor)]
        if self._optimizer is not None:
            found += [*parameters_of(self._optimizer), *state_of(self._optimizer)]
        return found

    def run(self, followed: Followed) -> Iterator[str]:
        """Run it, and yield each phase when it is over."""
        loss = self._loss_fn(self._model, self._inputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(f"loss_fn returned {type(loss).__name__}, and not a scalar tensor")
        yield "forward"
        loss.backward()
        yield "backward"
        if self._optimizer is not None:
            followed.updating = True
            self._optimizer.step()
            yield "optimizer"

    def forget_gradients(self) -> None:
        """Set all gradients to None."""
        for tensor in self.static():
            if tensor.is_leaf:
                tensor.grad = None


def _lacks_state(optimizer: Any) -> bool:
    """Say whether an optimizer may still have to make its state."""
    state: Mapping[Any, Any] = optimizer.state
    return any(p.requires_grad and not state.get(p) for p in parameters_of(optimizer))


def _refuse_hooks(tensors: Sequence[Any]) -> None:
    """Refuse what fakes do not have: they would act on the parameters themselves."""
    for tensor in tensors:
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise CapabilityError(
                "a parameter has hooks (float32 masters of a model that was cast, an optimizer"
                f" step in backward, data parallel), which cannot be followed. {_REMEDY}"
            )


@contextmanager
def _errors_named() -> Iterator[None]:
    """Say what cannot be done without data."""
    try:
        yield
    except _NO_DATA as error:
        operation = getattr(error, "func", error)
        raise CapabilityError(
            f"the step depends on data: {operation} reads values (an item(), a nonzero() or a"
            f" condition on a tensor), and is followed without any. {_REMEDY}"
        ) from error


def predict(
    model: Any, batch: Any, loss_fn: LossFunction, optimizer: Any = None, *, device: str = "cpu"
) -> Prediction:
    """Predict a step by itself; `Predict` keeps the counters."""
    return Predict(device, Measure(device)).predict(model, batch, loss_fn, optimizer)
