"""Training that runs alike in one process and on ranks, each with its part of the batch.

Imports Jittor: only after `xmem.use`.
"""

import gc

import jittor as jt
import numpy as np
from jittor import nn
from shared_out import furthest, listed  # noqa: F401  the programs import all of it
from xmem_jittor import gathering, shares

import xmem

WIDTH = 32
BATCH = 16
STEPS = 10


class Block(nn.Module):
    def __init__(self, width, dropout=0.0, norm=None):
        self.linear = nn.Linear(width, width)
        self.norm = norm(width) if norm else None
        self.drop = nn.Dropout(dropout) if dropout else None

    def execute(self, x):
        y = nn.gelu(self.linear(x))
        if self.norm is not None:
            y = self.norm(y)
        if self.drop is not None:
            y = self.drop(y)
        return x + 0.5 * y


def chain(blocks=4, width=WIDTH, seed=0, **kinds):
    """Return blocks and a head, with weights from NumPy."""
    net = nn.Sequential(*[Block(width, **kinds) for _ in range(blocks)], nn.Linear(width, 8))
    return weights(net, seed)


def weights(net, seed=0):
    rng = np.random.RandomState(seed)
    for name, p in net.named_parameters():
        if not p.is_stop_grad() and "norm" not in name:
            p.update(jt.array((rng.randn(*p.shape) / np.sqrt(p.shape[-1])).astype("float32")))
    jt.sync(net.parameters())
    return net


def batches(steps=STEPS, batch=BATCH, width=WIDTH, targets=8):
    rng = np.random.RandomState(1)
    x = rng.randn(steps, batch, width).astype("float32")
    return x, rng.randn(steps, batch, targets).astype("float32")


def mine(values, rank, size, parts=1, part=0):
    """Return a rank's share of a micro-batch of a whole batch."""
    each = len(values) // parts
    values = values[part * each : (part + 1) * each]
    each = len(values) // size
    return jt.array(values[rank * each : (rank + 1) * each])


def loss_of(net, x, y):
    return ((net(x) - y) ** 2).mean()


def train(net, optimizer, rank=0, size=1, *, parts=1, steps=STEPS, step=None, model=None):
    """Train on this rank's share of each batch; returns the losses."""
    xs, ys = batches()
    losses = []
    for x, y in zip(xs[:steps], ys[:steps], strict=True):
        total = 0.0

        def part_of(part, x=x, y=y):
            return mine(x, rank, size, parts, part), mine(y, rank, size, parts, part)

        if step is not None:
            total = step(net, optimizer, part_of)  # which calls it with the part's number
        elif parts == 1:
            loss = loss_of(net, *part_of(0))
            xmem.backward(loss, optimizer)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
            total = loss.item()
        else:
            with xmem.accumulate(parts, optimizer, model=model):
                for part in range(parts):
                    loss = loss_of(net, *part_of(part))
                    xmem.backward(loss, optimizer)
                    total += loss.item() / parts
        losses.append(total)
    return losses


def values(net):
    """Return all parameters, whole."""
    found = {}
    for name, p in net.named_parameters():
        share = shares.of(p)
        owned = share is not None and share.kind == "owned"
        found[name] = np.array((gathering.whole(p, share) if owned else p).numpy())
    return found


def live_bytes():
    jt.sync_all(True)
    gc.collect()
    jt.sync_all(True)
    return xmem.api.active().measure.counters().allocated_bytes


def peak_bytes():
    return xmem.api.active().measure.counters().peak_allocated_bytes


def reset_peak():
    xmem.api.active().measure.reset_peak()
