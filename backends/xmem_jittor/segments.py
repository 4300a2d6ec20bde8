"""Regions: one call, or several that follow each other, taped and recomputed in backward.

Relies on `jt.tape_together` of Jittor 1.3.11, which `jt.Function` is made of. Each call of a region
is taped as one operation. What one call hands to the next is a tensor and no placeholder, so
whoever else reads it gets its value and its gradient. When Python drops it, the edge of the tape is
moved to a node that carries gradients and no memory, and the tensor is freed unless it was read by
others. The first gradient that comes computes all calls up to its own again, later ones find them
computed.

All stays lazy. A value that is waited for inside the gradient callback would keep every gradient
computed so far, since Jittor's `grad` holds them until it returns.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jittor as jt

from xmem.containers import fill, leaves, take_apart
from xmem.records import Recompute
from xmem_jittor import notices, regions
from xmem_jittor.calls import Call, flags_in_force
from xmem_jittor.differentiate import differentiate
from xmem_jittor.graph import let_go, maker_of, newest_node, refuse_second_derivatives, tape_of
from xmem_jittor.keeping import Packed, origin_of, packs
from xmem_jittor.late import Stays
from xmem_jittor.remaking import Remade
from xmem_jittor.trial import trying


def ambient() -> Hashable | None:
    """Return what a call runs under, or None where no gradients are recorded."""
    if jt.flags.no_grad:
        return None
    return regions.in_force(), tuple(flags_in_force().items())


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a tensor that was handed out comes from; an attribute of the tensor.

    Attributes:
        segment: its region.
        position: how many calls the region had then.
        index: which of the last call's outputs it is.
        tensor: the tensor's number, which changes when its handle gets another one.
    """

    segment: Segment
    position: int
    index: int
    tensor: int


@dataclass(eq=False)
class _Input:
    """An input of a call.

    Attributes:
        value: a view of it, or what it is packed in, or None where the call before returns it.
        before: which output of the call before it is.
        wanted: gradients are asked for.
    """

    value: Any
    before: int
    wanted: bool


@dataclass(eq=False)
class _Link:
    """A call of a region, with what belongs to its place in it.

    Attributes:
        call: the call.
        inputs: its inputs.
        sources: shape and type of what gets its gradients.
        taped: the float outputs' places on the tape, where it is taped.
        alive: returns None when the tape has let go of the call.
        again: inputs, views of reads, and outputs of the second pass, once it has run.
        spent: its gradients have been handed out.
    """

    call: Call
    inputs: list[_Input]
    sources: list[tuple[Any, Any]] = field(default_factory=list)
    taped: list[int] = field(default_factory=list)
    alive: Callable[[], Any] = lambda: None
    again: tuple[list[Any], list[Any], list[Any]] | None = None
    spent: bool = False


