"""Gradient checkpointing on PyTorch: torch.utils.checkpoint, non-reentrant (2.13).

Never the reentrant form: it drops gradients where no input needs one, and breaks under data
parallel (pytorch#24005). Random state is PyTorch's to replay. Running statistics of BatchNorm would
be updated by both passes (pytorch#96136); the second pass runs with momentum 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from xmem_torch import precision


class Checkpoint:
    """Recomputes; see `xmem.protocols.Checkpoint`."""

    gaps: Mapping[str, str] = {}

    def checkpoint(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        preserve_rng: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Call through torch.utils.checkpoint; without gradients this is a plain call."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng,
            context_fn=lambda: (nullcontext(), _recomputing(precision.capture())),
            **kwargs,
        )

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
        """Set an instance attribute `forward`, so that hooks and state_dict stay as they are."""
        before = module.__dict__.get("forward")
        module.forward = wrap(module.forward)

        def undo() -> None:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before

        return undo


@contextmanager
def _recomputing(precision_again: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with precision_again(), _statistics_untouched():
        yield


@contextmanager
def _statistics_untouched() -> Iterator[None]:
    """Let no normalisation layer that runs in the block update its running statistics.

    Momentum 0 keeps the averages, and a missing counter is not counted up; batch statistics are
    used all the same. Restored at the end of the block and not after each layer: recomputation
    may end early, by an exception inside a layer.
    """
    changed: list[tuple[Any, float | None, Any]] = []

    def before_forward(module: Any, _: Any) -> None:
        if (
            isinstance(module, _NormBase)
            and module.training
            and module.track_running_stats
            and not any(module is m for m, _, _ in changed)
        ):
            changed.append((module, module.momentum, module.num_batches_tracked))
            module.momentum = 0.0
            module.num_batches_tracked = None

    handle = register_module_forward_pre_hook(before_forward)
    try:
        yield
    finally:
        handle.remove()
        for module, momentum, counter in changed:
            module.momentum = momentum
            module.num_batches_tracked = counter
