"""Tensors of which each rank holds a part, and modules that hold such (PyTorch 2.13).

`torch.distributed.tensor` and `torch.distributed.fsdp` take more than a second to import, so nobody
who trains in one process pays for them: where they have not been imported there is nothing of
theirs.
"""

from __future__ import annotations

import sys
from typing import Any

from xmem.errors import CompositionError


def is_spread(tensor: Any) -> bool:
    """Say whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Any:
    """Return what this rank holds of a tensor; a plain one itself. Waits for nobody."""
    return tensor._local_tensor if is_spread(tensor) else tensor


def is_sharded(module: Any) -> bool:
    """Say whether a module's parameters are gathered around its passes (`fully_shard`)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def refuse_sharded(model: Any, what: str) -> None:
    """Refuse what computes blocks elsewhere than where they are called.

    Args:
        model: a module, or anything else, of which nothing is known.
        what: what that is, at the beginning of a sentence.

    Raises:
        CompositionError: the model's parameters are gathered around its passes only.
    """
    modules = getattr(model, "modules", None)
    if callable(modules) and any(is_sharded(module) for module in modules()):
        raise CompositionError(
            f"{what} computes blocks of {type(model).__name__} when their parameters are not"
            " gathered: it is sharded (shard_model), block by block, around each call. Use"
            ' xmem.apply_checkpointing(model, "every") there'
        )
