"""What the ranks of `test_jittor_pipelines.py` run: a pipeline beside one process."""

import jittor as jt
import numpy as np
from jittor import nn
from parts_programs import (
    BATCH,
    CLASSES,
    WIDTH,
    Block,
    Net,
    adam,
    alike,
    batches,
    mean_loss,
    peak,
    together,
)

import xmem
import xmem.distributed as xd
from xmem.errors import XmemError

MICRO_BATCHES = 4


def cut(whole, count):
    """Return the stages of a model, with its own parameters."""
    blocks = list(whole.blocks)
    each = len(blocks) // count
    parts = [blocks[i * each : (i + 1) * each] for i in range(count)]
    parts[-1].append(whole.head)
    return [nn.Sequential(*part) for part in parts]


def checkpoint(stage):
    blocks = [m for m in stage.modules() if isinstance(m, Block)]
    xmem.apply_checkpointing(stage, "every", blocks=blocks)


def alone(*, dtype=None, bits=None):
    """Train a whole model in this process; returns it and its losses."""
    whole = alike(Net())
    optimizer = adam(whole)
    losses = []
    for x, y in batches():
        xmem.zero_grad(optimizer)
        with together(dtype, bits):
            loss = mean_loss(whole(jt.array(x)), jt.array(y))
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        losses.append(loss.item())
    return whole, losses


def parity(here, schedule, *, checkpointed=False, **options):
    """Return how far losses and this stage's parameters are from those of one process."""
    whole, expected = alone(**options)
    pipe = xd.pipeline(
        cut(Net(), here.size), micro_batches=MICRO_BATCHES, loss_fn=mean_loss, schedule=schedule
    )
    if checkpointed:
        checkpoint(pipe.module)
    optimizer = adam(pipe.module)
    losses = []
    for x, y in batches():
        xmem.zero_grad(optimizer)
        with together(**{"dtype": None, "bits": None, **options}):
            losses.append(pipe.step(jt.array(x), jt.array(y), optimizer))
        xmem.optimizer_step(optimizer)
    same = cut(whole, here.size)[here.rank]
    pairs = zip(pipe.module.parameters(), same.parameters(), strict=True)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return apart, float(max(np.abs(a.numpy() - b.numpy()).max() for a, b in pairs))


def parities(here):
    return {
        f"{schedule} {'checkpointed' if checkpointed else ''}": parity(
            here, schedule, checkpointed=checkpointed
        )
        for schedule in ("1f1b", "gpipe")
        for checkpointed in (False, True)
    }


class Wide(nn.Module):
    def __init__(self):
        self.linear = nn.Linear(256, 256, bias=False)

    def execute(self, x):
        return nn.gelu(self.linear(x))


