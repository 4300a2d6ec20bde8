"""Training on several processes: reduce, gather, shard, on any backend.

    xmem launch -n 2 --backend torch script.py

and in the script, after `xmem.use(...)`:

    xmem.distributed.init()
    model = xmem.distributed.data_parallel(model, optimizer)

Every function but `rank` and its like is collective: all ranks call it, in one order.
"""

from xmem.distributed.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from xmem.distributed.counting import Traffic, traffic
from xmem.distributed.feedback import ErrorFeedback
from xmem.distributed.parallel import Pipeline, pipeline, shard_linear, tensor_parallel
from xmem.distributed.states import full_state, load, load_full_state, save
from xmem.distributed.training import data_parallel, no_sync, shard_model, shard_optimizer
from xmem.distributed.world import (
    barrier,
    destroy,
    init,
    is_initialized,
    local_rank,
    rank,
    world_size,
)

__all__ = [
    "ErrorFeedback",
    "Pipeline",
    "Traffic",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "data_parallel",
    "destroy",
    "full_state",
    "init",
    "is_initialized",
    "load",
    "load_full_state",
    "local_rank",
    "no_sync",
    "pipeline",
    "rank",
    "reduce_scatter",
    "save",
    "shard_linear",
    "shard_model",
    "shard_optimizer",
    "tensor_parallel",
    "traffic",
    "world_size",
]
