"""A planned run as one operation on Jittor's lazy graph, which plays the schedule.

Stages are run as they are called; what they hand out is a value. When the last one has been called,
the whole run is taped as one operation (`jt.tape_together` of Jittor 1.3.11), and its gradient
callback plays the rest of the schedule. All stays lazy: operations run in the order in which the
schedule makes them, and what it drops goes with its last reader.

* Each pass over a stage reads views of its own (`calls.py`), or Jittor would fuse it with others.
* A stage's output is a boundary that nothing is fused across, and its backward waits for it, or
  parts of backward would be fused into the forward.
* Where a stage is kept without its input, the tape stays and loses that input's memory
  (`emptying.py`).
* Where what a stage keeps is packed or offloaded, that loses its memory, too, and gets it back
  before backward (`stage_packing.py`).
* What a stage hands out is taped too, by an operation that raises when it is differentiated: its
  gradient comes through the next stage and through no other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jittor as jt

from xmem.containers import fill, take_apart
from xmem.errors import CompositionError
from xmem.playing import Script
from xmem.records import TAIL, Mark, Recompute
from xmem.stage_options import AS_IS
from xmem_jittor import notices, shares
from xmem_jittor.calls import Call
from xmem_jittor.differentiate import differentiate
from xmem_jittor.emptying import empty, refill
from xmem_jittor.graph import compares, newest_node, refuse_second_derivatives, tape_of
from xmem_jittor.handing import Chain, bytes_of
from xmem_jittor.held import Input, Kept, Place, Stage, added
from xmem_jittor.marking import Notes
from xmem_jittor.ordering import after
from xmem_jittor.packing import Kept as Packed
from xmem_jittor.segments import inside
from xmem_jittor.stage_packing import give_stage_back, keeping_little, pack_stage


class PlanRun:
    """One forward pass of a planned model, and its backward; see `xmem.playing.PlanRun`.

    Args:
        script: what is played.
        names: of the stages.
        how: what is replayed.
        notes: where marks are noted; None where they are not.
        chain: the tape around the stages.
    """

    def __init__(
        self,
        script: Script,
        names: Sequence[str],
        how: Recompute,
        *,
        notes: Notes | None,
        chain: Chain,
    ) -> None:
        self.value_bytes: list[int] = []
        self.reads: list[tuple[int, int]] = []
        self.forwards = [0] * len(script)
        self.differentiated = [False] * len(script)
        self.holds = False  # a guard cannot, see `handing.py`, and handles may go before
        self._script = script
        self._names = names
        self._how = how
        self._notes = notes
        self._chain = chain
        self._stages: list[Stage] = []
        self._values: dict[int, Any] = {}
        self._wanted: list[bool] = []
        self._kept: dict[int, Kept] = {}
        self._deltas: dict[int, Any] = {}  # of values from 1 on
        self._found: dict[int, Any] = {}  # gradients of sources by address
        self._place = 0
        self._spent = False

    def first(
        self,
        stage: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a stage's function for the first time; returns its output."""
        notices.warn_if_eager()
        if stage != len(self._stages):
            notices.refuse_out_of_order(self._names[stage], self._names[len(self._stages) :])
        shares.refuse_owned(getattr(function, "__self__", None), "A plan")
        given: list[Any] = []
        template = take_apart((tuple(args), dict(kwargs)), jt.Var, given)
        with jt.flag_scope(lazy_execution=1):
            if stage == 0:
                self._begin(given)
            inputs = [self._input(stage, v) for v in given]
            call = Call(function, template, replace(self._how, name=self._names[stage]))
            self._stages.append(Stage(call, inputs))
            forward, *others = self._script.sweep[stage]
            value = self._play(forward)
            self._note_sources(self._stages[stage])
            self.value_bytes.append(bytes_of([value]))
            for number in others:
                self._play(number)
            return fill(self._stages[stage].result, [self._handed_out(stage, value)])

    def marks(self) -> list[Mark]:
        """Return what each forward and backward of the script took."""
        if self._notes is None:
            raise CompositionError("this run was not traced, so that it has no marks")
        script = self._script
        ran = [n for n, op in enumerate(script.ops) if op.code in ("N", "G", "B")]
        numbers = [n for n in ran if n < script.loss] + [TAIL] + [n for n in ran if n > script.loss]
        return self._notes.marks(numbers, self._chain.gradient_bytes_before)

    # ------------------------------------------------------------------ forward
    def _begin(self, given: Sequence[Any]) -> None:
        if not given:
            notices.refuse_no_tensor(self._names[0])
        value = given[0].detach()
        if self._notes is not None:
            value = self._notes.begun(value)
        self._values[0] = value
        self._wanted.append(self._chain.wants(given[0]))
        self._chain.begin(given[0])
        self.value_bytes.append(bytes_of([given[0]]))

    def _input(self, stage: int, var: Any) -> Input:
        if stage == 0 and var.var_ptr == self._chain.first:
            wanted = self._wanted[0]
            return Input(0, None, self._chain.source(var) if wanted else 0, wanted)
        place = getattr(var, "_xmem_place", None)
        if isinstance(place, Place) and place.run is self and place.tensor == var.id:
            number = place.value
            if number == stage:
                return Input(number, None, 0, self._wanted[number])
            self.reads.append((number, stage))
            return Input(number, place.held, 0, self._wanted[number])
        wanted = self._chain.wants(var)
        source = self._chain.source(var) if wanted else 0
        return Input(None, var.detach(), source, wanted)

    def _note_sources(self, stage: Stage) -> None:
        """Note what asks for gradients among what a stage reads."""
        for read in stage.call.reads:
            address = self._chain.parameter(read.handles[0]) if read.trained else None
            stage.reads.append(address)
        self._wanted.append(any(i.wanted for i in stage.inputs) or any(stage.reads))
        self._chain.stage_ended()

    def _handed_out(self, stage: int, value: Any) -> Any:
        if not self._wanted[stage + 1]:
            output = value.detach().stop_grad()
        elif stage + 1 < len(self._script):
            output = self._chain.guarded(value, self._names[stage])
        else:
            output = self._chain.taped(value, self._backward)
            self._place = tape_of(output)
        if stage + 1 < len(self._script):
            output._xmem_place = Place(self, stage + 1, output.id, value)
        return output

    # ------------------------------------------------------------------ the schedule
    def _play(self, number: int) -> Any:
        """Do one operation; returns the value that a forward makes."""
        op = self._script.ops[number]
        i = op.index
        if op.code == "N":
            self._values[i + 1] = self._forward(i, number).value
            return self._values[i + 1]
        if op.code == "G":
            self._kept[i] = self._forward(i, number, with_graph=True)
            return self._kept[i].value
        if op.code == "Da":
            self._values.pop(i, None)
            self._empty_if_gone(i)
        elif op.code == "Ds":
            self._kept.pop(i, None)
            self._empty_if_gone(i + 1)
        return None

    def _value(self, number: int) -> Any:
        found = self._values.get(number)
        return self._kept[number - 1].value if found is None else found

    def _forward(self, i: int, number: int, *, with_graph: bool = False) -> Kept:
        """Run a stage; what it returns has an output only where a graph is built."""
        stage, choice = self._stages[i], self._script.choices[number]
        first = newest_node()
        inputs = [self._view(entry) for entry in stage.inputs]
        newest = newest_node()
        packs = choice != AS_IS
        packable: AbstractContextManager[list[Any]] = keeping_little() if packs else nullcontext([])
        with packable as own:
            output, reads = stage.run(inputs, self._names[i], with_graph=with_graph)
        self.forwards[i] += 1
        comparing = with_graph and compares([output], newest)
        value = output.detach().stop_grad()
        packed: list[Packed] = []
        if packs:
            with jt.flag_scope(**stage.call.flags):
                packed = pack_stage(output, inputs, reads, first=first, choice=choice, own=own)
            for kept in packed:  # what follows may not run before
                value = after(value, kept.emptied.done).stop_fuse()
        if self._notes is not None:
            value = self._notes.ended(value, number, self._held())
        if not with_graph:
            return Kept([], [], None, value)
        return Kept(inputs, reads, output, value, comparing, packed=packed)

    def _view(self, entry: Input) -> Any:
        """Return what one pass reads as an input."""
        held = self._value(entry.value or 0) if entry.held is None else entry.held
        return held.detach().start_grad() if entry.wanted else held.detach().stop_grad()

    def _empty_if_gone(self, number: int) -> None:
        """Let a stage that is kept lose its input, where nothing else holds that any more."""
        kept = self._kept.get(number)
        if kept is None or kept.emptied or number in self._values or number - 1 in self._kept:
            return
        if kept.compares:
            notices.warn_input_stays(self._names[number])
            return
        for entry, var in zip(self._stages[number].inputs, kept.inputs, strict=True):
            if entry.value == number and entry.held is None:
                kept.emptied.append(empty(var, kept.output))

    # ------------------------------------------------------------------ backward
    def _backward(self, gradient: Any) -> list[Any]:
        """Play what comes after the loss; returns the gradients of the sources."""
        if self._spent:
            notices.refuse_twice(self._names[-1])
        self._spent = True
        with inside(), jt.flag_scope(no_grad=0, lazy_execution=1):
            delta = gradient.detach().stop_fuse()
            if self._notes is not None:
                delta = self._notes.ended(delta, TAIL, self._held())
            self._deltas[len(self._script)] = delta
            for i in reversed(range(len(self._script))):
                for number in self._script.back[i]:
                    self._play(number)
                self._differentiate(i)
            found = self._chain.results(self._found)
            self._release()
            return refuse_second_derivatives(
                found, [gradient], self._place, notices.refuse_twice_differentiated
            )

    def _differentiate(self, i: int) -> None:
        """Run the backward of a stage."""
        stage, kept, delta = self._stages[i], self._kept.pop(i), self._deltas.pop(i + 1, None)
        targets = [(e, v) for e, v in zip(stage.inputs, kept.inputs, strict=True) if e.wanted]
        read = [(a, v) for a, v in zip(stage.reads, kept.reads, strict=True) if a]
        if delta is not None and (targets or read):
            # Given back before anything waits, or what is waited for could run in between.
            waits = [refill(emptied, self._value(i)) for emptied in kept.emptied]
            remade = {emptied.views[0].var_ptr: self._value(i) for emptied in kept.emptied}
            waits += [kept.value, *give_stage_back(kept.packed, kept.value, remade)]
            kept.emptied, kept.packed = [], []
            for other in waits:
                delta = after(delta, other)
            with jt.flag_scope(no_grad=0, **stage.call.flags):
                found = differentiate(
                    [kept.output], [delta], [v for _, v in (*targets, *read)], gated=False
                )
            places = [self._add(e, g) for (e, _), g in zip(targets, found, strict=False)]
            places += [
                added(self._found, a, g)
                for (a, _), g in zip(read, found[len(targets) :], strict=True)
            ]
            self._end_backward(i, places)
            self.differentiated[i] = True
        stage.call.release()
        stage.inputs = []

    def _add(self, entry: Input, gradient: Any) -> tuple[dict[int, Any], int]:
        if entry.value:
            return added(self._deltas, entry.value, gradient)
        return added(self._found, entry.source, gradient)

    def _end_backward(self, i: int, places: Sequence[tuple[dict[int, Any], int]]) -> None:
        """Note that all gradients of a stage are there; what follows waits for that."""
        if self._notes is None:
            return
        made = [held[key] for held, key in places]
        others = [*made[1:], *self._held()]
        held, key = places[0]
        held[key] = self._notes.ended(made[0], self._script.backward[i], others)

    def _held(self) -> list[Any]:
        """Return what the schedule holds now, beside the first value, which lives anyway.

        What a traced run waits for at the end of an operation, so that values live until they are
        dropped, as the planner counts. Else they go with their last reader, which may come sooner.
        """
        return [value for number, value in self._values.items() if number]

    def _release(self) -> None:
        """Let go of all tensors: Jittor keeps this object until the whole backward has run."""
        for stage in self._stages:
            stage.call.release()
            stage.inputs = []
        self._values, self._kept, self._deltas, self._found = {}, {}, {}, {}
        self._chain.release()