def memory(here):
    """Return bytes of steps of 12 layers, in one process and in a pipeline."""
    random = np.random.RandomState(0)
    x, y = (jt.array(random.randn(4096, 256).astype("float32")) for _ in range(2))
    jt.sync([x, y])
    found = {}
    for schedule in ("gpipe", "1f1b", "1f1b checkpointed"):
        stages = [lambda: nn.Sequential(*[Wide() for _ in range(12 // here.size)])] * here.size
        name = schedule.partition(" ")[0]
        pipe = xd.pipeline(stages, micro_batches=8, loss_fn=mean_loss, schedule=name)
        if schedule != name:
            xmem.apply_checkpointing(pipe.module, "every")
        optimizer = adam(pipe.module)

        def step(pipe=pipe, optimizer=optimizer):
            xmem.zero_grad(optimizer)
            pipe.step(x, y, optimizer)
            xmem.optimizer_step(optimizer)

        found[schedule] = peak(pipe.module, step, optimizer)
        del pipe, optimizer, step
    model = alike(nn.Sequential(*[Wide() for _ in range(12)]))
    optimizer = adam(model)

    def plain_step():
        xmem.zero_grad(optimizer)
        xmem.backward(mean_loss(model(x), y), optimizer)
        xmem.optimizer_step(optimizer)

    found["alone"] = peak(model, plain_step, optimizer)
    return found


def heavy(here):
    """Return bytes of a step of layers whose weights are nearly all there is."""
    x = jt.ones((32, 256)).sync()
    stages = [lambda: nn.Sequential(*[Wide() for _ in range(12 // here.size)])] * here.size
    pipe = xd.pipeline(stages, micro_batches=4, loss_fn=mean_loss)
    optimizer = adam(pipe.module)

    def step():
        xmem.zero_grad(optimizer)
        pipe.step(x, x, optimizer)
        xmem.optimizer_step(optimizer)

    layers = [p.nbytes for p in pipe.module.parameters()]
    return {**peak(pipe.module, step, optimizer), "gradients": sum(layers), "layer": layers[0]}


def statistics(here):
    """Return whether running statistics are those of the micro-batches, each counted once."""
    random = np.random.RandomState(2)
    x = random.randn(12, 6).astype("float32")
    parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm(6, sync=False)) for _ in range(here.size)]
    plain = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm(6, sync=False)) for _ in range(here.size)]
    for part, copy in zip(parts, plain, strict=True):
        xd.broadcast(part.parameters(), in_place=True)
        copy.load_parameters({name: p.numpy() for name, p in part.state_dict().items()})
    pipe = xd.pipeline(parts, micro_batches=3, loss_fn=mean_loss, schedule="gpipe")
    pipe.step(jt.array(x), jt.array(x), adam(pipe.module))
    for piece in np.split(x, 3):
        value = jt.array(piece)
        for part in plain:
            value = part(value)
        value.sync()
    mine, expected = pipe.module[1], plain[here.rank][1]
    pairs = [(getattr(mine, n), getattr(expected, n)) for n in ("running_mean", "running_var")]
    return [bool(np.allclose(a.numpy(), b.numpy(), atol=1e-6)) for a, b in pairs]


def changing(here):
    """Return how far losses of batches of changing sizes are from one process's."""
    whole = Net()
    pipe = xd.pipeline(cut(Net(), here.size), micro_batches=2, loss_fn=mean_loss, schedule="gpipe")
    optimizer = jt.optim.Optimizer(pipe.module.parameters(), 0.0)
    [(x, y)] = batches(1)
    found = []
    for size in (16, 4, 16, 8, 2, 4):
        with jt.no_grad():
            expected = mean_loss(whole(jt.array(x[:size])), jt.array(y[:size])).item()
        loss = pipe.step(jt.array(x[:size]), jt.array(y[:size]), optimizer)
        found.append(abs(loss - expected))
    return max(found)


def adding(here):
    """Return whether gradients of two steps add up, and norms are of all stages."""
    whole = alike(Net())
    sums = adam(whole)
    pipe = xd.pipeline(cut(Net(), here.size), micro_batches=4, loss_fn=mean_loss)
    optimizer = adam(pipe.module)
    for x, y in batches(2):
        xmem.backward(mean_loss(whole(jt.array(x)), jt.array(y)), sums)
        pipe.step(jt.array(x), jt.array(y), optimizer)
    same = cut(whole, here.size)[here.rank]
    held = {
        id(p): g for p, g in zip(*map(sums.param_groups[0].get, ("params", "grads")), strict=True)
    }
    pairs = [
        (gradient.numpy(), held[id(p)].numpy())
        for p, gradient in zip(
            [p for p in same.parameters() if not p.is_stop_grad()],
            optimizer.param_groups[0]["grads"],
            strict=True,
        )
    ]
    agree = all(np.allclose(a, b, atol=1e-6) for a, b in pairs)
    expected = float(xmem.clip_grad_norm_(sums, 0.1).item())
    norm = float(xmem.clip_grad_norm_(optimizer, 0.1).item())
    return agree, norm, expected, optimizer.n_step


def traffic(here):
    """Return what this rank sends in a step, the first of a pipeline."""
    pipe = xd.pipeline(cut(Net(), here.size), micro_batches=4, loss_fn=mean_loss)
    [(x, y)] = batches(1)
    xd.traffic(reset=True)
    pipe.step(jt.array(x), jt.array(y), adam(pipe.module))
    seen = xd.traffic()
    return seen.calls, seen.sent_bytes


def dropout(here):
    """Return losses with dropout, plain and with checkpointed blocks."""
    rows = []
    for checkpointed in (False, True):
        pipe = xd.pipeline(cut(Net(0.2), here.size), micro_batches=4, loss_fn=mean_loss)
        if checkpointed:
            checkpoint(pipe.module)
        optimizer = adam(pipe.module)
        rows.append([])
        for x, y in batches(3):
            xmem.zero_grad(optimizer)
            rows[-1].append(pipe.step(jt.array(x), jt.array(y), optimizer))
            xmem.optimizer_step(optimizer)
    return rows


def refusals(here):
    """Return what wrong calls raise."""
    stages = cut(Net(), here.size)
    pipe = xd.pipeline(stages, micro_batches=4, loss_fn=mean_loss)
    optimizer = adam(pipe.module)
    [(x, y)] = [(jt.array(x), jt.array(y)) for x, y in batches(1)]
    options = {"micro_batches": 4, "loss_fn": mean_loss}

    def accumulated():
        with xmem.accumulate(2):
            pipe.step(x, y, optimizer)

    def half_here():
        with together("float16" if here.rank else None, None):
            pipe.step(x, y, optimizer)

    def without_gradients():
        with jt.no_grad():
            pipe.step(x, y, optimizer)

    sharded = nn.Sequential(xd.shard_linear(nn.Linear(4, 4), dim="out"))
    calls = {
        "stages": lambda: xd.pipeline(stages[:1], **options),
        "module": lambda: xd.pipeline([lambda: 3] * here.size, **options),
        "few": lambda: xd.pipeline(stages, micro_batches=1, loss_fn=mean_loss),
        "schedule": lambda: xd.pipeline(stages, **options, schedule="1fb"),
        "differs": lambda: xd.pipeline(stages, micro_batches=4 + here.rank, loss_fn=mean_loss),
        "sharded": lambda: xd.pipeline([sharded] * here.size, **options),
        "batch": lambda: pipe.step(x[:6], y[:6], optimizer),
        "targets": lambda: pipe.step(x, y[:4], optimizer),
        "tensor": lambda: pipe.step(x.numpy(), y, optimizer),
        "optimizer": lambda: pipe.step(x, y, pipe.module),
        "strange": lambda: pipe.step(x, y, adam(Net())),
        "accumulating": accumulated,
        "half": half_here,
        "no_grad": without_gradients,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except XmemError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found, pipe.step(x, y, optimizer)


def all_of_it(here, report):
    report(
        parities=parities(here),
        half=parity(here, "1f1b", dtype="float16"),
        half_checkpointed=parity(here, "1f1b", dtype="float16", checkpointed=True),
        compressed=parity(here, "1f1b", bits=8),
        compressed_checkpointed=parity(here, "1f1b", bits=8, checkpointed=True),
        memory=memory(here),
        heavy=heavy(here),
        statistics=statistics(here),
        changing=changing(here),
        adding=adding(here),
        traffic=traffic(here),
        dropout=dropout(here),
        refusals=refusals(here),
        sizes=[BATCH, WIDTH, CLASSES],
    )
    xd.destroy()


def failing(here, report):
    """Let the last stage's loss fail in the third micro-batch of the second step."""
    calls = []

    def loss_fn(output, target):
        calls.append(1)
        if len(calls) == 7:
            raise RuntimeError("no loss today")
        return mean_loss(output, target)

    pipe = xd.pipeline(cut(Net(), here.size), micro_batches=4, loss_fn=loss_fn)
    optimizer = adam(pipe.module)
    [(x, y)] = batches(1)
    try:
        for _ in range(3):
            pipe.step(jt.array(x), jt.array(y), optimizer)
    except RuntimeError as error:
        report(error=f"{type(error).__name__}: {error}", ranks=getattr(error, "ranks", None))
        raise
