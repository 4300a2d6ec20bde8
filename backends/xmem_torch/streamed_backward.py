"""When layers come and go in backward (PyTorch 2.13).

A layer comes before the first node runs that its outputs hang on: a hook on the nodes, not on
tensors, so that outputs that are changed in place, and those nobody reads, do no harm. Where an
output is a view, whose node an in-place change replaces, all nodes of the call have it.

It goes with the first node of an earlier call that runs. The engine takes the node that was made
last among those that are ready, and accumulates gradients before all others; so by then all nodes
of the later call that run at all have run, and its parameters have their gradients. What is left
goes at the end of backward.

Limit: a tensor that leaves a layer neither in its outputs nor as an attribute of a module in it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from xmem.containers import leaves
from xmem.errors import CompositionError, OffloadError
from xmem_torch.streamed_pieces import Piece, give_all, lock, raise_behind, take_all

if TYPE_CHECKING:
    from xmem_torch.streamed_calls import StreamedLayer

_SECOND = (
    "create_graph=True with xmem.offload_parameters: second derivatives read parameters once more,"
    " at a time that is not known before. Call undo() of its receipt for them"
)
_NEVER = -1
_LEAF = "torch::autograd::AccumulateGrad"


class Call:
    """One call of a layer whose outputs have a graph.

    Attributes:
        layer: what was called.
        pieces: what it read.
        start: the number of the first node that it can have made.
    """

    __slots__ = ("layer", "pieces", "start", "thread")

    def __init__(self, layer: StreamedLayer, pieces: Sequence[Piece], start: int) -> None:
        self.layer, self.pieces, self.start = layer, list(dict.fromkeys(pieces)), start
        self.thread = threading.get_ident()


@dataclasses.dataclass(frozen=True, eq=False)
class _There:
    """A call whose parameters are there, and for which backward."""

    call: Call
    task: int


class Backward:
    """The calls whose parameters are on the device for backward."""

    def __init__(self) -> None:
        self._there: list[_There] = []
        self._ending: set[int] = set()

    def watch(self, call: Call, result: Any) -> None:
        """Let a call's parameters come when backward gets there."""
        tensors = [*tensors_in(result), *call.layer.attributes()]
        nodes = {t.grad_fn: t._is_view() for t in tensors if t.grad_fn is not None}
        for node in _nodes(nodes, call.start):
            node.register_prehook(partial(self._arrive, call, node._sequence_nr()))

    def lend(self, piece: Piece, layer: StreamedLayer) -> None:
        """Have a piece on the device until the end of the backward that runs."""
        with lock:
            piece.take()
            self._there.append(_There(Call(layer, [piece], _NEVER), self._task()))

    def forget(self) -> None:
        """Let go of what this thread's calls have there: no backward of its own runs."""
        with lock:
            self._ending.clear()
            self._let_go(lambda there: there.call.thread == threading.get_ident())

    def _arrive(self, call: Call, number: int, _: Any) -> None:
        if torch.is_grad_enabled():
            raise CompositionError(_SECOND)
        with lock:
            task = self._task()
            try:
                self._let_go(
                    lambda there: (
                        there.call.start > number
                        and there.call.thread == call.thread
                        and there.call is not call
                    )
                )
            except OffloadError as error:  # the parameters before are to step in backward, too
                raise_behind(error)
            finally:
                if not any(there.call is call for there in self._there):
                    take_all(call.pieces)
                    self._there.append(_There(call, task))
                    call.layer.arrives("backward")

    def _task(self) -> int:
        """Return which backward runs, and see to its end."""
        task: int = torch._C._current_graph_task_id()
        if task not in self._ending:
            self._ending.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        return task

    def _end(self, task: int) -> None:
        with lock:
            self._ending.discard(task)
            models = [there.call.layer.model for there in self._there if there.task == task]
            try:
                self._let_go(lambda there: there.task == task)
            finally:
                if models and not self._there:
                    models[0].ahead.clear()

    def _let_go(self, chosen: Callable[[_There], bool]) -> None:
        gone = [there for there in self._there if chosen(there)]
        self._there = [there for there in self._there if there not in gone]
        give_all(piece for there in gone for piece in there.call.pieces)


def tensors_in(result: Any) -> list[Any]:
    """Return the tensors in what a layer returns: containers, and objects that hold some."""
    if isinstance(result, torch.Tensor):
        return [result]
    found = leaves(result, torch.Tensor)
    # By its type: asking what waits for the rest of its segment would run it.
    if not found and dataclasses.is_dataclass(type(result)):
        fields = dataclasses.fields(type(result))
        return leaves([getattr(result, field.name) for field in fields], torch.Tensor)
    return found


def _nodes(roots: dict[Any, bool], start: int) -> Iterator[Any]:
    """Yield nodes that were made since a number; of those of views, all that they hang on."""
    seen: set[Any] = set()
    pending = list(roots.items())
    while pending:
        node, deep = pending.pop()
        if node in seen or node.name() == _LEAF or node._sequence_nr() < start:
            continue
        seen.add(node)
        yield node
        if deep:
            pending += [(following, True) for following, _ in node.next_functions if following]
