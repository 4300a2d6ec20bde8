"""What a region stands on: inputs taken apart, contexts entered anew, the hooks on the stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xmem.containers import fill, leaves, snapshot, take_apart
from xmem.errors import RecomputeMismatchError
from xmem_torch.tensors import is_tensor


def apart(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], tuple[Any, Any]]]:
    """Return the tensors in the inputs, and what makes inputs of others in their places."""
    if not kwargs and all(is_tensor(value) for value in args):
        return list(args), lambda given: (given, {})
    tensors: list[torch.Tensor] = []
    template = take_apart(snapshot((tuple(args), dict(kwargs))), torch.Tensor, tensors)
    return tensors, lambda given: fill(snapshot(template), given)


class Again:
    """A context that can be entered anew: a graph that is kept may be recomputed again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class Guarded(TorchFunctionMode):
    """Raises where a function of PyTorch reads one of the tensors."""

    def __init__(
        self, tensors: Mapping[int, Any], error: Callable[[Any], RecomputeMismatchError]
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._error = error

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in leaves((args, kwargs or {}), torch.Tensor):
            if id(tensor) in self._tensors:
                raise self._error(tensor)
        return function(*args, **(kwargs or {}))


def top_hooks() -> Any:
    """Return what packs and unpacks saved tensors now, or None."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def ends_in_rrelu(output: Any) -> bool:
    """Say whether one of the last operations, before any that must save something, is RReLU.

    Its noise and its input, which are of one shape and type, are what was saved last then.
    """
    nodes = [t.grad_fn for t in leaves(output, torch.Tensor) if t.grad_fn is not None]
    for _ in range(_LAST_OPERATIONS):
        if not nodes:
            return False
        node = nodes.pop(0)
        if "Rrelu" in node.name():
            return True
        nodes += [following for following, _ in node.next_functions if following is not None]
    return False


_LAST_OPERATIONS = 8
