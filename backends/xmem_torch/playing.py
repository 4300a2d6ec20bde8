"""Playing a plan on one autograd graph (PyTorch 2.13).

The model's own graph is built once. Its nodes hold numbers in the place of tensors
(`stages.py`); when the gradient of a stage's output is complete, which a prehook on its node says
(`torch.autograd.graph.Node.register_prehook`), what the plan puts there is done, and the engine
goes on through the stage's part of the graph. Nothing is inserted into the graph, so views,
operations in place and gradients of whatever else a stage reads are PyTorch's own business.

Relies on the engine running, of the nodes that are ready, the one made last, so that stages are
differentiated in reverse order. Where they are not (a model that leaves a stage out, a loss on a
value in between), what is missing is computed from the nearest value that is held.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from xmem.containers import leaves
from xmem.deferred import settled
from xmem.errors import CompositionError, XmemWarning
from xmem.playing import Script
from xmem.records import TAIL, Mark, Recompute
from xmem.saving import Choice
from xmem.stage_options import AS_IS
from xmem_torch.between import Between
from xmem_torch.inputs import Inputs
from xmem_torch.local_parts import refuse_sharded
from xmem_torch.marks import Marks, NoMarks
from xmem_torch.stages import PlainCall, StageCall, differentiated_inside
from xmem_torch.tensors import bytes_of
from xmem_torch.values import Places, Value


class PlanRun:
    """One forward pass of a planned model, and its backward; see `xmem.playing.PlanRun`.

    The graph holds the run, so the run holds nothing of the graph.

    Args:
        script: what is played.
        names: what errors call the stages.
        how: what is replayed.
        marks: notes what operations take.
    """

    def __init__(
        self, script: Script, names: Sequence[str], how: Recompute, marks: Marks | NoMarks
    ) -> None:
        self.value_bytes: list[int] = []
        self.reads: list[tuple[int, int]] = []
        self.forwards = [0] * len(script)
        self.differentiated = [False] * len(script)
        self.holds = False
        self._script = script
        self._names = names
        self._how = how
        self._marks = marks
        again = [k for part in (*(s[1:] for s in script.sweep), *script.back) for k in part]
        self._rerun = {script.ops[k].index for k in again if script.ops[k].code in "NG"}
        self._calls: list[StageCall | PlainCall] = []
        self._between = Between()
        self._places = Places()  # of the values that the model itself is given
        self._next = len(script) - 1  # the stage to be differentiated next
        self._task = -1
        self._graph_kept = False
        self._cut_short = False

    @torch.compiler.disable
    def first(
        self,
        stage: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run it under hooks on what it saves, if the plan does anything but keep it."""
        if stage != len(self._calls):
            raise CompositionError(
                f"stage {self._names[stage]!r} is called as number {len(self._calls)} of its"
                f" forward pass, and planned as number {stage}"
            )
        refuse_sharded(getattr(function, "__self__", None), "A plan")
        args, kwargs = settled(args), settled(kwargs)
        tensors = leaves((args, kwargs), torch.Tensor)
        if stage == 0:
            self._begin(tensors)
        others = self._other_values(stage, tensors)
        self.reads += [(j, stage) for j in others]
        number, *following = self._script.sweep[stage]
        keep = self._script.ops[number].code == "G"
        if stage in self._script.undisturbed and not others:
            self._calls.append(PlainCall(self._names[stage]))
            with self._marks.around(number):
                output = settled(function(*args, **kwargs))
        else:
            output = self._hooked(stage, function, args, kwargs, keep=keep)
        self.forwards[stage] += 1
        self._take_over(stage, leaves(output, torch.Tensor), keep=keep)
        del args, kwargs, tensors  # what follows may drop them
        for number in following:
            self._do(number)
        if stage == len(self._script) - 1:
            self._marks.begin(TAIL)
        return output

    def _hooked(
        self,
        stage: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        keep: bool,
    ) -> Any:
        inputs = Inputs(args, kwargs)
        places, numbers = self._places, self._script.there[stage] | {stage}
        inputs.find(places, numbers, hold=stage in self._rerun)
        how = replace(self._how, name=self._names[stage])
        call = StageCall(stage, function, inputs, how)
        self._calls.append(call)
        first = self._script.sweep[stage][0]
        return call.first_pass(
            args,
            kwargs,
            places,
            keep=keep,
            choice=self._script.choices[first],
            recall=self._recall,
            around=self._marks.around(first),
        )

    def marks(self) -> list[Mark]:
        """Return the marks, empty ones of what did not run: a stage that no gradient comes to."""
        return self._marks.complete()

    def _begin(self, tensors: Sequence[torch.Tensor]) -> None:
        self._between.put(0, Value(tensors[:1]))
        self._places.add(0, tensors[:1])
        self.value_bytes.append(bytes_of(tensors[:1]))
        self._marks.head()
        if tensors and tensors[0].grad_fn is not None:
            marks = self._marks
            tensors[0].grad_fn.register_prehook(lambda _: marks.chain_ended())

    def _other_values(self, stage: int, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the values that a stage reads beside the one before it."""
        parts = [self._places.unchanged(tensor, range(1, stage + 1)) for tensor in tensors]
        numbers = dict.fromkeys(part.number for part in parts if part is not None)
        return [j for j in numbers if j != stage]

    def _take_over(self, stage: int, tensors: list[torch.Tensor], *, keep: bool) -> None:
        """Hold a stage's output as the plan says, and learn of its gradient."""
        self._between.put(stage + 1, Value(tensors), keep=keep)
        self.value_bytes.append(bytes_of(tensors))
        self._places.add(stage + 1, tensors)
        self.holds = any(tensor.grad_fn is not None for tensor in tensors)
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self._gradient_came(stage))

    # ------------------------------------------------------------------ operations
    def _do(self, number: int) -> None:
        """Do one operation that is no stage's first forward and no backward."""
        op = self._script.ops[number]
        if op.code == "Da":
            self._between.drop([op.index])
        elif op.code == "Ds":
            self._drop_kept(op.index)
        elif op.code in "NG":
            choice = self._script.choices[number]
            around = self._marks.around(number)
            self._run_again(op.index, keep=op.code == "G", around=around, choice=choice)

    def _run_again(
        self,
        stage: int,
        *,
        keep: bool,
        around: AbstractContextManager[Any],
        choice: Choice = AS_IS,
    ) -> None:
        call = self._calls[stage]
        values = {j: self._held(j) for j in call.reads}
        made = call.second_pass(values, keep=keep, around=around, choice=choice)
        self.forwards[stage] += 1
        self._between.put(stage + 1, made, keep=keep)

    def _held(self, j: int) -> Value:
        """Return a value, which is computed from the nearest one that is held if it is not."""
        value = self._between.get(j)
        if value is not None:
            return value
        nearest = self._between.nearest(j)
        if nearest < 0:
            raise CompositionError(
                f"{self._names[j]!r} is differentiated a second time, and its plan has given up all"
                " that it came from. Call backward with retain_graph=True the first time."
            )
        made: set[int] = set()
        for stage in range(nearest, j):
            self._run_again(stage, keep=False, around=nullcontext())
            made.add(stage + 1)
            later = {k for call in self._calls[stage + 1 : j] for k in call.reads} | {j}
            self._between.drop(made - later)
            made &= later
        value = self._between.get(j)
        assert value is not None
        return value

    def _drop_kept(self, stage: int) -> None:
        self._calls[stage].kept = None
        self._between.drop_output(stage)

    # ------------------------------------------------------------------ backward
    def _gradient_came(self, stage: int) -> None:
        """Do what comes before the backward of a stage, whose output's gradient is complete."""
        self.differentiated[stage] = True
        self._watch_end()
        if stage > self._next:
            return  # once more, through another of its outputs or in a second backward
        last, self._next = self._next, stage - 1
        if last == len(self._script) - 1:
            self._check_sweep()
        for k in range(last, stage - 1, -1):
            self._finish(k + 1)
            if k == last:
                self._marks.end()
            for number in () if self._cut_short else self._script.back[k]:
                self._do(number)
        if self._calls[stage].kept is None:
            self._run_again(stage, keep=True, around=nullcontext())
        self._marks.begin(self._script.backward[stage])
        if not self._retains(stage):
            self._between.drop_output(stage)

    def _check_sweep(self) -> None:
        called, planned = len(self._calls), len(self._script)
        self._cut_short = called < planned
        if self._cut_short:
            warnings.warn(
                f"the forward pass called {called} of {planned} planned stages before backward"
                " began, so the plan cannot be followed: what was not kept is computed again from"
                " the nearest value that is held. Plan the model as it is trained.",
                XmemWarning,
                stacklevel=2,
            )

    def _retains(self, stage: int) -> bool:
        """Say whether a stage keeps for one more backward what it kept from the first."""
        return _graph_is_kept() and stage not in self._rerun

    def _finish(self, stage: int) -> None:
        """Let go of what a stage has been differentiated with."""
        if stage >= len(self._calls):
            return
        if not self._retains(stage):
            self._drop_kept(stage)
        if not _graph_is_kept():
            self._calls[stage].release()
        if self._cut_short:
            self._between.drop([stage + 1])

    def _recall(self, saved: tuple[int, int]) -> torch.Tensor:
        """Return a saved tensor to the engine."""
        stage, index = saved
        call = self._calls[stage]
        assert isinstance(call, StageCall)
        inside = torch._C._current_graph_task_id() != -1
        if call.running:
            if not call.there(index):
                raise differentiated_inside(call.name)
            number = call.value_of(index)
            value = None if number is None else self._between.get(number)
            return call.take(index, value, give_up=False)
        if inside:
            self._gradient_came(stage)
        if not call.there(index):
            self._restore(stage)
        number = call.value_of(index)
        value = None if number is None else self._held(number)
        return call.take(index, value, give_up=inside and not self._retains(stage))

    def _restore(self, stage: int) -> None:
        """Make a stage kept that has been differentiated before: by the next backward."""
        for k, call in enumerate(self._calls[stage + 1 :], stage + 1):
            if not self._retains(k):
                call.kept = None
                self._between.drop_output(k)
            self._between.drop([k])
        self._run_again(stage, keep=True, around=nullcontext())
        if not self._retains(stage):
            self._between.drop_output(stage)

    def _watch_end(self) -> None:
        """Learn of the end of the backward that is under way."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task, self._graph_kept = task, _graph_is_kept()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._task = -1
        self._marks.chain_ended()  # if it does not begin with a gradient's node
        if self._next < 0 and not self._graph_kept:
            for call in self._calls:
                call.release()
            self._between.clear()


def _graph_is_kept() -> bool:
    """Say whether the backward that is under way leaves its graph for another one."""
    inside = torch._C._current_graph_task_id() != -1
    kept: bool = inside and torch._C._autograd._get_current_graph_task_keep_graph()
    return kept
