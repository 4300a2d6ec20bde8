"""This rank's stage of a pipeline, on Jittor (1.3.11): one lazy graph for a whole step.

Forwards and backwards of all micro-batches, what is sent and received, and where one waits until
something has arrived are operations, made in the order of `xmem.distributed.schedules` and executed
in it: all messages pass one chain (`messages`), and a forward that needs none begins at the chain's
end. Memory goes as the order lets it: 14 MiB instead of 49 with 8 micro-batches on 2 stages.

Each pass reads views of the parameters of its own; Jittor would fuse operations of different
micro-batches that read the same tensor, and run them when the last of them is ready.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.distributed.counting import note
from xmem.distributed.schedules import order
from xmem.distributed.stage_errors import StageError, computing
from xmem.distributing import Schedule
from xmem.errors import CompositionError, UsageError
from xmem_jittor import gradients, halves, messages, methods, ranks, shares
from xmem_jittor.data_parallel import is_parallel
from xmem_jittor.differentiate import differentiate
from xmem_jittor.reach import Reach
from xmem_jittor.views import OwnViews

# Shapes of few kinds of batches are remembered: of the whole batch and of a smaller last one.
_KINDS = 8


@dataclass(frozen=True)
class _Form:
    """What travels between two stages.

    Attributes:
        shape: of one micro-batch's activation, and of its gradient.
        dtype: of the activation.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def gradient_dtype(self) -> str:
        """Return the type of the gradient; on a CPU gradients of halves are float32."""
        return self.dtype if jt.flags.use_cuda or "16" not in self.dtype else "float32"


@dataclass
class _Passed:
    """A micro-batch between its forward and its backward.

    Attributes:
        output: of the stage, or the loss.
        inputs: what gradients are asked for: the input, if it came from another stage, and views of
            the parameters.
    """

    output: Any
    inputs: list[Any]


class Run:
    """See `xmem.distributing.PipelineRun`."""

    def __init__(self, stage: Any, micro_batches: int, schedule: Schedule, loss_fn: Any) -> None:
        self.module = stage
        self._micro_batches = micro_batches
        self._loss_fn = loss_fn
        self._rank, self._size = ranks.rank(), ranks.size()
        self._works = order(schedule, self._rank, stages=self._size, micro_batches=micro_batches)
        self._forms: dict[str, tuple[_Form | None, _Form | None]] = {}
        if self._size > 1:
            _mark(stage)
            methods.hold(stage)

    def step(self, inputs: Any, targets: Any, optimizer: Any, *, key: str) -> float | None:
        """Build all of it, then let it run at once."""
        if jt.flags.no_grad:
            raise UsageError("Pipeline.step trains: call it outside of jt.no_grad()")
        with computing():
            step = _Step(self, inputs, targets, optimizer)
        before = self._forms.get(key)
        if before is None:
            before = self._learnt(step)
            if len(self._forms) >= _KINDS:
                self._forms.pop(next(iter(self._forms)))
            self._forms[key] = before
        step.received, step.sent = before
        with computing():
            for work in self._works:
                step.do(work.kind, work.micro_batch)
            step.hand_over()
        return step.run()

    def _learnt(self, step: _Step) -> tuple[_Form | None, _Form | None]:
        """Let each stage build the first forward, and tell the next what it gives.

        That forward is the step's own, made early: it leaves the same traces once.
        """
        sent: _Form | None = None
        for rank in range(self._size - 1):
            mine = b""
            if rank == self._rank:
                with computing():
                    step.do("forward", 0)
                    sent = step.sent = step.form()
                    mine = json.dumps([sent.shape, sent.dtype]).encode()
            told = ranks.exchange(mine)[rank]
            if rank == self._rank - 1:
                shape, dtype = json.loads(told)
                step.received = _Form(tuple(shape), dtype)
        return step.received, sent


