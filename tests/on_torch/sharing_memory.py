"""What training takes on each rank: used by a program on ranks."""

import gc

import torch
from on_torch.sharing import loss_of, mine, model

import xmem
import xmem.distributed as xd

MIB = 2**20


def large():
    """13.1 MiB of parameters."""
    return model(layers=4, width=256, vocabulary=500, length=64)


def peaks(kind):
    """Return the peaks of some steps in MiB a rank, static bytes by category, and what is sent."""
    gc.collect()
    before = xmem.api.active().measure.counters().allocated_bytes
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(0, 500, (4, 64), generator=generator) for _ in range(2))
    trained = large()
    if kind == "zero3":
        xd.shard_model(trained)
        called, chosen = trained, torch.optim.AdamW(trained.parameters(), 1e-3, foreach=False)
    else:
        chosen = torch.optim.AdamW(trained.parameters(), 1e-3, fused=True)
        chosen = xd.shard_optimizer(chosen) if kind == "zero1" else chosen
        called = xd.data_parallel(trained, chosen)
    found, batch = [], (mine(ids), mine(targets))
    for _ in range(5):
        xd.traffic(reset=True)
        with xmem.measure(model=trained, optimizer=chosen, inputs=batch) as measured:
            loss = loss_of(called, *batch)
            xmem.backward(loss, chosen)
            xmem.optimizer_step(chosen)
            xmem.zero_grad(chosen)
            del loss
        found.append(round((measured.peak_allocated_bytes - before) / MIB, 3))
    return {
        "peaks": found,
        "categories": {name: size / MIB for name, size in measured.by_category.items()},
        "sent": xd.traffic().sent_bytes,
        "calls": xd.traffic().calls,
        "buffer_bytes": xd.traffic().buffer_bytes,
        "share_of_time": xd.traffic().seconds / measured.seconds,
    }


CHECKS = {kind: lambda kind=kind: peaks(kind) for kind in ("dp", "zero1", "zero3")}