class Segment:
    """Calls that are recomputed together.

    Args:
        ambient: what the calls run under; all the same.
    """

    def __init__(self, ambient: Hashable) -> None:
        self._ambient = ambient
        self._links: list[_Link] = []
        self._computed = False
        self._whole = False

    def add(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Recompute,
        *,
        ends: bool = True,
    ) -> Any:
        """Run a call without a graph and tape what it did as one operation."""
        notices.warn_if_eager()
        if not _depth:
            for unfinished in list(_unfinished):
                unfinished.give_up()
        given: list[Any] = []
        template = take_apart((tuple(args), dict(kwargs)), jt.Var, given)
        inputs = [self._input(v) for v in given]
        link = _Link(Call(function, template, how), inputs)
        with jt.flag_scope(lazy_execution=1):
            first = [
                _detached(v, i.wanted) if i.value is None else i.value
                for v, i in zip(given, inputs, strict=True)
            ]
            newest = newest_node()
            result, outputs = link.call.first_pass(first)
            sources = [v for v, i in zip(given, inputs, strict=True) if i.wanted]
            sources += [read.handles[0] for read in link.call.reads if read.trained]
            if sources:
                outputs = self._tape(link, sources, outputs, newest)
            handed_on = [v for v, i in zip(given, inputs, strict=True) if i.value is None]
            if link.taped:
                _let_go_when_dropped(link, handed_on)
                _pack(given, inputs)
        self._links.append(link)
        self._whole = ends
        if not ends:
            # The attribute goes on a tensor of its own, never on one that the model keeps.
            outputs = [v.detach() if v.id <= newest else v for v in outputs]
            for index, output in enumerate(outputs):
                output._xmem_place = _Place(self, len(self._links), index, output.id)
        return fill(result, outputs)

    def _input(self, var: Any) -> _Input:
        wanted = var.dtype.is_float() and not var.is_stop_grad()
        if self.follows(var):
            return _Input(None, var._xmem_place.index, wanted)
        return _Input(_detached(var, wanted), 0, wanted)

    def follows(self, var: Any) -> bool:
        """Say whether a tensor is what the last call has handed out."""
        place = getattr(var, "_xmem_place", None)
        return (
            place is not None
            and place.segment is self
            and place.position == len(self._links)
            and place.tensor == var.id
            and not self._computed
        )

    def open_for(self, ambient: Hashable) -> bool:
        """Say whether a call that runs under `ambient` may be added."""
        return not self._whole and not self._computed and self._ambient == ambient

    def _tape(self, link: _Link, sources: list[Any], outputs: list[Any], newest: int) -> list[Any]:
        """Let gradients of the outputs come to `_backward`; returns the outputs to hand out."""
        taped = []
        for index, output in enumerate(outputs):
            if output.dtype.is_float():
                # What the function only passes on is not its own to tape.
                own = output.detach() if output.id <= newest else output.stop_fuse()
                outputs[index] = own.tape()
                taped.append(outputs[index])
        if taped:
            callback = functools.partial(self._backward, link)
            jt.tape_together([v.tape() for v in sources], taped, callback)
            link.sources = [(v.shape, v.dtype) for v in sources]
            link.taped = [tape_of(v) for v in taped]
            link.alive = weakref.ref(callback)
        return outputs

    def _backward(self, link: _Link, *gradients: Any) -> list[Any]:
        """Differentiate one call; the first time, compute it and those before it again.

        Args:
            link: the call.
            gradients: of its floating-point outputs; None where there is none.
        """
        if trying():
            return [jt.zeros(shape, dtype) for shape, dtype in link.sources]
        position = self._links.index(link)
        if link.spent or (self._computed and link.again is None):
            notices.refuse_twice(link.call.name)
        with inside(), jt.flag_scope(no_grad=0, lazy_execution=1, **link.call.flags):
            first = not self._computed
            if first:
                self._compute(position)
            inputs, views, outputs = link.again or ([], [], [])
            targets = [v for v, i in zip(inputs, link.inputs, strict=True) if i.wanted]
            targets += [v for v, r in zip(views, link.call.reads, strict=True) if r.trained]
            outputs = [v for v in outputs if v.dtype.is_float()]
            found = differentiate(outputs, gradients, targets, gated=first)
            del inputs, views, outputs, targets
            self._release(link, position)
            places = [p for p, g in zip(link.taped, gradients, strict=True) if g is not None]
            if not places:
                return found
            return refuse_second_derivatives(
                found, gradients, places[0], notices.refuse_twice_differentiated
            )

    def _compute(self, position: int) -> None:
        """Run the calls up to a position again, each on what the one before has returned."""
        self._computed = True
        _unfinished.add(self)
        if position == len(self._links) - 1 and not self._whole:
            notices.warn_cut_short(self._links[position].call.name)
        outputs: list[Any] = []
        for link in self._links[: position + 1]:
            inputs = [
                _view(outputs[i.before] if i.value is None else _whole(i.value), i)
                for i in link.inputs
            ]
            views = link.call.views()
            outputs = link.call.second_pass(inputs, views)
            link.again = inputs, views, outputs
            for i in link.inputs:
                i.value = None

    def _release(self, link: _Link, position: int) -> None:
        """Let go of all tensors: Jittor keeps this object until the whole backward has run."""
        link.spent = True
        link.again = None
        link.call.release()
        if not any(other.taped for other in self._links[:position]):
            self.give_up()

    def give_up(self) -> None:
        """Let go of what has been computed again and was not asked for."""
        _unfinished.discard(self)
        for link in self._links:
            link.again = None
            link.call.release()
            for i in link.inputs:
                i.value = None


def continued(args: Sequence[Any], kwargs: Mapping[str, Any], now: Hashable) -> Segment:
    """Return the region that a call's inputs come from, if it is open for it, or a new one."""
    for var in leaves((args, kwargs), jt.Var):
        place = getattr(var, "_xmem_place", None)
        if place is not None and place.segment.open_for(now) and place.segment.follows(var):
            found: Segment = place.segment
            return found
    return Segment(now)


def is_inside() -> bool:
    """Say whether a region is being differentiated."""
    return _depth > 0


_unfinished: weakref.WeakSet[Segment] = weakref.WeakSet()
_depth = 0


@contextmanager
def inside() -> Iterator[None]:
    """Note inside the block that a region is being differentiated."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _let_go_when_dropped(link: _Link, handed_on: Sequence[Any]) -> None:
    """Let a call read its inputs' places on the tape only, once nobody holds the inputs any more.

    While somebody does, gradients may be asked for with respect to them.
    """
    operation = maker_of(link.taped[0])
    for var in handed_on:
        dropped = weakref.finalize(var._xmem_place, let_go, operation, var.var_ptr, link.alive)
        dropped.atexit = False


def _detached(var: Any, wanted: bool) -> Any:
    return var.detach() if wanted else var.detach().stop_grad()


def _pack(given: Sequence[Any], inputs: Sequence[_Input]) -> None:
    """Pack the inputs that are kept, where a block of `saved.py` is entered."""
    block = packs()
    if block is None or is_inside():
        return
    layer, module = ("", None)
    if block.running:
        layer, module = block.running[-1].path, block.running[-1].module
    for var, entry in zip(given, inputs, strict=True):
        if entry.value is not None and entry.wanted:
            packed = block.keep(entry.value, origin_of(var), layer, module)
            if isinstance(packed, Stays):
                packed.note_alone()
            entry.value = entry.value if packed is None else packed


def _whole(value: Any) -> Any:
    return value.unpacked() if isinstance(value, (Packed, Remade, Stays)) else value


def _view(value: Any, of: _Input) -> Any:
    """Return what a second pass reads as an input."""
    # Not `start_grad`: Jittor 1.3.11 takes such a tensor for a scalar, so that float32 plus half is
    # half, and was float32 in the first pass. What is detached asks for gradients anyway.
    return value.detach() if of.wanted else value.detach().stop_grad()
