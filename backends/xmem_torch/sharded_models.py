"""Parameters in shares, gathered block by block (ZeRO-3), on PyTorch (`fully_shard` of 2.13).

Blocks are freed after their forward pass and gathered again for backward; what belongs to no block
stays gathered between the two. Memory goes before overlap: the next block is not gathered ahead of
time, and what a reduction has read is freed at once, where PyTorch keeps it until the next one.
With 13.1 MiB of parameters, AdamW and two ranks the peak is 37.0 MiB a rank instead of 40.9.

A block is gathered where it is called. So a checkpointed block is a region of its own, and what
computes it in another place, a segment of several blocks or a plan, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from xmem.checkpointing import is_recomputed
from xmem.distributed.counting import note
from xmem.distributed.world import current
from xmem.errors import CompositionError, UsageError
from xmem.planned import PlannedForward, TracedForward
from xmem.receipts import Receipt
from xmem_torch import ranks
from xmem_torch.data_parallel import is_data_parallel, take_alone
from xmem_torch.local_parts import is_sharded
from xmem_torch.masters import master_of
from xmem_torch.norms import parts_of


def shard(model: Any, blocks: Sequence[Any]) -> Receipt:
    """Shard a model in place."""
    _check(model, blocks)
    world = current()
    parameters = list(model.parameters())
    if world.size == 1:
        take_alone(model)
        return Receipt("shard_model", "torch", len(parameters))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from xmem_torch.sharded_calls import Gathering, Reducing

    whole = sum(p.nbytes for p in parameters)
    _take_from_first(model)
    mesh = init_device_mesh(ranks.device(), (world.size,))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    for module in (*blocks, model):
        module.set_modules_to_backward_prefetch([module])  # itself: no other one ahead of time
        module.set_custom_all_gather(Gathering())
        module.set_custom_reduce_scatter(Reducing())
    model.register_forward_hook(_let_go)
    kept = sum(p._local_tensor.nbytes for p in model.parameters())
    return Receipt("shard_model", "torch", len(parameters), expected_saving_bytes=whole - kept)


def _let_go(model: Any, *_: Any) -> None:
    """Free what PyTorch keeps gathered for backward where none will come; it would become old."""
    if not torch.is_grad_enabled():
        model.reshard()


def _take_from_first(model: Any) -> None:
    """Give all ranks rank 0's parameters and buffers."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            note("broadcast", tensor.nbytes, current().size)
            place = tensor.detach()
            dense = place if place.is_contiguous() else place.contiguous()
            dist.broadcast(dense, 0)
            if dense is not place:
                place.copy_(dense)


def _check(model: Any, blocks: Sequence[Any]) -> None:
    parameters = list(model.parameters())
    if is_data_parallel(model):
        raise CompositionError(
            f"{type(model).__name__} is data-parallel, which averages whole gradients: shard the"
            " plain model, and train it without data_parallel"
        )
    if any(is_sharded(module) for module in model.modules()):
        raise CompositionError(f"{type(model).__name__} is sharded already")
    if parts_of(parameters):
        raise CompositionError(
            "layers of the model are split over the ranks already (tensor_parallel, pipeline), and"
            " their parts cannot be shared out over the same ranks"
        )
    if any(master_of(p) is not p for p in parameters):
        raise CompositionError(
            "the model has float32 masters (xmem.cast_model) of whole parameters: shard it in"
            " float32, and train with xmem.autocast"
        )
    if not parameters:
        raise UsageError(f"{type(model).__name__} has no parameters to shard")
    if any(torch.nn.parameter.is_lazy(p) for p in parameters):
        raise UsageError("a parameter of the model has no size yet: run the model once")
    if any(p.grad is not None for p in parameters):
        raise UsageError("the model has gradients of whole parameters: call xmem.zero_grad first")
    for module in blocks:
        if type(module).forward is torch.nn.Module.forward:
            raise UsageError(
                f"{type(module).__name__} is a list of modules that is never called itself: name"
                " the modules in it as blocks"
            )
    _check_shared(model, blocks)
    _check_forwards(model)


def _check_shared(model: Any, blocks: Sequence[Any]) -> None:
    """Refuse parameters that lie in two places which are gathered at different times."""
    homes: dict[int, Any] = {}
    for block in blocks:
        for module in block.modules():
            homes[id(module)] = block  # the innermost, as PyTorch takes them in this order
    first: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        home = homes.get(id(module))
        for name, p in module._parameters.items():
            where = f"{path}.{name}".removeprefix(".")
            if p is not None and first.setdefault(id(p), (where, home))[1] is not home:
                raise CompositionError(
                    f"{where} and {first[id(p)][0]} are one parameter, and lie in blocks that are"
                    " gathered at different times: leave these out of blocks=[...]"
                )


def _check_forwards(model: Any) -> None:
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, (PlannedForward, TracedForward)):
            raise CompositionError(
                f"{path or type(model).__name__!r} is planned (xmem.plan), and a plan computes"
                " blocks when their parameters are not gathered. Undo the plan's receipt, and use"
                ' xmem.apply_checkpointing(model, "every")'
            )
        if is_recomputed(forward) and not getattr(forward, "ends", True):
            raise CompositionError(
                f"{path!r} is checkpointed in a segment with the blocks after it, which are"
                ' computed when its parameters are not gathered: use the layout "every"'
            )
