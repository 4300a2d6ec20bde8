"""Where to treat what backward reads would do harm, and how that is recognised (PyTorch 2.13)."""

from __future__ import annotations

import functools
from types import CodeType, FrameType
from typing import Any

import torch

from xmem.errors import CompositionError
from xmem.planned import PlannedForward, TracedForward
from xmem_torch.passes import top_hooks

_APPLY = torch.autograd.Function.apply.__func__.__code__

_IN_REGION = (
    "xmem.compress_activations or xmem.offload_activations is entered inside a checkpointed"
    " function, or a planned stage. Its hooks would take the place of those that recomputation"
    " works by, and switch that off in silence. Enter it around the whole model: what the region"
    " keeps is then treated."
)
_PLANNED = (
    "{} is planned (xmem.plan): it holds what its plan says by itself, past saved-tensor hooks, so"
    " there is little left for xmem.compress_activations or xmem.offload_activations. Take one of"
    " the two: receipt.undo() takes the plan off. A plan of xmem.profile(..., compress=(8,),"
    " offload='disk') does both by itself."
)
_COMPILED = (
    "{} is compiled by torch.compile, which decides for itself what is saved. Take one of the two:"
    " leave out torch.compile, or xmem.compress_activations and xmem.offload_activations."
)


def refuse_here() -> None:
    """Refuse to begin where hooks do harm.

    Raises:
        CompositionError: with the reason.
    """
    if torch.compiler.is_compiling():
        raise CompositionError(_COMPILED.format("what enters the block"))
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CompositionError(
            "xmem.compress_activations or xmem.offload_activations is entered inside a transform"
            " of torch.func, which supports no saved-tensor hooks. Use torch.autograd instead."
        )
    hooks = top_hooks()
    if hooks is not None and getattr(hooks[0], "__module__", "") in _REGIONS:
        raise CompositionError(_IN_REGION)


_REGIONS = ("torch.utils.checkpoint", "xmem_torch.recompute", "xmem_torch.stages")


def refuse_module(outermost: torch.nn.Module) -> None:
    """Refuse a module that keeps by itself what backward will read."""
    for path, module in outermost.named_modules():
        name = repr(path or type(module).__name__)
        if _is_compiled(module):
            raise CompositionError(_COMPILED.format(name))
        if isinstance(module.__dict__.get("forward"), (PlannedForward, TracedForward)):
            raise CompositionError(_PLANNED.format(name))


def refuse_compiled(frame: FrameType) -> None:
    """Refuse a compiled function; its tensors are saved by a Function of the compiler's."""
    if frame.f_code is _APPLY:
        function = frame.f_locals["cls"]
        if function.__module__.startswith("torch._functorch."):
            raise CompositionError(_COMPILED.format("a function"))


def _is_compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


@functools.lru_cache(maxsize=1024)
def saves_early(code: CodeType) -> bool:
    """Say whether an operation that this code calls may save a tensor before it is filled.

    RReLU does so with its noise (pytorch#193671); whoever copies what is saved copies nothing.
    """
    return any(name.startswith("rrelu") for name in code.co_names)
