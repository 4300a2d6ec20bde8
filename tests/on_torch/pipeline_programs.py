"""What the ranks of `test_torch_pipelines.py` run: a pipeline beside one process."""

import functools

import gpt
import torch
from sharded_programs import adam, batches
from torch import nn
from torch.nn import functional

import xmem
import xmem.distributed as xd
from xmem.errors import XmemError

MICRO_BATCHES = 4
LAYERS = 4


class Front(nn.Module):
    """Embeddings, and the first layers."""

    def __init__(self, whole, layers):
        super().__init__()
        self.token, self.position = whole.token, whole.position
        self.layers = nn.Sequential(*layers)

    def forward(self, tokens):
        return self.layers(self.token(tokens) + self.position[: tokens.shape[1]])


def model(dropout=0.0, **sizes):
    torch.manual_seed(0)
    sizes = sizes or {"width": 32, "heads": 2, "vocabulary": 50, "length": 16}
    return gpt.GPT(layers=LAYERS, dropout=dropout, **sizes)


def cut(whole, count):
    """Return the stages of a model, with its own parameters."""
    each = LAYERS // count
    parts = [list(whole.layers[i * each : (i + 1) * each]) for i in range(count)]
    middle = [nn.Sequential(*part) for part in parts[1:-1]]
    return [Front(whole, parts[0]), *middle, nn.Sequential(*parts[-1], whole.norm, whole.head)]


def mean_loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def checkpoint(stage):
    layers = [m for m in stage.modules() if isinstance(m, gpt.Layer)]
    xmem.apply_checkpointing(stage, "every", blocks=layers)


