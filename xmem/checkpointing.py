"""Put checkpointing on the modules of a model: what a layout chose runs as recomputed regions.

`xmem.layouts` says which modules those are; the backend makes one region of several and recomputes
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from xmem import api
from xmem.errors import CompositionError, UsageError
from xmem.layouts import (
    KeyLayers,
    Named,
    find_blocks,
    given,
    key_candidates,
    outermost,
    split,
)
from xmem.planner.plan import Plan
from xmem.receipts import Receipt, issue
from xmem.records import Cost, Recompute

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.protocols import Checkpoint

Layout = str | int | KeyLayers | Plan | Sequence[Any]


@dataclass(frozen=True)
class CheckpointedForward:
    """What a checkpointed block runs instead of its forward.

    An object and not a closure, so that it is copied and pickled with its model: a copy of the
    model then runs the copy's blocks.

    Attributes:
        forward: the block's own forward, bound to it.
        backend: the name of the backend that recomputes it.
        how: what is replayed and checked; its name is the block's path.
        ends: it is the last block of its segment.
    """

    forward: Callable[..., Any]
    backend: str
    how: Recompute
    ends: bool = True
    recomputes: ClassVar = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, checkpointed."""
        capability = api.loaded(self.backend).checkpoint
        return capability.checkpoint_block(self.forward, args, kwargs, self.how, ends=self.ends)


def is_recomputed(forward: Any) -> bool:
    """Say whether a forward is one that a layout or a plan has set."""
    return getattr(forward, "recomputes", False) is True


def apply_checkpointing(
    backend: Backend,
    model: Any,
    layout: Layout,
    *,
    blocks: Sequence[Any] | None = None,
    inputs: Sequence[Any] | None = None,
    preserve_rng: bool = True,
    check_values: bool = False,
) -> Receipt:
    """Wrap the blocks of a model; see `xmem.apply_checkpointing`."""
    capability = backend.checkpoint
    if not capability.is_module(model):
        raise UsageError(f"{model!r} is no module of the active backend; pass its own modules")
    if isinstance(layout, Plan):
        if blocks is not None or inputs is not None or check_values:
            raise UsageError(
                "a Plan says itself what is recomputed; leave blocks=, inputs= and check_values="
                " out"
            )
        return layout.apply(model, preserve_rng=preserve_rng)
    if inputs is not None and not (isinstance(layout, KeyLayers) and layout.measured):
        raise UsageError("inputs= is for KeyLayers with min_saved_bytes or max_recompute_seconds")
    if is_recomputed(vars(model).get("forward")):
        raise CompositionError(
            f"{type(model).__name__} is planned already; call undo() of its receipt first"
        )
    segments, note, saving = _chosen(capability, model, layout, blocks, inputs)
    for path, module in (named for segment in segments for named in segment):
        reason = capability.obstacle(module)
        if reason is not None:
            raise CompositionError(f"block {path!r} cannot be recomputed: {reason}")
    how = Recompute(preserve_rng=preserve_rng, check_values=check_values)
    wrapped = _ends(segments)
    undos: list[Callable[[], None]] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        for (path, module), ends in wrapped:
            undos.append(capability.replace_forward(module, _wrapper(backend, path, how, ends)))
        return issue(
            Receipt(
                technique="checkpoint",
                backend=backend.name,
                applied_to=len(wrapped),
                names=tuple(path for (path, _), _ in wrapped),
                expected_saving_bytes=saving,
                note=_lengths(segments) if wrapped else note,
                _undo=undo,
            )
        )
    except BaseException:  # whole or not at all, also if a warning or an observer raises
        undo()
        raise


