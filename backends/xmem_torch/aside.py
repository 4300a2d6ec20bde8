"""A step that is run aside: what it leaves on models, parameters and the batch is undone.

Which tensors get gradients is read from the graph of the loss: the variables of its AccumulateGrad
nodes (PyTorch 2.13). Parameters that a graph hides (`torch.utils.checkpoint` with reentrant
backward) are known of the model and of the modules that the loss function reaches only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from xmem.randomness import Streams
from xmem_torch.masters import master_of, moves_gradient
from xmem_torch.reach import reach, stream_kinds


class Gradients:
    """Gradients, and hooks on them, that are set aside; see `gradients_aside`."""

    def __init__(self) -> None:
        self._gradients: dict[int, tuple[Any, Any]] = {}
        self._hooks: list[tuple[Any, Any]] = []

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let tensors have neither gradients nor hooks on complete ones (optimizers, mostly)."""
        for tensor in tensors:
            for holder in (tensor, master_of(tensor)):
                if id(holder) not in self._gradients:
                    self._gradients[id(holder)] = holder, holder.grad
                    holder.grad = None
                    self._take_hooks(holder)

    def _take_hooks(self, holder: Any) -> None:
        hooks = holder._post_accumulate_grad_hooks
        if hooks:
            kept = OrderedDict((k, hook) for k, hook in hooks.items() if moves_gradient(hook))
            if len(kept) < len(hooks):
                self._hooks.append((holder, hooks))
                holder._post_accumulate_grad_hooks = kept  # None would leave them in force

    def put_back(self) -> None:
        """Give the tensors back what they had."""
        for holder, gradient in self._gradients.values():
            holder.grad = gradient
        for holder, hooks in self._hooks:
            holder._post_accumulate_grad_hooks = hooks


@contextmanager
def gradients_aside(model: Any, loss_fn: Callable[[Any, Any], Any]) -> Iterator[Gradients]:
    """Set aside the gradients of all parameters that are known; what it yields takes more."""
    aside = Gradients()
    try:
        aside.take(model.parameters())
        for module in reach(loss_fn).modules:
            aside.take(p for p in module._parameters.values() if p is not None)
        yield aside
    finally:
        aside.put_back()


def accumulating(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that get a gradient when a loss is differentiated."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    found: dict[int, torch.Tensor] = {}
    seen, pending = {loss.grad_fn}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return list(found.values())


@contextmanager
def put_back(model: Any, loss_fn: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let the block run a model and a loss function and undo what that does to their state.

    Buffers and random numbers are afterwards what they were.
    """
    reached = [reach(model), reach(loss_fn)]
    modules = dict.fromkeys(module for found in reached for module in found.modules)
    held = dict.fromkeys(stream for found in reached for stream in found.streams)
    streams = Streams(list(held), stream_kinds())
    before = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in modules
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
