"""Norms of gradients, and their limits, where ranks hold parts of them (PyTorch 2.13).

`torch.nn.utils.clip_grad_norm_` knows DTensors, but not beside plain tensors, and takes a part of a
layer that is cut over ranks for the whole. Here each rank's parts are added up over ranks, and what
every rank has whole counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from xmem.distributed.counting import note
from xmem_torch import ranks
from xmem_torch.communication import counted
from xmem_torch.local_parts import is_spread, local_part


def parts_of(parameters: Sequence[Any]) -> set[int]:
    """Return the ids of parameters of which each rank holds a part; waits for nobody."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return set()
    from xmem_torch.sharded_layers import parts_in

    spread = {
        id(p)
        for p in parameters
        if is_spread(p) and not all(placement.is_replicate() for placement in p.placements)
    }
    return spread | parts_in(parameters)


def clip(parameters: Sequence[Any], parts: set[int], max_norm: float, norm_type: float) -> Any:
    """Scale gradients so that their norm over all ranks is at most `max_norm`; returns the norm."""
    held = [(local_part(p.grad), id(p) in parts) for p in parameters if p.grad is not None]
    device = held[0][0].device
    with torch.no_grad():
        shared = _norm([g for g, is_part in held if is_part], norm_type, device)
        whole = _norm([g for g, is_part in held if not is_part], norm_type, device)
        if math.isinf(norm_type):
            _reduce(shared, dist.ReduceOp.MAX)
            total = torch.maximum(shared, whole)
        else:
            powers = shared.pow(norm_type)
            _reduce(powers, dist.ReduceOp.SUM)
            total = (powers + whole.pow(norm_type)).pow(1 / norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient, _ in held:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
    doubles = any(gradient.dtype == torch.float64 for gradient, _ in held)
    return total if doubles else total.float()


def agree_on_infinity(found: Sequence[torch.Tensor]) -> None:
    """Let all ranks know whether any of them found infinities in its parts."""
    for flag in found:
        _reduce(flag, dist.ReduceOp.MAX)


def _norm(gradients: Sequence[torch.Tensor], norm_type: float, device: Any) -> torch.Tensor:
    """Return a norm as float64, the one type on all ranks, whatever gradients each of them has."""
    norms = [
        torch.linalg.vector_norm(
            g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32)
        ).to(device, torch.float64)
        for g in gradients
        if g.numel()
    ]
    if not norms:
        return torch.zeros((), device=device, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _reduce(tensor: torch.Tensor, op: Any) -> None:
    note("all_reduce", tensor.nbytes, dist.get_world_size())
    with counted("all_reduce of a norm, or of what a scaler found"):
        ranks.wait(dist.all_reduce(tensor, op, async_op=True))
