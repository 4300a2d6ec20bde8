"""What a function can reach by itself: modules, generators, tensors of its closure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from xmem import randomness
from xmem.behind import behind
from xmem.randomness import Access


def stream_kinds() -> dict[type, Access]:
    """Return the kinds of generators that a function may hold, PyTorch's too."""
    return {
        **randomness.stream_kinds(),
        torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    }


def reach(function: Callable[..., Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the modules that a function can reach, its generators, and tensors of its closure."""
    kinds = stream_kinds()
    found: list[Any] = [getattr(function, "__self__", None)]
    if not isinstance(found[0], torch.nn.Module):
        found = behind(function, (torch.nn.Module, torch.Tensor, *kinds))
    modules: dict[Any, None] = {}
    for module in found:
        if isinstance(module, torch.nn.Module):
            _add_inside(module, modules)
    others = [v for v in found if not isinstance(v, torch.nn.Module)]
    tensors = [v for v in others if isinstance(v, torch.Tensor)]
    streams = [v for v in others if not isinstance(v, torch.Tensor)]
    held = [type_ for type_ in _types_of_attributes(modules) if issubclass(type_, tuple(kinds))]
    if held:
        streams += [v for m in modules for v in m.__dict__.values() if type(v) in held]
    return list(modules), list(dict.fromkeys(streams)), tensors


def _add_inside(module: Any, found: dict[Any, None]) -> None:
    """Add a module and all inside it, as `modules()` yields them, in half the time."""
    if module not in found:
        found[module] = None
        for child in module._modules.values():
            if child is not None:
                _add_inside(child, found)


def _types_of_attributes(modules: Iterable[Any]) -> set[type]:
    return {type_ for module in modules for type_ in map(type, module.__dict__.values())}
