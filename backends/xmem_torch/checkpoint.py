"""Gradient checkpointing on PyTorch: torch.utils.checkpoint, non-reentrant (2.13).

Never the reentrant form: it drops gradients where no input needs one, and breaks under data
parallel (pytorch#24005). What PyTorch leaves open is closed around it, in `recompute.py`.

A compiled model may contain regions; a region may not contain what is compiled (pytorch#144035,
pytorch#161889). While torch.compile traces, a region is PyTorch's own and nothing else: the
compiler replays randomness and statistics by itself.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from xmem.casting import current
from xmem.containers import leaves
from xmem.deferred import deferreds_in, extended, settled, value_of
from xmem.errors import CompositionError
from xmem.mismatch import function_name
from xmem.pending import Setting
from xmem.records import Cost, Recompute
from xmem_torch import precision
from xmem_torch.forwards import replace_forward
from xmem_torch.local_parts import refuse_sharded
from xmem_torch.passes import top_hooks
from xmem_torch.reach import reach
from xmem_torch.recompute import Region, aside
from xmem_torch.tensors import versions

_COMPILED = (
    "it is compiled, and torch.compile inside a region loses its recomputation. Compile the whole"
    " model after apply_checkpointing instead: torch.compile(model)"
)


class Checkpoint:
    """Recomputes; see `xmem.protocols.Checkpoint`."""

    gaps: Mapping[str, str] = {}

    def checkpoint(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Recompute,
    ) -> Any:
        """Call through torch.utils.checkpoint; without gradients this is a plain call."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return torch_checkpoint(
                functools.partial(_traced, function, how.name),
                *args,
                use_reentrant=False,
                preserve_rng_state=how.preserve_rng,
                **kwargs,
            )
        return _eager(function, settled(args), settled(kwargs), how)

    def checkpoint_block(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Recompute,
        *,
        ends: bool,
    ) -> Any:
        """Leave it to the last block of its segment; while a compiler traces, each is the last."""
        if not torch.is_grad_enabled():
            return function(*settled(args), **settled(kwargs))
        if torch.compiler.is_compiling() or (ends and not deferreds_in((args, kwargs))):
            return self.checkpoint(function, args, kwargs, how)

        _refuse_backward_hooks(function, how.name)
        refuse_sharded(getattr(function, "__self__", None), "A segment of several blocks")

        casting = current()
        if casting is not None and casting.log is not None:
            casting.log.opaque = True  # it may run when the autocast block has ended

        hooks = top_hooks()

        def run(
            function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str
        ) -> Any:
            if top_hooks() != hooks:
                raise CompositionError(
                    f"{name!r} waits for the rest of its segment, and its output is read first"
                    " inside another region or other saved-tensor hooks, which would not see it"
                    " again. Let the segment end at this block, or use the layout 'every'."
                )
            return self.checkpoint(function, args, kwargs, replace(how, name=name))

        setting = Setting(run, versions, precision.in_force(), precision.again())
        flags = tuple((module, module.training) for module in reach(function).modules)
        call = extended(setting, function, how.name, flags, (tuple(args), dict(kwargs)))
        return value_of(call) if ends else call

    def obstacle(self, module: Any) -> str | None:
        """Name what is compiled."""
        return _COMPILED if any(_is_compiled(m) for m in module.modules()) else None

    def cost(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Cost:
        """Count the storages that autograd saves, and time the second of two calls."""
        reached = reach(function)
        held = [t for m in reached.modules for t in (*m._parameters.values(), *m._buffers.values())]
        alive = set(_storages([*args, *kwargs.values(), *reached.tensors, *held]))
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # A node that holds its own output is a cycle that Python cannot collect.
            saved.append(tensor.detach())
            return saved[-1]

        with (
            aside(function),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            function(*args, **kwargs)
            saved.clear()
            _wait()
            started = time.perf_counter()
            outputs = function(*args, **kwargs)
            _wait()
            seconds = time.perf_counter() - started
        alive.update(_storages(outputs))
        kept = _storages(saved)
        return Cost(sum(size for where, size in kept.items() if where not in alive), seconds)

    def is_module(self, value: Any) -> bool:
        """torch.nn.Module."""
        return isinstance(value, torch.nn.Module)

    def children(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return named_children, a shared module under each of its names."""
        return [(n, m) for n, m in module._modules.items() if m is not None]

    def is_container(self, module: Any) -> bool:
        """Sequential and ModuleList."""
        return isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList))

    def replace_forward(
        self, module: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[[], None]:
        """Set an instance attribute `forward`; see `forwards.py`."""
        return replace_forward(module, wrap)


def _traced(function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Run a region that the compiler recomputes; it never comes here to do so itself."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise CompositionError(
            f"torch.compile broke off inside the checkpointed {name or function_name(function)!r},"
            " so that its first pass was compiled and the second would not be: other random"
            " numbers, statistics updated twice. Remove the graph break (fullgraph=True shows it),"
            " or train without torch.compile."
        )
    return function(*args, **kwargs)


@torch.compiler.disable
def _eager(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], how: Recompute
) -> Any:
    """Run a region; where a compiled model has broken off, nothing inside is compiled by itself.

    PyTorch recomputes eagerly, so a first pass that is compiled would save other tensors.
    """
    region = Region(function, how)
    for module in region.modules:
        if _is_compiled(module):
            name = how.name or function_name(function)
            raise CompositionError(f"{name!r} cannot be recomputed: {_COMPILED}")
    return region.first_pass(args, kwargs)


def _refuse_backward_hooks(function: Callable[..., Any], name: str) -> None:
    """Refuse what PyTorch ties to tensors around a call that runs only later."""
    module = getattr(function, "__self__", None)
    if getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None):
        raise CompositionError(
            f"block {name!r} has backward hooks, which do not see a block inside a segment. Use the"
            " layout 'every', or make it a segment of its own."
        )


def _is_compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _storages(tree: Any) -> dict[int, int]:
    """Return the bytes of distinct storages by address."""
    found = (t.untyped_storage() for t in leaves(tree, torch.Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
