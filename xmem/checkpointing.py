"""Which modules are checkpointed: layouts, shared by all backends.

Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016: keep the inputs of segments, compute their insides again in backward. How a segment
is recomputed is the backend's part; here modules are found and wrapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem import api
from xmem.errors import CompositionError, UsageError, unknown
from xmem.receipts import Receipt, issue

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.protocols import Checkpoint

LAYOUTS = ("every",)


@dataclass(frozen=True)
class CheckpointedForward:
    """What a checkpointed block runs instead of its forward.

    An object and not a closure, so that it is copied and pickled with its model: a copy of the
    model then runs the copy's blocks.

    Attributes:
        forward: the block's own forward, bound to it.
        backend: the name of the backend that recomputes it.
        preserve_rng: recomputation draws the same random numbers.
    """

    forward: Callable[..., Any]
    backend: str
    preserve_rng: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, checkpointed."""
        capability = api.loaded(self.backend).checkpoint
        return capability.checkpoint(self.forward, *args, preserve_rng=self.preserve_rng, **kwargs)


def find_blocks(capability: Checkpoint, model: Any) -> list[tuple[str, Any]]:
    """Return the repeated blocks of a model: (path, module), outermost first.

    A block is a child of a list of modules (Sequential, ModuleList) in which at least two
    children are of one class and have submodules of their own. Lists inside blocks are not
    searched again, since a region inside a region is recomputed twice.
    """
    return list(_blocks(capability, model, ""))


def _blocks(capability: Checkpoint, module: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = [(f"{path}.{n}" if path else n, c) for n, c in capability.children(module)]
    if capability.is_container(module):
        composite = [(p, c) for p, c in children if capability.children(c)]
        classes = Counter(type(c) for _, c in composite)
        if classes and max(classes.values()) >= 2:
            yield from composite
            return
    for child_path, child in children:
        yield from _blocks(capability, child, child_path)


def apply_checkpointing(
    backend: Backend,
    model: Any,
    layout: str,
    *,
    blocks: Sequence[Any] | None = None,
    preserve_rng: bool = True,
) -> Receipt:
    """Wrap the blocks of a model so that each is checkpointed; see `xmem.apply_checkpointing`."""
    if layout not in LAYOUTS:
        raise UsageError(unknown("layout", layout, LAYOUTS))
    capability = backend.checkpoint
    found, note = _chosen(capability, model, blocks)
    # One module called in several places appears several times and is wrapped once.
    unique = {id(module): (path, module) for path, module in found}
    undos: list[Callable[[], None]] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        for path, module in unique.values():
            wrap = _wrapper(backend.name, path, preserve_rng=preserve_rng)
            undos.append(capability.replace_forward(module, wrap))
        return issue(
            Receipt(
                technique="checkpoint",
                backend=backend.name,
                applied_to=len(unique),
                names=tuple(path for path, _ in unique.values()),
                note="" if unique else note,
                _undo=undo,
            )
        )
    except BaseException:  # whole or not at all, also if a warning or an observer raises
        undo()
        raise


def _chosen(
    capability: Checkpoint, model: Any, blocks: Sequence[Any] | None
) -> tuple[list[tuple[str, Any]], str]:
    """Return the blocks with their paths, and what to say if there are none."""
    for given in (model, *(blocks or ())):
        if not capability.is_module(given):
            raise UsageError(f"{given!r} is no module of the active backend; pass its own modules")
    if blocks is not None:
        return [(type(b).__name__, b) for b in blocks], "blocks=[] names none."
    return find_blocks(capability, model), (
        "No list of modules with two or more blocks of one class was found in"
        f" {type(model).__name__}; name them with blocks=[...]."
    )


def _wrapper(
    backend: str, path: str, *, preserve_rng: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(forward, CheckpointedForward):
            raise CompositionError(
                f"block {path!r} is checkpointed already; call undo() of its receipt first"
            )
        return CheckpointedForward(forward, backend, preserve_rng)

    return wrap
