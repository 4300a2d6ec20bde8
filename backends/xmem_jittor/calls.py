"""One call of a function, made several times: what the first pass leaves for the others.

* What the function reads beside its inputs is found from the graph that the first pass has built
  and not yet run, so parameters and tensors of closures get their gradients.
* Both passes must not share tensors: Jittor fuses operations that read the same tensor, also across
  passes, and the merged kernel runs when the later pass is ready. The second pass reads zero-copy
  views of what the first one read, which are also the values of the first pass where a parameter
  has been updated in between. Only writes into raw memory (`x.data[...] = `) cannot be seen.
* A first pass may read views, too, where more than two are made (`own_views`): of the parameters of
  the modules it reaches. Of what it finds elsewhere (closures) it reads the tensors themselves.
* Buffers (running statistics) are views too in the second pass, of what they were before the first;
  what the second pass writes to them is dropped unread.
* Random numbers of Jittor are drawn with seeds (`replay.py`), those of Python and NumPy by setting
  the streams back, also generators that the function or its modules hold.
* Training flags and the precision in force are those of the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.containers import fill, snapshot, take_apart, unchanged
from xmem.errors import CompositionError, RecomputeMismatchError
from xmem.kept import Found, Kept
from xmem.mismatch import as_they_were, differs, function_name, mismatch, sample_step
from xmem.randomness import Streams, stream_kinds
from xmem.records import Recompute
from xmem_jittor import notices, precision, replay
from xmem_jittor.graph import depends, draws, handles_of, may_depend, newest_node, read_by, swapped
from xmem_jittor.reach import Reach
from xmem_jittor.views import OwnViews

Facts = tuple[tuple[int, ...], str]
"""The shape and the type of a tensor."""

_KEPT_FLAGS = ("auto_mixed_precision_level", "amp_reg")


_depth = 0


@contextmanager
def _called() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def running() -> bool:
    """Say whether a call is being made."""
    return _depth > 0


def flags_in_force() -> dict[str, int]:
    """Return Jittor's flags that change what an operation computes."""
    return {name: getattr(jt.flags, name) for name in _KEPT_FLAGS}


@dataclass
class Read:
    """A tensor that the function reads beside its inputs.

    Attributes:
        handles: the Python objects that hold it.
        value: a view of it as the first pass read it.
        trained: gradients are asked for.
    """

    handles: list[Any]
    value: Any
    trained: bool