class _Step:
    """One step being built.

    Attributes:
        received: what comes from the stage before.
        sent: what goes to the stage after.
    """

    def __init__(self, run: Run, inputs: Any, targets: Any, optimizer: Any) -> None:
        self.received: _Form | None = None
        self.sent: _Form | None = None
        self._module, self._loss_fn = run.module, run._loss_fn
        self._rank, self._last = run._rank, run._size - 1
        self._parts, self._size = run._micro_batches, run._size
        self._inputs, self._targets = inputs, targets
        self._optimizer = optimizer
        reach = Reach.of(run.module)
        self._buffers = reach.buffers
        distinct = {p.var_ptr: p for p in reach.parameters}
        self._parameters = list(distinct.values())
        self._wanted = _wanted(optimizer, self._parameters)
        jt.sync([*self._parameters, *self._buffers])  # updates that wait would run inside the step
        self._summed: list[Any] = [None] * len(self._parameters)
        self._passed: dict[int, _Passed] = {}
        self._sending: dict[tuple[str, int], Any] = {}
        self._losses: list[Any] = []

    def do(self, kind: str, number: int) -> None:
        """Build one work of the schedule; the first forward may be there already."""
        if kind == "forward" and number not in self._passed:
            self._forward(number)
        elif kind == "backward":
            self._backward(number)
        elif kind.endswith("_sent"):
            messages.wait(self._sending.pop((kind, number)))

    def form(self) -> _Form:
        """Return what the first micro-batch's output is."""
        return _form_of(self._passed[0].output)

    def _forward(self, number: int) -> None:
        own = OwnViews(self._parameters)
        targets = own.views
        if self._rank == 0:
            x = messages.gate(_part(self._inputs, number, self._parts), messages.token())
        else:
            assert self.received is not None
            received = messages.receive(self.received.shape, self.received.dtype, self._rank - 1)
            x = received.detach()  # which asks for gradients; `start_grad` would make it a scalar
            targets = [x, *targets]
        with own:
            output = self._module(x)
            _check_output(output, self._rank)
            output = own.of(output).stop_fuse()
            if self._rank == self._last:
                target = _part(self._targets, number, self._parts)
                output = self._loss_fn(output, target) / self._parts
        self._passed[number] = _Passed(output, targets)
        if self._rank == self._last:
            self._losses.append(output.detach().stop_fuse())
            return
        if self.sent is not None and _form_of(output) != self.sent:
            raise UsageError(
                f"stage {self._rank} returned {self.sent} for one micro-batch and"
                f" {_form_of(output)} for another of the same kind: what stages hand on has one"
                " shape for batches of one shape"
            )
        self._send("output_sent", number, output.detach(), self._rank + 1)

    def _send(self, kind: str, number: int, tensor: Any, target: int) -> None:
        self._sending[kind, number] = messages.send(tensor, target)
        note("send", tensor.nbytes, self._size)

    def _backward(self, number: int) -> None:
        passed = self._passed.pop(number)
        output = passed.output
        if self._rank == self._last:
            gradient = jt.ones(output.shape, output.dtype)
        else:
            assert self.sent is not None
            dtype = self.sent.gradient_dtype
            gradient = messages.receive(self.sent.shape, dtype, self._rank + 1)
        found = differentiate([output], [gradient], passed.inputs, gated=True)
        del output, gradient, passed
        if self._rank > 0:
            assert self.received is not None
            dtype = self.received.gradient_dtype
            self._send("gradient_sent", number, halves.cast(found.pop(0), dtype), self._rank - 1)
        with jt.flag_scope(node_order=1):  # each when it is there, and not all after the last one
            for i in self._wanted:
                before = self._summed[i]
                self._summed[i] = found[i] if before is None else (before + found[i]).stop_fuse()

    def hand_over(self) -> None:
        """Give the optimizer its gradients, as its own backward would."""
        optimizer = self._optimizer
        adds = gradients.are_new(optimizer)
        gradients.note_count(optimizer)
        if not adds:
            optimizer.n_step += 1
        found = {
            parameter.var_ptr: gradient.stop_grad()
            for parameter, gradient in zip(self._parameters, self._summed, strict=True)
            if gradient is not None
        }
        self._summed = []
        gradients.make_room(optimizer)
        for group in optimizer.param_groups:
            for parameter, held in zip(group["params"], group["grads"], strict=True):
                gradient = found.get(parameter.var_ptr)
                if gradient is not None:
                    held.update(gradient + held if adds else gradient)
        optimizer._Optimizer__zero_grad = False

    def run(self) -> float | None:
        """Execute the step; returns the mean loss, on the last stage."""
        held = [g for group in self._optimizer.param_groups for g in group["grads"]]
        try:
            jt.sync([*held, *self._buffers, *self._losses, messages.token()])
        except RuntimeError as error:
            failure = ranks.last_failure()
            if failure is None:
                raise StageError(error) from error
            raise failure.error() from error
        if self._rank < self._last:
            return None
        return sum(float(loss.item()) for loss in self._losses)


def _form_of(tensor: Any) -> _Form:
    return _Form(tuple(tensor.shape), str(tensor.dtype))


def _part(whole: Any, number: int, parts: int) -> Any:
    """Return a micro-batch, without a copy."""
    shape = (whole.shape[0] // parts, *whole.shape[1:])
    return messages.view(whole, shape, number * (whole.numel() // parts))


def _check_output(output: Any, rank: int) -> None:
    if isinstance(output, jt.Var) and output.dtype.is_float():
        return
    kind = f"{output.dtype}" if isinstance(output, jt.Var) else type(output).__name__
    raise UsageError(
        f"stage {rank} returns {kind}: a stage hands on one tensor of floats. Concatenate several,"
        " or cut the model elsewhere"
    )


def _wanted(optimizer: Any, parameters: Sequence[Any]) -> list[int]:
    """Return the numbers of the stage's parameters that the optimizer trains.

    Raises:
        UsageError: it trains others, or none.
    """
    trained = [p for g in optimizer.param_groups for p in g["params"] if not p.is_stop_grad()]
    given = {p.var_ptr for p in trained}
    strange = given - {p.var_ptr for p in parameters}
    if strange or not given:
        raise UsageError(
            f"{len(strange)} of the optimizer's {len(given)} trained parameters are not those of"
            " this rank's stage. Give the optimizer of Pipeline.module.parameters()"
        )
    return [i for i, p in enumerate(parameters) if p.var_ptr in given]


def _mark(stage: Any) -> None:
    """Note that the ranks have different parameters: nothing is averaged, norms are summed."""
    parameters = stage.parameters()
    if is_parallel(stage) or shares.kinds(parameters):
        raise CompositionError(
            f"{type(stage).__name__} is data-parallel or shared out over the ranks, and a pipeline"
            " has another stage on each rank. Give the plain stage"
        )
    for parameter in parameters:
        shape = tuple(parameter.shape)
        shares.mark(parameter, shares.Share("part", shape, str(parameter.dtype)))
