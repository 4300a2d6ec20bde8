"""Parameters that live in a depot; a layer's come when it runs (Jittor 1.3.11).

A parameter that is away stays the tensor that it is: it has its shape, and its value can be read
where it lies, in the depot's own memory or its file, mapped. So whoever reads one gets what it is:
`state_dict`, `save`, a norm over all parameters, an average of them. A layer's forward waits, by
operations of the graph around it (`moving.py`), until its parameters have been read into the pool,
and what comes after it until they have gone; so does its backward. The graph is otherwise that of
the model without it: nothing is computed twice, gradients come out whole, and results are the same.
(What Jittor would have fused across the border of a layer ends there, and may round otherwise.)

A parameter that is given another value (an update, `load_state_dict`) has that one on the device;
it is stored at the end of `brought_in`, or when its layer is called next. What a graph that has not
run yet will read stays stored until it has.

Jittor's own swap is not used: it is only in a core that was compiled with JT_SAVE_MEM=1, it moves
what was used longest ago when a limit is reached, which need not be parameters, and on the way from
a GPU to the disk its check is inverted (a write that succeeds is taken for one that failed).

What is no parameter stays: running statistics, and other tensors of less than two dimensions that
ask for no gradients, which cannot be told from them. Frozen weights of two and more go. A layer
whose inputs ask for no gradients does not come for its backward: what that needs of it, often
nothing, is read where it lies. So is what a step reads of parameters. A scratch file that is cut or
breaks is an `OffloadError` where a layer comes, and ends the process (SIGBUS) where it is read in
place. On CUDA nothing of this has been run; copies wait there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jittor as jt

from xmem.checkpointing import CheckpointedForward, is_recomputed
from xmem.errors import CompositionError, OffloadError, UsageError
from xmem.layouts import Named
from xmem.offload.depot import Depot
from xmem.offload.layers import Layer, find_layers, make_receipt
from xmem.receipts import Receipt
from xmem_jittor import methods, moving, offload_errors, shares
from xmem_jittor.checkpoint import Checkpoint
from xmem_jittor.data_parallel import is_parallel
from xmem_jittor.streamed_layers import StreamedForward, StreamedModel
from xmem_jittor.streamed_steps import let_step, note, noted, stepping


def offload(
    model: Any, depot: Depot, *, blocks: Sequence[Any] | None, prefetch_bytes: int
) -> Receipt:
    """See `xmem.offloading.Offload.offload_parameters`."""
    layers = find_layers(Checkpoint(), model, blocks, _own, _runs)
    _check(model, layers)
    streaming = StreamedModel(depot, prefetch_bytes)
    parameters = list({id(p): p for layer in layers for _, p in layer.parameters}.values())
    sizes = {id(p): int(p.nbytes) for p in parameters}
    undo = _Undo(streaming, parameters)
    offload_errors.tell_of(depot)
    try:
        jt.sync(parameters)
        for parameter in parameters:
            note(parameter, streaming)
            streaming.send(parameter)
        for index, layer in enumerate(layers):
            streaming.layers.append(tuple(p for _, p in layer.parameters))
            undo.undos.append(_streamed(layer.module, streaming, index))
        methods.hold(streaming.holder)
    except BaseException:  # whole or not at all
        undo()
        raise
    return make_receipt("jittor", layers, sizes, (), undo)


def _own(module: Any) -> list[Named]:
    """Return what a module holds itself that goes."""
    held = module.named_parameters(recurse=False)
    return [(n, p) for n, p in held if p.numel() and (_trained(p) or len(p.shape) > 1)]


def _trained(parameter: Any) -> bool:
    return bool(parameter.dtype.is_float() and not parameter.is_stop_grad())


def _runs(module: Any) -> bool:
    return not isinstance(module, (jt.nn.ParameterList, jt.nn.ParameterDict))


def _check(model: Any, layers: Sequence[Layer]) -> None:
    """Refuse what cannot be, before anything changes."""
    name = type(model).__name__
    if any(noted(p) is not None for layer in layers for _, p in layer.parameters):
        raise UsageError(f"{name}'s parameters are offloaded already; undo() of that receipt first")
    if shares.kinds(model.parameters()) or is_parallel(model):
        raise CompositionError(
            f"{name} is shared among ranks, which send its parameters around from the device."
            " Offload the parameters of a model that is not"
        )
    for layer in layers:
        forward = vars(layer.module).get("execute")
        if is_recomputed(forward) and not isinstance(forward, CheckpointedForward):
            raise CompositionError(
                f"{layer.path!r} is planned, and was measured with its parameters on the device."
                " Take the plan off (undo() of its receipt), and let xmem.apply_checkpointing make"
                " regions"
            )


def _streamed(module: Any, streaming: StreamedModel, index: int) -> Callable[[], None]:
    """Let a layer's parameters come and go; returns the undo."""

    def wrap(forward: Callable[..., Any]) -> Any:
        if isinstance(forward, CheckpointedForward):
            # Inside of the region: outside, its inputs would not be those of the region before.
            inner = StreamedForward(forward.forward, streaming, index)
            return replace(forward, forward=inner)
        return StreamedForward(forward, streaming, index)

    undo = Checkpoint().replace_forward(module, wrap)
    set_here = vars(module)["execute"]

    def undone() -> None:
        if vars(module).get("execute") is set_here:  # else what is there runs the forward plainly
            undo()

    return undone


class _Undo:
    """Brings all parameters of a model back."""

    def __init__(self, streaming: StreamedModel, parameters: Sequence[Any]) -> None:
        self._streaming: StreamedModel | None = streaming
        self._parameters = list(parameters)
        self.undos: list[Callable[[], None]] = []

    def __call__(self) -> None:
        """Bring them back; a second call changes nothing."""
        if self._streaming is None:
            return
        for parameter in self._parameters:
            moving.bring_back(parameter, self._streaming.depot)
        for parameter in self._parameters:
            note(parameter, None)
        self._streaming.end()
        while self.undos:
            self.undos.pop()()
        self._streaming, self._parameters = None, []


def are_away(parameters: Sequence[Any]) -> bool:
    """Say whether some of these parameters live in a depot."""
    return any(noted(p) is not None for p in parameters)


def let_stream(optimizer: Any, *, streams: bool = True) -> None:
    """Note that an optimizer's own step brings parameters in, or does so no more."""
    let_step(optimizer, steps=streams)


@contextmanager
def brought_in(parameters: Sequence[Any]) -> Iterator[None]:
    """Let these parameters be updated inside the block; new values are stored at its end.

    What an update reads is read where it lies, so that old and new values are not both on the
    device.
    """
    with stepping(parameters):
        try:
            yield
        finally:
            _store(parameters)


def _store(parameters: Sequence[Any]) -> None:
    changed = [(p, noted(p)) for p in parameters if not moving.is_away(p)]
    held = [(p, streaming) for p, streaming in changed if streaming is not None]
    jt.sync([p for p, _ in held], False, False)
    error: OffloadError | None = None
    for parameter, streaming in held:
        try:
            streaming.send(parameter)
        except OffloadError as raised:
            error = raised
    if error is not None:
        raise error
