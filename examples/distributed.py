"""One script for several ranks, on both frameworks.

    xmem launch -n 2 --backend torch examples/distributed.py torch zero3
    xmem launch -n 2 --backend jittor examples/distributed.py jittor pipeline

The last word: data_parallel, zero1, zero3, tensor_parallel or pipeline. One more names a file that
the state is saved to: one process, or any number of ranks, can load it (not of a pipeline, whose
stages are models of their own).
"""

import sys
from itertools import pairwise

import numpy as np

import xmem
import xmem.distributed as xd

framework, technique = sys.argv[1:3]
backend = xmem.use(framework)
here = xd.init()

WIDTH, BLOCKS = 128, 4
LAYERS = 3 * BLOCKS + 1  # up, GELU, down in each block; a head


def torch_parts(first, last):
    """Return layers of the model, native to PyTorch, and what makes an optimizer of a model."""
    import torch
    from torch import nn

    def layer(number):
        if number == LAYERS - 1:
            return nn.Linear(WIDTH, WIDTH)
        return (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))[number % 3]

    model = nn.Sequential(*map(layer, range(first, last))).to(backend.device)
    return model, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)


def jittor_parts(first, last):
    """Return the same, native to Jittor."""
    from jittor import nn, optim

    def layer(number):
        if number == LAYERS - 1:
            return nn.Linear(WIDTH, WIDTH)
        return (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))[number % 3]

    model = nn.Sequential(*map(layer, range(first, last)))
    return model, lambda m: optim.AdamW(m.parameters(), lr=1e-3)


parts = {"torch": torch_parts, "jittor": jittor_parts}[framework]

# From here on nothing depends on the framework.


def loss_of(output, target):
    """Return a mean over the batch."""
    return ((output - target) ** 2).mean()


def divided():
    """Return the module on this rank, its optimizer, what is called, and a pipeline or None."""
    if technique == "pipeline":
        cuts = [3 * (BLOCKS * stage // here.size) for stage in range(here.size)] + [LAYERS]
        stages = [
            lambda first=first, last=last: parts(first, last)[0] for first, last in pairwise(cuts)
        ]
        pipeline = xd.pipeline(stages, micro_batches=2 * here.size, loss_fn=loss_of)
        optimizer = parts(0, 0)[1](pipeline.module)
        return pipeline.module, optimizer, None, pipeline
    model, optimizer_of = parts(0, LAYERS)
    if technique == "zero3":
        model = xd.shard_model(model, blocks=[str(n) for n in range(LAYERS) if n % 3 != 1])
        return model, optimizer_of(model), model, None
    if technique == "tensor_parallel":
        plan = {str(n): "out" if n % 3 == 0 else "in" for n in range(LAYERS - 1) if n % 3 != 1}
        model = xd.tensor_parallel(model, plan)
        return model, optimizer_of(model), model, None
    optimizer = optimizer_of(model)
    if technique == "zero1":
        optimizer = xd.shard_optimizer(optimizer)
    return model, optimizer, xd.data_parallel(model, optimizer), None


model, optimizer, called, pipeline = divided()
batch = np.random.default_rng(0).standard_normal((64, WIDTH), dtype=np.float32)
if technique in ("data_parallel", "zero1", "zero3"):  # each rank has its share of the batch
    batch = np.split(batch, here.size)[here.rank]
x = backend.models.tensor(batch)
for step in range(20):
    xd.traffic(reset=True)
    with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
        if pipeline is not None:
            loss = pipeline.step(x, x, optimizer)
        else:
            loss = loss_of(called(x), x)
            xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)
    if step % 5 == 0 and here.rank == 0:
        value = loss if pipeline is not None else xmem.log_value(loss)
        print(f"step {step}: loss {value:.4f}", flush=True)
sent = sum(xd.traffic().sent_bytes.values())
print(
    f"rank {here.rank} of {here.size}: peak {m.peak_allocated_bytes} bytes, sent {sent} bytes",
    flush=True,
)
if len(sys.argv) > 3 and pipeline is None:
    xd.save(sys.argv[3], model, optimizer)
xd.destroy()
