"""Two processes train under DistributedDataParallel, plain and in regions: run by a test.

Usage: python data_parallel.py RANK PORT LAYOUT FILE
"""

import ast
import datetime
import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xmem


def main(rank, port, layout, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    xmem.use("torch", device="cpu")
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2))
        for _ in range(4)
    ]
    model = nn.Sequential(nn.Linear(16, 16), *blocks)
    if layout is not None:
        xmem.apply_checkpointing(model, layout)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(100 + rank)
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:  # accumulation
            with parallel.no_sync():
                parallel(torch.randn(8, 16)).square().mean().backward()
        parallel(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter, which std::terminate ends then


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], ast.literal_eval(sys.argv[3]), sys.argv[4])
