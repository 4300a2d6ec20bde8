"""Parameters that live in a depot; a layer's come when it runs (PyTorch 2.13).

Parameters stay the objects that they are, with their shapes, gradients and hooks; the memory behind
them comes and goes (`streamed_copies.py`), with calls of modules (`streamed_layers.py`) and with
the nodes of backward (`streamed_backward.py`). Whoever reads one that is away is told so.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xmem.errors import CompositionError, OffloadError, UsageError
from xmem.layouts import Named
from xmem.offload.depot import Depot
from xmem.offload.layers import Layer, Stays, find_layers, make_receipt
from xmem.planned import PlannedForward, TracedForward
from xmem.receipts import Receipt
from xmem_torch import streamed_copies as copies
from xmem_torch import streamed_layers
from xmem_torch.checkpoint import Checkpoint
from xmem_torch.forwards import rebuild
from xmem_torch.local_parts import is_spread
from xmem_torch.masters import master_of, parameters_of
from xmem_torch.streamed_calls import StreamedLayer, StreamedModel
from xmem_torch.streamed_pieces import Piece, holding, piece_of, pieces_of, raise_behind

_NEVER_CALLED = (
    nn.ParameterList,
    nn.ParameterDict,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
)


def offload(
    model: Any, depot: Depot, *, blocks: Sequence[Any] | None, prefetch_bytes: int
) -> Receipt:
    """See `xmem.offloading.Offload.offload_parameters`."""
    layers = find_layers(Checkpoint(), model, blocks, _own, _runs)
    _check(model, layers)
    copies.load()  # compiled before anything changes
    pieces, stays = _found(model, layers, depot)
    for piece in pieces:
        piece.begin()
    undo = _apply(model, layers, pieces, depot, prefetch_bytes) if pieces else lambda: None
    sizes = {
        id(p): piece.nbytes if not n else 0
        for piece in pieces
        for n, p in enumerate(piece.parameters())
    }
    return make_receipt("torch", layers, sizes, stays, undo)


def are_away(parameters: Sequence[Any]) -> bool:
    """Say whether some of these parameters live in a depot."""
    return bool(pieces_of(parameters))


def brought_in(
    parameters: Sequence[Any], failed: Callable[[OffloadError], None] = raise_behind
) -> AbstractContextManager[None]:
    """Have these parameters on the device inside the block; changes are stored at its end."""
    return holding(parameters, failed)


def _apply(
    model: Any, layers: Sequence[Layer], pieces: Sequence[Piece], depot: Depot, prefetch_bytes: int
) -> Callable[[], None]:
    """Let all leave, and come and go from now on; return what takes that back."""
    shared = StreamedModel(prefetch_bytes)
    modules: list[weakref.ref[Any]] = []

    def undo() -> None:
        shared.begin_pass()
        shared.ahead.clear()
        for piece in pieces:
            piece.back_for_good()
        for module in (reference() for reference in modules):
            if module is not None:
                streamed_layers.end(module)
                rebuild(module)
        _streamed.discard(shared)
        if not _streamed:
            while _hooks:
                _hooks.pop().remove()
        depot.close()

    try:
        for piece in pieces:
            piece.register()
        for module, layer in _by_module(model, layers, shared):
            streamed_layers.begin(module, layer)
            modules.append(weakref.ref(module))
            rebuild(module)
        for piece in pieces:
            piece.leave()
        _watch_steps(shared)
    except BaseException:
        undo()
        raise
    return _once(undo)


def _by_module(
    model: Any, layers: Sequence[Layer], shared: StreamedModel
) -> Iterator[tuple[Any, StreamedLayer]]:
    """Yield modules, each once, with the layer that comes when they run."""

    def streamed(layer: Layer) -> StreamedLayer:
        return StreamedLayer(layer, pieces_of(p for _, p in layer.parameters), shared)

    places = Counter(module for layer in layers for module in layer.inside)
    roots = {layer.module: streamed(layer) for layer in layers}
    yield from roots.items()
    for layer in layers:
        for module in layer.inside:
            if module not in roots and places[module] == 1:
                yield module, roots[layer.module]
    for module, count in places.items():
        if module not in roots and count > 1:  # inside several: only its own comes
            yield module, streamed(Layer("", module, (module,), tuple(_own(module))))
    if model not in roots:  # its calls hold what is read outside of the module that has it
        yield model, streamed(Layer("", model, (), ()))


def _once(function: Callable[[], None]) -> Callable[[], None]:
    """Return what does something once, and again only if it has failed."""
    done = False

    def run() -> None:
        nonlocal done
        if not done:
            function()
            done = True

    return run


def _own(module: Any) -> Iterator[Named]:
    if not isinstance(module, torch.jit.ScriptModule):
        yield from ((name, p) for name, p in module._parameters.items() if p is not None)


def _runs(module: Any) -> bool:
    called = type(module).forward is not nn.modules.module._forward_unimplemented
    return called and not isinstance(module, _NEVER_CALLED)


def _check(model: Any, layers: Sequence[Layer]) -> None:
    for path, module in model.named_modules():
        name = repr(path or type(model).__name__)
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            raise CompositionError(
                f"{name} is compiled by torch.compile, whose code reads parameters by itself: take"
                " one of the two"
            )
        if isinstance(vars(module).get("forward"), (PlannedForward, TracedForward)):
            raise CompositionError(
                f"{name} is planned (xmem.plan), and its stages read parameters past their"
                " modules: call undo() of the plan's receipt, or leave offload_parameters out"
            )
    for name, p in (named for layer in layers for named in layer.parameters):
        if nn.parameter.is_lazy(p):
            raise UsageError(f"parameter {name!r} is lazy, and has no size yet: run the model once")
        if piece_of(p) is not None:
            raise UsageError(
                f"parameter {name!r} is offloaded already: call undo() of its receipt first"
            )
        if master_of(p) is not p:
            raise CompositionError(
                f"parameter {name!r} has a float32 master (xmem.cast_model), from which all are"
                " rounded at once after a step: call undo() of that receipt first"
            )
        if is_spread(p):
            raise CompositionError(
                f"parameter {name!r} is spread over ranks (xmem.distributed): its parts come and go"
                " by themselves"
            )


def _found(model: Any, layers: Sequence[Layer], depot: Depot) -> tuple[list[Piece], list[Stays]]:
    """Return what can leave, and what stays and why."""
    names = {id(p): (name, p) for layer in layers for name, p in layer.parameters}
    together: dict[int, list[Any]] = {}
    stays: list[Stays] = []
    buffers = _storages(model.buffers())
    for name, p in names.values():
        reason = _obstacle(p, buffers)
        if reason is not None:
            stays.append(Stays(name, p.nbytes, reason))
        elif p.numel():
            together.setdefault(p.untyped_storage()._cdata, []).append(p)
    return [Piece(held[0].untyped_storage(), held, depot) for held in together.values()], stays


def _obstacle(p: Any, buffers: set[int]) -> str | None:
    if type(p) not in (nn.Parameter, torch.Tensor):
        return f"it is a {type(p).__name__}"
    if p.layout is not torch.strided:
        return f"it is {str(p.layout).removeprefix('torch.')}"
    if p.device.type not in ("cpu", "cuda"):
        return f"it is on {p.device.type}"
    if p.is_inference():
        return "it was made in inference mode"
    storage = p.untyped_storage()
    if storage._cdata in buffers:
        return "a buffer lies in the same memory"
    if p.is_shared() and p.device.type == "cpu":
        return "its memory is shared with other processes"
    if not storage.resizable():
        return "its memory is numpy's too, or another library's (a clone() has its own)"
    return None


def _storages(tensors: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}


_streamed: weakref.WeakSet[StreamedModel] = weakref.WeakSet()
_hooks: list[Any] = []


def _watch_steps(model: StreamedModel) -> None:
    """Refuse plain steps while a model has parameters that are away."""
    _streamed.add(model)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse_step))


def _refuse_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _streamed:  # the models are gone
        _hooks.pop().remove()
        return
    from xmem_torch.streamed_states import is_streamed  # which relies on this module

    if is_streamed(optimizer):
        return
    closure = any(callable(value) for value in (*args, *kwargs.values()))
    for p in parameters_of(optimizer):
        piece = piece_of(p)
        if piece is not None and not piece.here and (p.grad is not None or closure):
            raise CompositionError(
                f"{type(optimizer).__name__}.step() would change parameters that are away"
                " (xmem.offload_parameters). Let the step bring them in:"
                " xmem.offload_optimizer(optimizer), or xmem.optimizer_in_backward(model,"
                " optimizer); or call undo() of the receipt first"
            )
