"""Plans on Jittor: any schedule of a chain, played on the lazy graph; see `playing.py`.

Relies on `jt.tape_together`, `jt.code` and the order of execution of Jittor 1.3.11: operations run
in the order in which they were made, as far as their inputs are there.

Limits: a stage's output is read by stages only, where gradients are asked for. Only first
derivatives. There is no tracer, so stages are modules.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jittor as jt
import numpy as np

from xmem.containers import leaves
from xmem.errors import CapabilityError
from xmem.playing import REMADE, Script, TracedStages
from xmem.predicting import PREDICTION, Prediction
from xmem.randomness import Streams, stream_kinds
from xmem.records import Recompute, Step
from xmem_jittor import marking, native, replay, shares
from xmem_jittor.graph import newest_node
from xmem_jittor.handing import Chain, Stepping, bytes_of, bytes_there, is_trained
from xmem_jittor.marking import Notes
from xmem_jittor.ordering import anchor
from xmem_jittor.playing import PlanRun

_COPIED_BYTES = 1 << 16  # a running statistic; larger ones are frozen parameters, mostly
_COPIED_TYPES = ("float32", "int32")  # which jt.array gives back as they are


class Plans:
    """Play plans; see `xmem.playing.Plans`.

    Args:
        device: in use.
    """

    def __init__(self, device: str) -> None:
        self.gaps: Mapping[str, str] = {
            "tracing": "Jittor has no tracer that takes a forward apart; stages are modules",
            PREDICTION: "Jittor's operations cannot be followed without running them",
            REMADE: "the second pass may round otherwise, as Jittor fuses otherwise",
            "other readers": "the gradient of a stage's output comes through stages only",
        }
        self._stepping: Stepping | None = None
        for compiled_now in (native.graph, native.emptying, anchor):
            compiled_now()

    def recording(self) -> bool:
        """Say whether `jt.no_grad` is off."""
        return not jt.flags.no_grad

    def open(
        self, script: Script, names: Sequence[str], how: Recompute, *, traced: bool
    ) -> PlanRun:
        """Begin a forward pass."""
        notes = Notes() if traced else None
        return PlanRun(script, names, how, notes=notes, chain=Chain(script, self._stepping))

    def traced(self, model: Any) -> TracedStages | None:
        """Return None: there is no tracer."""
        return None

    def tensors(self, tree: Any) -> list[Any]:
        """Return the tensors in nested containers."""
        return leaves(tree, jt.Var)

    def bytes_of(self, tensors: Sequence[Any]) -> int:
        """Return bytes of distinct allocations; of what is not computed yet, of its shape."""
        return bytes_of(tensors)

    def forward_aside(self, model: Any, batch: Any, loss_fn: Callable[[Any, Any], Any]) -> None:
        """Build the loss without a graph; nothing of it is computed."""
        with _restored(model), replay.unmoved(), replay.recorded(), jt.no_grad():
            loss_fn(model, batch)

    def step(
        self,
        model: Any,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        gradients: bool = False,
    ) -> Step:
        """Compute a loss and its gradients in one execution, and leave no trace of it.

        All random numbers are drawn as in stages, with seeds: Jittor's own generator cannot be set
        back, and a step without a plan draws the same numbers as one with a plan.
        """
        shares.refuse_owned(model, "A plan")
        library = native.allocator()
        trained = {name: p for name, p in model.named_parameters() if is_trained(p)}
        with _restored(model) as buffers, replay.unmoved():
            gc.collect()
            jt.sync_all(True)
            marking.forget()
            library.xmem_jittor_reset_peak()
            before = marking.allocated()[0]
            began = time.perf_counter()
            self._stepping = Stepping(list(trained.values()), newest_node())
            try:
                with replay.recorded():
                    loss = loss_fn(model, batch)
                targets = list(trained.values())
                found = jt.grad(loss, targets, retain_graph=False) if targets else []
            finally:
                self._stepping = None
            jt.sync([loss, *found, *buffers()], True, False)
            marking.end()
            seconds = time.perf_counter() - began
            peak = marking.allocated()[1]
            value = float(loss.item())
            made = bytes_there(found)
            named = None
            if gradients:
                arrays = [np.array(g.float32().numpy()) for g in found]
                named = dict(zip(trained, arrays, strict=True))
            del loss, found
        return Step(before, peak, made, seconds, value, named)

    def predict(
        self, model: Any, batch: Any, loss_fn: Callable[[Any, Any], Any], optimizer: Any
    ) -> Prediction:
        """Refuse: see `gaps`; `xmem.predict` profiles instead."""
        raise CapabilityError(self.gaps[PREDICTION])


@contextmanager
def _restored(model: Any) -> Iterator[Callable[[], list[Any]]]:
    """Put buffers and the host's random numbers back after the block.

    Yields what returns the buffers that have changed. The old value of a small one is held in
    NumPy: in training it goes when the new one is there.
    """
    held = [p for p in model.parameters() if p.is_stop_grad()]
    jt.sync(held, True, False)
    old = [
        (p, p.id, np.array(p.numpy()) if _is_small(p) else jt.wrap_var_addr(p.var_ptr))
        for p in held
    ]
    streams = Streams((), stream_kinds())

    def changed() -> list[Any]:
        return [p for p, number, _ in old if p.id != number]

    try:
        yield changed
    finally:
        streams.rewind()
        for p, number, value in old:
            if p.id != number:
                p.assign(jt.array(value).stop_grad() if isinstance(value, np.ndarray) else value)
        jt.sync(held, True, False)


def _is_small(var: Any) -> bool:
    return var.nbytes <= _COPIED_BYTES and str(var.dtype) in _COPIED_TYPES