class Call:
    """One call of a function in a region.

    Attributes:
        reads: what it reads beside its inputs, in a fixed order; known after the first pass.
        seen: what a first pass with a graph has read in their place, until it is taken.
        flags: of Jittor, in the first pass.
        name: what errors call it.
    """

    def __init__(self, function: Callable[..., Any], template: Any, how: Recompute) -> None:
        self._function = function
        self._template = template
        self._how = how
        self.name = how.name or function_name(function)
        reach = Reach.of(function)
        self._parameters = reach.parameters
        self._training = [(m, getattr(m, "is_train", True)) for m in reach.modules]
        self._buffers = [(buffer, _handle(buffer)) for buffer in reach.buffers]
        self._kept = Kept((function, template), reach.modules, jt.Var, forward="execute")
        self._precision = precision.capture()
        self._streams = Streams(reach.streams, stream_kinds()) if how.preserve_rng else None
        self._seeds: list[int] = []
        self._facts: list[Facts] = []
        self._samples: list[Any] = []
        self.flags = flags_in_force()
        self.reads: list[Read] = []
        self.seen: list[Any] = []

    def _call(self, inputs: Sequence[Any]) -> Any:
        args, kwargs = fill(snapshot(self._template), inputs)
        given = snapshot(args), snapshot(kwargs)
        with _called():
            result = self._function(*args, **kwargs)
        if not (unchanged(args, given[0]) and unchanged(kwargs, given[1])):
            notices.refuse_filled_containers(self.name)
        return result

    def first_pass(
        self, inputs: Sequence[Any], *, own_views: bool = False, with_graph: bool = False
    ) -> tuple[Any, list[Any]]:
        """Run the function; returns its result's template and tensors.

        Args:
            inputs: for this pass alone.
            own_views: read views of the parameters of the modules that the function reaches.
            with_graph: build a graph, which ends at `inputs` and `seen`.
        """
        recording: AbstractContextManager[list[int]] = nullcontext([])
        if self._how.preserve_rng:
            recording = replay.recorded()
        no_grad = int(not with_graph)
        with OwnViews(self._parameters if own_views else []) as own:
            newest = newest_node()
            with jt.flag_scope(no_grad=no_grad), recording as self._seeds:
                result = self._call(inputs)
        kept = self._kept.ran()
        if self._streams is not None:
            self._streams.first_pass_ended()
        self._buffers = [
            (buffer, before if buffer.id != before.id else None) for buffer, before in self._buffers
        ]
        outputs: list[Any] = []
        template = take_apart(result, jt.Var, outputs)
        outputs = [own.of(output) for output in outputs]
        self._facts = [_facts(output) for output in outputs]
        self._find_reads(outputs, newest, inputs, own, with_graph=with_graph)
        if kept and with_graph:
            self._tell_of_kept(newest, inputs)
        elif kept:
            self._judge(kept, newest, inputs)
        if self._how.check_values:
            self._samples = [_sample(output) for output in outputs]
        return template, outputs

    def _judge(self, kept: Sequence[Found], newest: int, inputs: Sequence[Any]) -> None:
        """Warn of variables and attributes with tensors of the first pass; refuse containers."""
        given = {id(v) for v in inputs}
        new = [f for f in kept if f.leaf.id > newest or id(f.leaf) in given]
        new = [f for f in new if f.leaf.dtype.is_float() and not notices.told_of(f)]
        if not any(may_depend(f.leaf, newest) for f in new):
            return
        with self._tried(inputs) as (_, views, newest):
            self._tell_of_kept(newest, views)

    def _tell_of_kept(self, newest: int, inputs: Sequence[Any]) -> None:
        for found in self._kept.found():
            if found.leaf.dtype.is_float() and depends(found.leaf, newest, inputs):
                notices.tell_of_kept(self.name, found)

    @contextmanager
    def _tried(self, inputs: Sequence[Any]) -> Iterator[tuple[list[Any], list[Any], int]]:
        """Call the function once more, with gradients, without a trace after the block.

        Yields the tensors it returns, those it is given, and the newest node before.
        """
        with self._as_it_was():
            views = [v.detach() if v.is_stop_grad() else v.detach().start_grad() for v in inputs]
            newest = newest_node()
            outputs: list[Any] = []
            take_apart(self._call(views), jt.Var, outputs)
            yield outputs, views, newest

    def _find_reads(
        self,
        outputs: list[Any],
        newest: int,
        inputs: Sequence[Any],
        own: OwnViews,
        *,
        with_graph: bool,
    ) -> None:
        """Find what the function read beside its inputs."""
        found, executed = read_by(outputs, newest, inputs)
        if executed and not with_graph:
            # Somebody waited for a value in the first pass, which forgets its graph then; a graph
            # with gradients does not.
            with self._tried(inputs) as (outputs, views, newest):
                found, _ = read_by(outputs, newest, views)
        if self._how.preserve_rng and draws(outputs, newest):
            raise CompositionError(f"{self.name!r} cannot be recomputed: {replay.NOT_REPLAYED}")
        for address, handles in zip(found, handles_of(found), strict=True):
            read = own.handles(address) or handles
            var = read[0]
            trained = var.dtype.is_float() and not var.is_stop_grad()
            self.reads.append(Read(read, var.detach(), trained))
            if with_graph:
                self.seen.append(jt.wrap_var_addr(address))

    @contextmanager
    def _as_it_was(self, handles: Sequence[Any] = (), views: Sequence[Any] = ()) -> Iterator[None]:
        """Let a block run in the state of the first pass, and leave no trace."""
        known = {id(handle) for handle in handles}
        buffers = [pair for pair in self._buffers if id(pair[0]) not in known]
        # Views that updates may go to, to be dropped unread.
        thrown_away = [
            (buffer if before is None else before).detach().stop_grad()
            for buffer, before in buffers
        ]
        training = [(m, was) for m, was in self._training if hasattr(m, "is_train")]
        with ExitStack() as stack:
            remaining = stack.enter_context(self._replayed())
            if self._streams is not None:
                stack.enter_context(self._streams.replayed())
            stack.enter_context(as_they_were(training, "is_train"))
            stack.enter_context(self._precision())
            stack.enter_context(self._kept.as_it_was())
            stack.enter_context(swapped(handles, views))
            stack.enter_context(swapped([buffer for buffer, _ in buffers], thrown_away))
            try:
                yield
            except replay.TooManyDraws:
                what = f"it draws more random tensors than the {len(self._seeds)} of the first pass"
                raise mismatch(self.name, what, self._cause("randomness")) from None
            if remaining:
                drawn = len(self._seeds) - len(remaining)
                what = f"it draws {drawn} random tensors, the first pass {len(self._seeds)}"
                raise mismatch(self.name, what, self._cause("randomness"))

    def _replayed(self) -> AbstractContextManager[list[int]]:
        return replay.replayed(self._seeds) if self._how.preserve_rng else nullcontext([])

    def views(self) -> list[Any]:
        """Return views of what the first pass read, for a second pass to read."""
        return [
            read.value.detach().start_grad() if read.trained else read.value.detach().stop_grad()
            for read in self.reads
        ]

    def second_pass(self, inputs: Sequence[Any], views: Sequence[Any]) -> list[Any]:
        """Run the function again, with a graph; returns its tensors.

        Args:
            inputs: of the same values as in the first pass.
            views: what `views` has returned; it is read in place of what was read then.

        Raises:
            RecomputeMismatchError: the pass does not do what the first one did.
        """
        handles = [handle for read in self.reads for handle in read.handles]
        seen = [
            _handle(view)
            for read, view in zip(self.reads, views, strict=True)
            for _ in read.handles
        ]
        known = {id(handle) for handle in handles}
        outputs: list[Any] = []
        with self._as_it_was(handles, seen):
            take_apart(self._call(inputs), jt.Var, outputs)
            # A handle that is an output gets its own tensor back at the end of this block.
            outputs = [_handle(v) if id(v) in known else v for v in outputs]
        self._compare(outputs)
        return outputs

    def release(self) -> None:
        """Let go of all tensors."""
        self._template, self._buffers, self._samples, self.reads = None, [], [], []
        self._parameters, self.seen = [], []
        self._kept.release()

    def _compare(self, outputs: Sequence[Any]) -> None:
        error = self._difference([_facts(output) for output in outputs])
        if error is not None:
            raise error
        for index, (first, output) in enumerate(zip(self._samples, outputs, strict=False)):
            if differs(first, _sample(output)):
                what = f"output {index} ({_shown(self._facts[index])}) has other values"
                raise mismatch(
                    self.name, what, self._cause("randomness" if self._drew else "cache")
                )

    @property
    def _drew(self) -> bool:
        return bool(self._seeds) or (self._streams is not None and self._streams.drawn)

    def _difference(self, facts: Sequence[Facts]) -> RecomputeMismatchError | None:
        if len(facts) != len(self._facts):
            what = f"it returns {len(facts)} tensors, the first pass {len(self._facts)}"
            return mismatch(self.name, what, self._cause("cache"))
        for index, (first, second) in enumerate(zip(self._facts, facts, strict=True)):
            if first != second:
                what = f"output {index} was {_shown(first)} and is {_shown(second)}"
                cause = "autocast" if first[0] == second[0] else "cache"
                return mismatch(self.name, what, self._cause(cause))
        return None

    def _cause(self, otherwise: str) -> str:
        if otherwise == "autocast":
            return otherwise
        if not self._how.preserve_rng:
            return "randomness"
        if any(getattr(module, "is_train", was) != was for module, was in self._training):
            return "mode"
        return otherwise


def _handle(var: Any) -> Any:
    """Return another handle of the same tensor."""
    return jt.wrap_var_addr(var.var_ptr)


def _facts(var: Any) -> Facts:
    return tuple(var.shape), str(var.dtype)


def _shown(facts: Facts) -> str:
    return f"{facts[0]} {facts[1]}"


def _sample(var: Any) -> Any:
    """Return some of the values as a NumPy array; this waits for them."""
    with jt.flag_scope(no_grad=1):
        flat = var.detach().reshape((-1,))
        return flat[:: sample_step(flat.shape[0])].float32().numpy()
