"""Optimizer states and parameters that live away from the device: the neutral functions.

Samyam Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
Learning", SC 2021; Jie Ren et al., "ZeRO-Offload", USENIX ATC 2021. Here the step itself stays on
the device, so results are those of the framework's own optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.api import active
from xmem.errors import UsageError
from xmem.offload.opening import opened
from xmem.receipts import Receipt, issue
from xmem.sizes import parse_size

if TYPE_CHECKING:
    from xmem.offload.depot import To


BLOCK_BYTES = 16 << 20
LEAST_BLOCK_BYTES = 64 << 10


def offload_optimizer(
    optimizer: Any,
    to: To = "host",
    *,
    block: int | str | None = None,
    directory: str | Path | None = None,
) -> Receipt:
    """Keep an optimizer's states in host memory or on disk; a step streams them block by block.

    Parameters and states come out of each step as without it: bit for bit on PyTorch, to rounding
    on Jittor. The optimizer stays the object that it is: groups, schedulers, scalers, clipping and
    hooks go on working, `state_dict` holds the states, and `load_state_dict` takes them.

    Args:
        optimizer: the framework's own, or one of `xmem.optim`; states that it has are moved now.
        to: "host" or "disk". On a CPU "host" leaves the framework's pool but not the machine's
            memory, which is warned of.
        block: of states, how many bytes are on the device at once during a step, or "16MiB"; None:
            a tenth of what the parameters take, a twentieth of Adam's states, and at most 16 MiB.
        directory: of the scratch file for "disk"; None: $XMEM_OFFLOAD_DIR, or the system's for
            temporary files.

    Returns:
        A receipt; `receipt.undo()` brings the states back.

    Raises:
        UsageError: it is no optimizer, it is offloaded already, or a size is 0.
        OffloadError: the directory is missing, cannot be written to, or has no room.
        CompositionError: it is in a combination that cannot work, with the reason.
    """
    backend = active()
    block_bytes = _tenth(optimizer) if block is None else parse_size(block)
    if block_bytes == 0:
        raise UsageError("block=0: a step needs some states at once; give e.g. '16MiB'")
    depot = opened(to, directory, "offload_optimizer")
    return issue(backend.offload.offload_optimizer(optimizer, depot, block_bytes=block_bytes))


def offload_parameters(
    model: Any,
    to: To = "host",
    *,
    blocks: Sequence[Any] | None = None,
    prefetch: int | str = 0,
    directory: str | Path | None = None,
) -> Receipt:
    """Keep a model's parameters in host memory or on disk; those of a layer come while it runs.

    For inference, and for training with an optimizer whose step brings parameters in:
    `offload_optimizer`, or `optimizer_in_backward`. Results are those of the model without it. Only
    what a layer's forward writes into its own parameters past autograd (PyTorch's `.data`) is lost.

    Args:
        model: a native module, changed in place.
        to: "host" or "disk"; see `offload_optimizer`.
        blocks: modules that come and go as a whole; None: elements of lists of modules, and every
            other module with parameters of its own.
        prefetch: how many bytes of the layers that come next are read ahead, at most.
        directory: of the scratch file; see `offload_optimizer`.

    Returns:
        A receipt; `receipt.undo()` brings the parameters back.

    Raises:
        UsageError: it is no module, it is offloaded already, or a block is not in it.
        OffloadError: the directory is missing, cannot be written to, or has no room.
        CompositionError: it is in a combination that cannot work, with the reason.
    """
    backend = active()
    prefetch_bytes = parse_size(prefetch)
    depot = opened(to, directory, "offload_parameters")
    receipt = backend.offload.offload_parameters(
        model, depot, blocks=blocks, prefetch_bytes=prefetch_bytes
    )
    return issue(receipt)


def _tenth(optimizer: Any) -> int:
    """Return a tenth of the bytes of an optimizer's parameters, within limits."""
    groups = getattr(optimizer, "param_groups", ())
    found = sum(int(p.nbytes) for group in groups for p in group["params"])
    return min(max(found // 10, LEAST_BLOCK_BYTES), BLOCK_BYTES)
