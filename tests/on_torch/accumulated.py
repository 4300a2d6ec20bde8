"""Two processes accumulate under DistributedDataParallel and count reductions: run by a test.

Usage: python accumulated.py RANK PORT FILE
"""

import datetime
import os
import sys

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import xmem

STEPS = 4


def main(rank, port, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    xmem.use("torch", device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counts = {"accumulate": 0, "by hand": 0}
    doing = "accumulate"

    def counting(group, bucket):
        counts[doing] += 1
        return allreduce_hook(group, bucket)

    parallel.register_comm_hook(None, counting)
    found = {}
    for doing in counts:
        torch.manual_seed(100 + rank)
        parts = torch.randn(8 * STEPS, 16).chunk(STEPS)
        optimizer.zero_grad()
        if doing == "accumulate":
            with xmem.accumulate(STEPS, model=parallel):
                for part in parts:
                    xmem.backward(parallel(part).square().mean(), optimizer)
        else:
            for part in parts:
                (parallel(part).square().mean() / STEPS).backward()
        found[doing] = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    if rank == 0:
        torch.save({**found, "reduced": counts}, path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter, which std::terminate ends then


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
