"""Gradient checkpointing on Jittor: a region is taped as one operation and recomputed in backward.

Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016. Relies on `jt.tape_together` of Jittor 1.3.11, which `jt.Function` is made of.

All stays lazy. A value that is waited for inside the gradient callback would keep every gradient
computed so far, since Jittor's `grad` holds them until it returns. Five things are particular:

* What the function reads beside its inputs is found from the graph that the first pass has built
  and not yet run, so parameters and tensors of closures get their gradients.
* Both passes must not share tensors: Jittor fuses operations that read the same tensor, also across
  passes, and the merged kernel runs when the later pass is ready. The second pass reads zero-copy
  views of what the first one read, which are also the values of the first pass where a parameter
  has been updated in between.
* Buffers (running statistics) are views too in the second pass; what it would write to them is
  dropped unread.
* The incoming gradient is fed to the recomputed output by an operation that passes it on, not
  by (y * g).sum(), and waits for the recomputed output, or backward would be fused into it.
* Random numbers are drawn with seeds (`replay.py`).

Only first derivatives; needs `jt.flags.lazy_execution` (with it off, every tensor is kept anyway).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.errors import CompositionError, RecomputeMismatchError
from xmem_jittor import native, precision, replay
from xmem_jittor.graph import handles_of, newest_node, reached, read_by, swapped
from xmem_jittor.nested import fill, modules_behind, take_apart
from xmem_jittor.regions import Feed

_KEPT_FLAGS = ("auto_mixed_precision_level", "amp_reg")


class Checkpoint:
    """Recompute instead of keeping; see `xmem.protocols.Checkpoint`."""

    def __init__(self) -> None:
        self.gaps: Mapping[str, str] = {
            "second derivatives": "a region gives its inputs back when it is differentiated",
        }
        native.graph()  # compiled now, not inside the first step

    def checkpoint(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        preserve_rng: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Call a function and keep only its inputs; under `jt.no_grad` this is a plain call."""
        if jt.flags.no_grad:
            return function(*args, **kwargs)
        return _Region(function, preserve_rng=preserve_rng).first_pass(args, kwargs)

    def is_module(self, value: Any) -> bool:
        """Say whether a value is a jt.Module."""
        return isinstance(value, jt.Module)

    def children(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the direct submodules with their names."""
        held = module.layers if isinstance(module, jt.nn.Sequential) else module.__dict__
        return [(name, child) for name, child in held.items() if isinstance(child, jt.Module)]

    def is_container(self, module: Any) -> bool:
        """Sequential, which `nn.ModuleList` is another name of."""
        return isinstance(module, jt.nn.Sequential)

    def replace_forward(
        self, module: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[[], None]:
        """Set an instance attribute `execute`, which `Module.__call__` finds first."""
        before = module.__dict__.get("execute")
        module.execute = wrap(module.execute)

        def undo() -> None:
            if before is None:
                module.__dict__.pop("execute", None)
            else:
                module.execute = before

        return undo


@dataclass
class _Read:
    """A tensor that the function reads beside its inputs.

    Attributes:
        handles: the Python objects that hold it.
        value: a view of it as the first pass read it.
        trained: gradients are asked for.
    """

    handles: list[Any]
    value: Any
    trained: bool


class _Region:
    """One call of a checkpointed function."""

    def __init__(self, function: Callable[..., Any], *, preserve_rng: bool) -> None:
        self._function = function
        self._preserve_rng = preserve_rng
        self._buffers = [
            p for m in modules_behind(function) for p in m.parameters() if p.is_stop_grad()
        ]
        self._flags = {name: getattr(jt.flags, name) for name in _KEPT_FLAGS}
        self._precision = precision.capture()
        self._seeds: list[int] = []
        self._reads: list[_Read] = []
        self._outputs = 0
        self._spent = False

    def first_pass(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function without a graph and tape what it did as one operation."""
        inputs: list[Any] = []
        self._template = take_apart((tuple(args), dict(kwargs)), inputs)
        self._differentiable = [v.dtype.is_float() and not v.is_stop_grad() for v in inputs]
        self._inputs = [
            v.detach() if wanted else v.detach().stop_grad()
            for v, wanted in zip(inputs, self._differentiable, strict=True)
        ]
        newest = newest_node()
        with jt.flag_scope(no_grad=1), self._recording() as self._seeds:
            result = self._call(self._inputs)
        outputs: list[Any] = []
        template = take_apart(result, outputs)
        self._outputs = len(outputs)
        self._reads = self._find_reads(outputs, newest)
        sources = [v for v, wanted in zip(inputs, self._differentiable, strict=True) if wanted]
        sources += [read.handles[0] for read in self._reads if read.trained]
        if sources:
            outputs = self._tape(sources, outputs, newest)
        return fill(template, outputs)

    def _call(self, inputs: Sequence[Any]) -> Any:
        args, kwargs = fill(self._template, inputs)
        return self._function(*args, **kwargs)

    def _recording(self) -> Any:
        return replay.recorded() if self._preserve_rng else nullcontext([])

    def _find_reads(self, outputs: Sequence[Any], newest: int) -> list[_Read]:
        """Return what the function read beside its inputs, in a fixed order."""
        found, executed = read_by(outputs, newest, self._inputs)
        if executed:
            # Somebody waited for a value in the first pass, which forgets its graph then; a graph
            # with gradients does not.
            with self._recording(), swapped(self._buffers, _thrown_away(self._buffers)):
                views = self._views()
                newest = newest_node()
                again: list[Any] = []
                take_apart(self._call(views), again)
                found, _ = read_by(again, newest, views)
        reads = []
        for handles in handles_of(found):
            var = handles[0]
            trained = var.dtype.is_float() and not var.is_stop_grad()
            reads.append(_Read(handles, var.detach(), trained))
        return reads

    def _tape(self, sources: list[Any], outputs: list[Any], newest: int) -> list[Any]:
        """Let gradients of the outputs come to `backward`; returns the outputs to hand out."""
        taped = []
        for index, output in enumerate(outputs):
            if output.dtype.is_float():
                # What the function only passes on is not its own to tape.
                own = output.detach() if output.id <= newest else output.stop_fuse()
                outputs[index] = own.tape()
                taped.append(outputs[index])
        if taped:
            jt.tape_together([v.tape() for v in sources], taped, self.backward)
        return outputs

    def _views(self) -> list[Any]:
        return [
            v.detach().start_grad() if wanted else v
            for v, wanted in zip(self._inputs, self._differentiable, strict=True)
        ]

    def backward(self, *gradients: Any) -> list[Any]:
        """Run the function again, with a graph, and differentiate it.

        Args:
            gradients: of the floating-point outputs; None where there is none.
        """
        if self._spent:
            raise CompositionError(
                "gradients were asked for twice through one checkpointed region. It gives its"
                " inputs back in the first backward; compute the loss again, or call jt.grad once"
                " for all targets."
            )
        inputs = self._views()
        values = [
            read.value.detach().start_grad() if read.trained else read.value.detach().stop_grad()
            for read in self._reads
        ]
        targets = [v for v, wanted in zip(inputs, self._differentiable, strict=True) if wanted]
        targets += [v for v, read in zip(values, self._reads, strict=True) if read.trained]
        with jt.flag_scope(no_grad=0, **self._flags):
            outputs = self._second_pass(inputs, values)
            self._release()
            return _differentiate(outputs, gradients, targets)

    def _release(self) -> None:
        """Let go of all tensors: Jittor keeps this object until the whole backward has run."""
        self._spent = True
        self._inputs, self._reads, self._buffers, self._template = [], [], [], None

    def _second_pass(self, inputs: list[Any], values: list[Any]) -> list[Any]:
        """Return the floating-point outputs, recomputed from views of what the first pass read."""
        handles = [handle for read in self._reads for handle in read.handles]
        views = [
            jt.wrap_var_addr(value.var_ptr)
            for read, value in zip(self._reads, values, strict=True)
            for _ in read.handles
        ]
        known = {id(handle) for handle in handles}
        buffers = [b for b in self._buffers if id(b) not in known]
        outputs: list[Any] = []
        with ExitStack() as stack:
            if self._preserve_rng:
                stack.enter_context(replay.replayed(self._seeds))
            stack.enter_context(self._precision())
            stack.enter_context(swapped(handles, views))
            stack.enter_context(swapped(buffers, _thrown_away(buffers)))
            take_apart(self._call(inputs), outputs)
            # A handle that is an output gets its own tensor back at the end of this block.
            outputs = [jt.wrap_var_addr(v.var_ptr) if id(v) in known else v for v in outputs]
        if len(outputs) != self._outputs:
            raise RecomputeMismatchError(
                f"a checkpointed region returned {self._outputs} tensors in forward and"
                f" {len(outputs)} when it was recomputed"
            )
        return [v for v in outputs if v.dtype.is_float()]


def _differentiate(outputs: list[Any], gradients: Sequence[Any], targets: list[Any]) -> list[Any]:
    """Return the gradients of the targets; None where nothing flows."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and not output.is_stop_grad()
    ]
    for output, gradient in pairs:
        if tuple(output.shape) != tuple(gradient.shape):
            raise RecomputeMismatchError(
                f"a checkpointed region returned shape {tuple(gradient.shape)} in forward and"
                f" {tuple(output.shape)} when it was recomputed"
            )
    flowing = reached([output for output, _ in pairs], targets)
    wanted = [target for target, flows in zip(targets, flowing, strict=True) if flows]
    if not wanted:
        return [None] * len(targets)
    feed = Feed([_gate(gradient, output) for output, gradient in pairs])
    loss = feed(*(output for output, _ in pairs))
    found = iter(jt.grad(loss, wanted, retain_graph=False))
    return [next(found).stop_fuse() if flows else None for flows in flowing]


def _thrown_away(buffers: Sequence[Any]) -> list[Any]:
    """Return views that updates may go to, to be dropped unread."""
    return [b.detach().stop_grad() for b in buffers]


def _gate(gradient: Any, recomputed: Any) -> Any:
    """Return the gradient, in the same memory, after an output has been recomputed."""
    return jt.code(
        inputs=[gradient, recomputed.detach()],
        outputs=[gradient],
        cpu_src="(void)0;",
        cuda_src="(void)0;",
    )[0]
