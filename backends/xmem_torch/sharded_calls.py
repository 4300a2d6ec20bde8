"""How a sharded model's parameters are gathered and its gradients reduced (`fully_shard`, 2.13).

They are PyTorch's own calls, counted in `xmem.distributed.traffic` with the flat copies that they
read or write, and, on a CPU, waited for with an eye on ranks that are gone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from xmem.distributed.counting import note
from xmem_torch import ranks
from xmem_torch.communication import counted


class Gathering(DefaultAllGather):
    """Gathers the parameters of a block."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Let PyTorch gather."""
        note("all_gather", output_tensor.nbytes, group.size())
        if async_op or input_tensor.device.type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, async_op)
        with counted("the gathering of parameters", output_tensor.nbytes):
            ranks.wait(super().__call__(output_tensor, input_tensor, group, async_op=True))
        return None


class Reducing(DefaultReduceScatter):
    """Reduces the gradients of a block to their owners."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Let PyTorch reduce; on a CPU the gradients that were read are gone then."""
        note("reduce_scatter", input_tensor.nbytes, group.size())
        if async_op or input_tensor.device.type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        with counted("the reduction of gradients", input_tensor.nbytes):
            ranks.wait(super().__call__(output_tensor, input_tensor, group, op, async_op=True))
        input_tensor.untyped_storage().resize_(0)  # PyTorch holds the tensor, and reads it no more
        return None
