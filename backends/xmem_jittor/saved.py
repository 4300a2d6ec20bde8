"""What forward leaves for backward on Jittor 1.3.11, which has no hooks for it.

While a block is entered, `__call__` of `jittor.Module` is replaced (and of modules that have their
own, which hooks give them), and acts in the thread that has
entered one. Calls become units (`units.py`): the elements of lists of modules, and modules without
parts. A module that is no list is descended into, and so is an element that holds a list of blocks
itself. In them softmax keeps its output only (`softmax.py`). Regions of `xmem.checkpoint` pack the
inputs that they keep (`segments.py`).

Limits: what is computed outside of modules keeps what it keeps. The `grad` of a `jt.Function` is
called twice, the first time for a backward that never runs, so it must not spend what it reads.
Inputs that ask for no gradient (the batch) are kept. Only first derivatives, once. A value that is
waited for before backward makes Jittor keep a little more (warned of).
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jittor as jt

from xmem.checkpointing import CheckpointedForward, is_recomputed
from xmem.errors import CompositionError
from xmem.saving import Policy
from xmem_jittor import calls, native, units
from xmem_jittor.checkpoint import Checkpoint
from xmem_jittor.gathering import ShardedForward
from xmem_jittor.graph import newest_node
from xmem_jittor.keeping import Block, in_force, packs
from xmem_jittor.segments import is_inside


class Saved:
    """See `xmem.saving.Saved`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.gaps: Mapping[str, str] = {}

    def saving(self, policy: Policy, *, model: Any) -> AbstractContextManager[Any]:
        """Replace `jittor.Module.__call__` inside the block."""
        return _entered(Block(policy, model, Checkpoint()))


_lock = threading.Lock()
_entered_blocks = 0
_undo: list[tuple[Any, Any, Any]] = []


@contextmanager
def _entered(block: Block) -> Iterator[Block]:
    global _entered_blocks
    if calls.running() or is_inside():
        raise CompositionError(
            "xmem.compress_activations or offload_activations was entered inside a checkpointed or"
            " planned region, which is computed again in backward and keeps nothing for it. Enter"
            " it around the forward pass: the region's inputs are packed, or leave, then."
        )
    native.saving()  # compiled now, not inside the first step
    with _lock:
        if not _entered_blocks:
            _replace()
        _entered_blocks += 1
    try:
        with in_force(block):
            yield block
    finally:
        with _lock:
            _entered_blocks -= 1
            if not _entered_blocks:
                _restore()


def _replace() -> None:
    for owner in list(_callers()):
        original = owner.__dict__["__call__"]
        made = _calling(original)
        _undo.append((owner, original, made))
        setattr(owner, "__call__", made)  # noqa: B010


def _callers() -> Iterator[type]:
    """Yield the classes of modules with a `__call__` of their own: hooks give a class one."""
    pending, seen = [jt.Module], {jt.Module}
    for owner in pending:  # grows meanwhile
        if "__call__" in owner.__dict__:
            yield owner
        found = [kind for kind in owner.__subclasses__() if kind not in seen]
        seen.update(found)
        pending += found


def _restore() -> None:
    while _undo:
        owner, original, made = _undo.pop()
        if owner.__dict__.get("__call__") is made:  # else a hook was placed inside the block
            setattr(owner, "__call__", original)  # noqa: B010


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        block = packs()
        if block is None or is_inside() or calls.running():
            return original(self, *args, **kwargs)
        forward = self.__dict__.get("execute")
        recomputed = is_recomputed(forward)
        if recomputed and not isinstance(forward, CheckpointedForward):
            if block.everywhere:
                return original(self, *args, **kwargs)
            raise CompositionError(
                "a planned model was called inside xmem.compress_activations or"
                " xmem.offload_activations. A plan decides itself what is kept; take it off the"
                " model (undo() of its receipt), or leave the block out and plan for a smaller"
                " budget."
            )
        before = newest_node()
        with block.runs(self, before) as entry:
            try:
                recomputed = recomputed or isinstance(forward, ShardedForward)
                if block.noted is not None or recomputed or not _is_unit(block, self):
                    return original(self, *args, **kwargs)
                again = functools.partial(original, self, *args, **kwargs)
                return units.run(block, entry.path, self, again, args, kwargs)
            finally:
                entry.last = newest_node()

    return call


def _is_unit(block: Block, module: Any) -> bool:
    """Say whether a module's call is packed as a whole."""
    children = block.capability.children(module)
    if not children:
        return True
    if block.capability.is_container(module):
        # A list of layers inside a list, as blocks of a few layers are often written.
        outer = [entry.module for entry in block.running[:-1]]
        in_list = bool(outer) and _holds(block, outer[-1], module)
        return in_list and not any(block.capability.children(child) for _, child in children)
    return _is_element(block, module) and not _holds_blocks(block, module)


def _is_element(block: Block, module: Any) -> bool:
    """Say whether a module is an element of a list in the module that calls it, or of that."""
    if len(block.running) < 2:
        return False
    return _holds(block, block.running[-2].module, module)


def _holds(block: Block, outer: Any, module: Any) -> bool:
    if block.capability.is_container(outer):
        return any(child is module for _, child in block.capability.children(outer))
    return any(
        block.capability.is_container(child) and _holds(block, child, module)
        for _, child in block.capability.children(outer)
    )


def _holds_blocks(block: Block, module: Any) -> bool:
    """Say whether a module holds a list of two or more blocks of one class."""
    children = [child for _, child in block.capability.children(module)]
    if block.capability.is_container(module):
        kinds = Counter(type(c) for c in children if block.capability.children(c))
        if kinds and max(kinds.values()) >= 2:
            return True
    return any(_holds_blocks(block, child) for child in children)