def _chosen(
    capability: Checkpoint,
    model: Any,
    layout: Layout,
    blocks: Sequence[Any] | None,
    inputs: Sequence[Any] | None,
) -> tuple[list[list[Named]], str, int | None]:
    """Return the segments, what to say if there are none, and the saving where it was measured."""
    if isinstance(layout, KeyLayers):
        if blocks is not None:
            raise UsageError("blocks= names the blocks itself; leave it out with KeyLayers")
        chosen, saving = _key_layers(capability, model, layout, inputs)
        return [[named] for named in chosen], f"No module meets {layout}.", saving
    if isinstance(layout, (list, tuple)):
        if blocks is not None:
            raise UsageError("a list of segments names the blocks itself; leave blocks= out")
        return given(capability, model, layout), "The list of segments is empty.", None
    if not isinstance(layout, (str, int)) or isinstance(layout, bool):
        raise UsageError(
            f"{layout!r} is no layout: 'every', 'sqrt', a number of segments, KeyLayers(...), a"
            " Plan or a list of segments"
        )
    if blocks is not None:
        named = [
            named for segment in given(capability, model, blocks, "block") for named in segment
        ]
        return split([named] if named else [], layout), "blocks=[] names none.", None
    note = (
        "No list of modules with two or more blocks of one class was found in"
        f" {type(model).__name__}; name them with blocks=[...]."
    )
    return split(find_blocks(capability, model), layout), note, None


def _key_layers(
    capability: Checkpoint, model: Any, layers: KeyLayers, inputs: Sequence[Any] | None
) -> tuple[list[Named], int | None]:
    """Return the modules that meet the criteria, and the bytes that they keep where measured."""
    candidates = key_candidates(capability, model, layers)
    if not layers.measured:
        return outermost(capability, candidates), None
    if inputs is None:
        raise UsageError(
            "KeyLayers with min_saved_bytes or max_recompute_seconds is measured in one forward"
            " pass; give its inputs: apply_checkpointing(model, layers, inputs=(x,))"
        )
    if not isinstance(inputs, (list, tuple)):
        inputs = (inputs,)
    costs: dict[str, Cost] = {}
    with _measured(capability, candidates, costs):
        capability.cost(model, tuple(inputs), {})
    fitting = [
        (path, module)
        for path, module in candidates
        if path in costs and layers.fits(costs[path].saved_bytes, costs[path].forward_seconds)
    ]
    chosen = outermost(capability, fitting)
    return chosen, sum(costs[path].saved_bytes for path, _ in chosen)


@contextmanager
def _measured(
    capability: Checkpoint, candidates: Sequence[Named], costs: dict[str, Cost]
) -> Iterator[None]:
    """Let each candidate be measured inside the block, when it is called first."""
    undos = []
    measuring = False

    def wrapper(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal measuring
                if not measuring and path not in costs:
                    measuring = True
                    try:
                        costs[path] = capability.cost(forward, args, kwargs)
                    finally:
                        measuring = False
                return forward(*args, **kwargs)

            return call

        return wrap

    try:
        for path, module in candidates:
            undos.append(capability.replace_forward(module, wrapper(path)))
        yield
    finally:
        while undos:
            undos.pop()()


def _ends(segments: Sequence[Sequence[Named]]) -> list[tuple[Named, bool]]:
    """Return each module once, with whether it ends a segment.

    One that is called in several places has one forward, so it is a segment's end everywhere.
    """
    places: dict[int, list[tuple[Named, bool]]] = {}
    for segment in segments:
        for index, named in enumerate(segment):
            places.setdefault(id(named[1]), []).append((named, index == len(segment) - 1))
    return [(at[0][0], len(at) > 1 or at[0][1]) for at in places.values()]


def _lengths(segments: Sequence[Sequence[Named]]) -> str:
    lengths = [len(segment) for segment in segments]
    if max(lengths) == 1:
        return ""
    return f"{len(lengths)} segments of {', '.join(map(str, lengths))} blocks"


def _wrapper(
    backend: Backend, path: str, how: Recompute, ends: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        if is_recomputed(forward):
            raise CompositionError(
                f"block {path!r} is checkpointed or planned already; call undo() of its receipt"
                " first"
            )
        return CheckpointedForward(forward, backend.name, replace(how, name=path), ends)

    return wrap