@functools.cache
def alone(*, dtype=None, bits=None):
    """Train a whole model in this process; returns it and its losses."""
    whole = model()
    optimizer = adam(whole)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        with together(dtype, bits):
            loss = mean_loss(whole(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return whole, losses


def together(dtype, bits):
    if dtype is not None:
        return xmem.autocast(dtype)
    if bits is not None:
        return xmem.compress_activations(bits=bits, min_bytes=256)
    return torch.enable_grad()


def parity(here, schedule, *, checkpointed=False, **options):
    """Return how far losses and this stage's parameters are from those of one process."""
    whole, expected = alone(**options)
    pipe = xd.pipeline(
        cut(model(), here.size), micro_batches=MICRO_BATCHES, loss_fn=mean_loss, schedule=schedule
    )
    if checkpointed:
        checkpoint(pipe.module)
    optimizer = adam(pipe.module)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        with together(**{"dtype": None, "bits": None, **options}):
            losses.append(pipe.step(x, y, optimizer))
        xmem.optimizer_step(optimizer)
    same = cut(whole, here.size)[here.rank]
    pairs = zip(pipe.module.parameters(), same.parameters(), strict=True)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return apart, max((a - b).abs().max().item() for a, b in pairs)


EACH = tuple((schedule, on) for schedule in ("1f1b", "gpipe") for on in (False, True))


def parities(here, ways=EACH):
    return {
        f"{schedule} {'checkpointed' if checkpointed else ''}": parity(
            here, schedule, checkpointed=checkpointed
        )
        for schedule, checkpointed in ways
    }


def peak(stages, x, y, loss_fn, *, micro_batches, schedule="1f1b"):
    """Return bytes of a step of a pipeline."""
    pipe = xd.pipeline(stages, micro_batches=micro_batches, loss_fn=loss_fn, schedule=schedule)
    optimizer = torch.optim.AdamW(pipe.module.parameters(), 1e-3, fused=True)

    def step():
        optimizer.zero_grad()
        pipe.step(x, y, optimizer)
        optimizer.step()

    step()
    step()
    with xmem.measure(model=pipe.module, optimizer=optimizer) as m:
        step()
    return {"static": m.static_bytes, "peak": m.peak_allocated_bytes}


def memory(here):
    """Return bytes of steps of 13.1 MB of parameters, and of micro-batches of one size."""
    sizes = {"width": 256, "heads": 4, "vocabulary": 500, "length": 64}
    [(x, y)] = batches(1, vocabulary=500, length=64, size=8)
    stages = [lambda i=i: cut(model(**sizes), here.size)[i] for i in range(here.size)]
    found = {"gpt": peak(stages, x, y, mean_loss, micro_batches=8)}
    blocks = [lambda: nn.Sequential(*[gpt.Layer(256, 4, 0.0) for _ in range(2)])] * here.size
    x, y = torch.randn(2, 8, 64, 256)
    found["blocks"] = peak(blocks, x, y, functional.mse_loss, micro_batches=4)
    wide = [lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU())] * here.size
    for count in (4, 32):
        for schedule in ("1f1b", "gpipe"):
            x, y = torch.randn(2, 256 * count, 64)
            row = peak(wide, x, y, functional.mse_loss, micro_batches=count, schedule=schedule)
            found[f"{schedule} {count}"] = row["peak"] - x.nbytes - y.nbytes
    return found


def statistics(here):
    """Return whether running statistics are those of the micro-batches, each counted once."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(here.size)]
    plain = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(here.size)]
    for part, copy in zip(parts, plain, strict=True):
        copy.load_state_dict(part.state_dict())
    x, y = torch.randn(2, 12, 6)
    pipe = xd.pipeline(parts, micro_batches=3, loss_fn=functional.mse_loss, schedule="gpipe")
    pipe.step(x, y, adam(pipe.module))
    for piece in x.chunk(3):
        value = piece
        for part in plain:
            value = part(value)
    mine, expected = pipe.module[1], plain[here.rank][1]
    return [
        mine.num_batches_tracked.item(),
        torch.allclose(mine.running_mean, expected.running_mean, atol=1e-6),
        torch.allclose(mine.running_var, expected.running_var, atol=1e-6),
    ]


def changing(here):
    """Return losses of batches of changing sizes, and how far they are from one process's."""
    whole = model()
    pipe = xd.pipeline(
        cut(model(), here.size), micro_batches=2, loss_fn=mean_loss, schedule="gpipe"
    )
    optimizer = torch.optim.SGD(pipe.module.parameters(), 0.0)
    found = []
    for size, length in ((8, 16), (4, 16), (8, 7), (8, 16), (2, 1), (4, 16)):
        [(x, y)] = batches(1, size=size, length=length)
        optimizer.zero_grad()
        with torch.no_grad():
            expected = mean_loss(whole(x), y).item()
        found.append(abs(pipe.step(x, y, optimizer) - expected))
    return max(found)


def adding(here):
    """Return whether gradients of two steps add up, and norms are of all stages."""
    whole = model()
    pipe = xd.pipeline(cut(model(), here.size), micro_batches=4, loss_fn=mean_loss)
    optimizer = adam(pipe.module)
    for x, y in batches(2):
        mean_loss(whole(x), y).backward()
        pipe.step(x, y, optimizer)
    same = cut(whole, here.size)[here.rank]
    agree = all(
        torch.allclose(a.grad, b.grad, atol=1e-6)
        for a, b in zip(pipe.module.parameters(), same.parameters(), strict=True)
    )
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    norm = xmem.clip_grad_norm_(optimizer, 0.1)
    return agree, float(norm), float(expected)


def traffic(here):
    """Return what this rank sends in a step, the first of a pipeline."""
    pipe = xd.pipeline(cut(model(), here.size), micro_batches=4, loss_fn=mean_loss)
    [(x, y)] = batches(1)
    xd.traffic(reset=True)
    pipe.step(x, y, adam(pipe.module))
    seen = xd.traffic()
    return seen.calls, seen.sent_bytes, seen.buffer_bytes, seen.seconds


def dropout(here):
    """Return losses with dropout, the same with checkpointed layers."""
    rows = []
    for checkpointed in (False, True):
        pipe = xd.pipeline(cut(model(0.2), here.size), micro_batches=4, loss_fn=mean_loss)
        if checkpointed:
            checkpoint(pipe.module)
        optimizer = adam(pipe.module)
        torch.manual_seed(here.rank)
        rows.append([pipe.step(x, y, optimizer) for x, y in batches(3)])
    return rows


def refusals(here):
    """Return what wrong calls raise."""
    stages = cut(model(), here.size)
    pipe = xd.pipeline(stages, micro_batches=4, loss_fn=mean_loss)
    optimizer = adam(pipe.module)
    [(x, y)] = batches(1)
    options = {"micro_batches": 4, "loss_fn": mean_loss}

    def accumulated():
        with xmem.accumulate(2):
            pipe.step(x, y, optimizer)

    def half_here():
        with together("bfloat16" if here.rank else None, None):
            pipe.step(x, y, optimizer)

    def without_gradients():
        with torch.no_grad():
            pipe.step(x, y, optimizer)

    def scaled():
        pipe.step(x, y, optimizer)
        xmem.GradScaler().step(optimizer)

    sharded = nn.Sequential(xd.shard_linear(nn.Linear(4, 4), dim="out"))
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    calls = {
        "stages": lambda: xd.pipeline(stages[:1], **options),
        "module": lambda: xd.pipeline([lambda: 3] * here.size, **options),
        "few": lambda: xd.pipeline(stages, micro_batches=1, loss_fn=mean_loss),
        "schedule": lambda: xd.pipeline(stages, **options, schedule="1fb"),
        "differs": lambda: xd.pipeline(stages, micro_batches=4 + here.rank, loss_fn=mean_loss),
        "sharded": lambda: xd.pipeline([sharded] * here.size, **options),
        "parallel": lambda: xd.pipeline([parallel] * here.size, **options),
        "batch": lambda: pipe.step(x[:6], y[:6], optimizer),
        "targets": lambda: pipe.step(x, y[:4], optimizer),
        "tensor": lambda: pipe.step(x.tolist(), y, optimizer),
        "optimizer": lambda: pipe.step(x, y, pipe.module),
        "accumulating": accumulated,
        "half": half_here,
        "no_grad": without_gradients,
        "scaler": scaled,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except XmemError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found, pipe.step(x, y, optimizer)


def all_of_it(here):
    return {
        "memory": memory(here),
        "parities": parities(here),
        "half": parity(here, "1f1b", dtype="bfloat16"),
        "half_checkpointed": parity(here, "1f1b", dtype="bfloat16", checkpointed=True),
        "compressed": parity(here, "1f1b", bits=8),
        "compressed_checkpointed": parity(here, "1f1b", bits=8, checkpointed=True),
        "statistics": statistics(here),
        "changing": changing(here),
        "adding": adding(here),
        "traffic": traffic(here),
        "dropout": dropout(here),
        "refusals": refusals(here),
    }


def failing(here, report):
    """Let the last stage's loss fail in the third micro-batch."""
    calls = []

    def loss_fn(output, target):
        calls.append(1)
        if len(calls) == 6:  # the third of the second step; the first step calls it once more
            raise RuntimeError("no loss today")
        return mean_loss(output, target)

    pipe = xd.pipeline(cut(model(), here.size), micro_batches=4, loss_fn=loss_fn)
    optimizer = adam(pipe.module)
    [(x, y)] = batches(1)
    try:
        for _ in range(3):
            pipe.step(x, y, optimizer)
    except RuntimeError as error:
        report(error=f"{type(error).__name__}: {error}", ranks=getattr(error, "ranks", None))
        raise
