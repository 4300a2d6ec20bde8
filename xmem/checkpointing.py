"""Which modules are checkpointed: layouts, shared by all backends.

Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016: keep the inputs of segments, compute their insides again in backward. How a segment
is recomputed is the backend's part; here modules are found and wrapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from xmem.errors import UsageError, unknown
from xmem.receipts import Receipt, issue

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.protocols import Checkpoint

LAYOUTS = ("every",)


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
    if blocks is None:
        found = find_blocks(capability, model)
        note = (
            "No list of modules with two or more blocks of one class was found in"
            f" {type(model).__name__}; name them with blocks=[...]."
        )
    else:
        found = [(type(b).__name__, b) for b in blocks]
        note = "blocks=[] names none."
    # One module called in several places appears several times and is wrapped once.
    unique = {id(module): (path, module) for path, module in found}
    undos = [
        capability.replace_forward(module, _checkpointed(capability, preserve_rng=preserve_rng))
        for _, module in unique.values()
    ]

    def undo() -> None:
        while undos:
            undos.pop()()

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


def _checkpointed(
    capability: Checkpoint, *, preserve_rng: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return capability.checkpoint(forward, *args, preserve_rng=preserve_rng, **kwargs)

        return run

    return wrap
