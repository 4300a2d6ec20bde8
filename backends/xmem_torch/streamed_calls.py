"""Calls of layers whose parameters come and go, and what one model's layers share (PyTorch 2.13).

A parameter that is read by attribute elsewhere in the model, as a tied weight is, comes, too, and
goes when the call around ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from xmem.errors import CompositionError
from xmem_torch.streamed_ahead import Ahead
from xmem_torch.streamed_backward import Backward, Call, tensors_in
from xmem_torch.streamed_pieces import Piece, give_all, take_all

if TYPE_CHECKING:
    from xmem.offload.layers import Layer

LAYER = "_xmem_streamed_layer"
"""The attribute of a module that is its layer."""
_COMPILED = (
    "{} is traced by torch.compile, and its parameters are away (xmem.offload_parameters): take one"
    " of the two"
)
_FAKE = (
    "{} runs on tensors without memory (xmem.predict, FakeTensorMode), and its parameters are away"
    " (xmem.offload_parameters): call undo() of the receipt first, or measure it"
)


class StreamedModel:
    """What the layers of one model share.

    Attributes:
        ahead: reads what comes next.
        backward: knows what is there for backward.
        lent: what a pass has handed out at its end; it goes when the next one begins.
    """

    def __init__(self, prefetch_bytes: int) -> None:
        self.ahead = Ahead(prefetch_bytes)
        self.backward = Backward()
        self.lent: list[Piece] = []

    def begin_pass(self) -> None:
        """Let go of what an earlier pass has left, after an error perhaps."""
        if torch._C._current_graph_task_id() == -1:
            lent, self.lent = self.lent, []
            try:
                self.backward.forget()
            finally:
                give_all(lent)

    def end_pass(self, outputs: Sequence[Any]) -> None:
        """Keep what was read ahead only where backward will follow."""
        if not any(t.requires_grad for t in outputs) and torch._C._current_graph_task_id() == -1:
            self.ahead.clear()


class StreamedLayer:
    """A layer whose parameters come and go.

    Attributes:
        model: what it shares with others.
        pieces: the memory of its parameters.
    """

    def __init__(self, layer: Layer, pieces: Sequence[Piece], model: StreamedModel) -> None:
        self.model, self.pieces = model, list(pieces)
        modules = layer.inside if layer.module in layer.inside else (layer.module, *layer.inside)
        self._modules = [weakref.ref(module) for module in modules]

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return _nothing, ()

    def arrives(self, phase: str) -> None:
        """Note that it is needed now."""
        if self.pieces:
            self.model.ahead.arrives(phase, self)

    def attributes(self) -> Iterator[Any]:
        """Yield tensors that its modules have kept as attributes."""
        for reference in self._modules:
            module = reference()
            for value in () if module is None else vars(module).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _nothing() -> None:
    return None


class _Frames(threading.local):
    def __init__(self) -> None:
        self.open: list[_Frame] = []


_frames = _Frames()


class _Frame:
    """A call that runs, and what it holds."""

    __slots__ = ("layer", "pieces")

    def __init__(self, layer: StreamedLayer) -> None:
        self.layer = layer
        self.pieces = list(layer.pieces)


def run(module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module's function with the parameters of its layer on the device."""
    layer: StreamedLayer | None = vars(module).get(LAYER)
    frames = _frames.open
    if layer is None or (frames and frames[-1].layer is layer):
        return function(module, *args, **kwargs)
    if not frames or torch.compiler.is_compiling():
        _refuse_traced(module)
        layer.model.begin_pass()
    frame = _Frame(layer)
    take_all(layer.pieces)
    outputs: Sequence[Any] = ()
    try:
        layer.arrives("forward")
        start = torch._C._autograd._get_sequence_nr()
        frames.append(frame)
        try:
            result = function(module, *args, **kwargs)
        finally:
            frames.pop()
        outputs = tensors_in(result)
        if frame.pieces and torch.is_grad_enabled():
            layer.model.backward.watch(Call(layer, frame.pieces, start), result)
        _hand_on(frame, outputs)
        return result
    finally:
        give_all(frame.pieces)
        if not frames:
            layer.model.end_pass(outputs)


def _refuse_traced(module: Any) -> None:
    """Refuse to be traced by torch.compile, also where it has given up, and to run on fakes."""
    if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
        raise CompositionError(_COMPILED.format(type(module).__name__))
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise CompositionError(_FAKE.format(type(module).__name__))


def _hand_on(frame: _Frame, outputs: Sequence[Any]) -> None:
    """Let what is in the outputs themselves, as parameters or views, go with the call around."""
    if not frame.pieces or not outputs:
        return
    storages = {t.untyped_storage()._cdata for t in outputs if t.layout is torch.strided}
    handed = [piece for piece in frame.pieces if piece.storage._cdata in storages]
    for piece in handed:
        frame.pieces.remove(piece)
        frames = _frames.open
        (frames[-1].pieces if frames else frame.layer.model.lent).append(piece)


def lend(piece: Piece, layer: StreamedLayer) -> None:
    """Have a piece that is read by attribute until the call around ends."""
    if _frames.open:
        piece.take()
        _frames.open[-1].pieces.append(piece)
    elif torch._C._current_graph_task_id() != -1:
        layer.model.backward.lend(piece, layer)
