"""What is alive: tensors that Python holds, and their graphs.

Relies on two facts of CPython: the garbage collector knows all tensors of Python, and each of them
holds its class, so that the classes' reference counts tell how many there are (`live_counts`)
without a walk over all objects (`live_tensors`, 20 ms and more).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from xmem.pooling import Graph

_LIMIT = 50_000
"""More operations of one graph are not looked at: 2 us each."""


def _classes() -> list[type]:
    """Return the classes of tensors."""
    found: list[type] = [torch.Tensor]
    for kind in found:
        below: list[type] = type.__subclasses__(kind)
        found.extend(each for each in below if each not in found)
    return found


def live_tensors() -> Sequence[Any]:
    """Return the tensors of Python, and the gradients of the leaves among them, each once."""
    classes = frozenset(_classes())
    found = [each for each in gc.get_objects() if type(each) in classes]
    held = {id(tensor) for tensor in found}
    for tensor in found[:]:
        if not (tensor.requires_grad and tensor.is_leaf) or tensor.grad is None:
            continue
        if id(tensor.grad) not in held:
            held.add(id(tensor.grad))
            found.append(tensor.grad)
    return found


_others: dict[type, int] = {}
"""By class, how many references to it are not those of its tensors."""

_HELD_BY_LOOP = 3
"""References while a loop over the list of classes counts: the list, its variable, the argument."""


def _note_others(classes: Sequence[type]) -> None:
    wanted = frozenset(classes)
    count = Counter(type(each) for each in gc.get_objects() if type(each) in wanted)
    for kind in classes:
        held_here = _HELD_BY_LOOP + 1 + (kind in count)  # by the set and the counter
        held_later = 1  # by `_others` itself
        _others[kind] = sys.getrefcount(kind) - count[kind] - held_here + held_later


def live_counts() -> dict[str, int]:
    """Return the number of Python's tensors; differences are exact.

    Classes are held by others too (modules, methods, subclasses); how often, a walk over all
    tensors tells when a class is seen for the first time.
    """
    classes = _classes()
    if any(kind not in _others for kind in classes):
        _note_others(classes)
    return {
        "tensors": sum(sys.getrefcount(kind) - _others[kind] - _HELD_BY_LOOP for kind in classes)
    }


def tensor_bytes(tensor: Any) -> int:
    """Return the size of the storage behind a tensor; views of one storage all have it."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, oneDNN's, lazy, fake
        return 0


def graph_of(tensor: Any) -> Graph | None:
    """Return the operations behind a tensor; nothing is pending, PyTorch computes at once."""
    if tensor.grad_fn is None:
        return None
    root = tensor.grad_fn
    waiting, seen = [root], {root}
    while waiting and len(seen) < _LIMIT:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen and not hasattr(node, "variable"):
                seen.add(node)
                waiting.append(node)
    return Graph(
        root._sequence_nr(), frozenset(node._sequence_nr() for node in seen), is_pending=False
    )


def identity_of(tensor: Any) -> Any:
    """Return a weak reference: there is one per tensor, and it does not pass to another."""
    return weakref.ref(tensor)


def on_step(call: Callable[[Any], None]) -> Callable[[], None]:
    """Register PyTorch's own hook."""
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: call(optimizer))
    return lambda: hook.remove()
