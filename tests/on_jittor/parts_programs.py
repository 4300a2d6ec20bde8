"""What the ranks of `test_jittor_sharded_layers.py` run: tensor parallel beside one process."""

import gc
from contextlib import nullcontext

import jittor as jt
import numpy as np
from jittor import nn
from xmem_jittor import methods, shares
from xmem_jittor.training import Adam

import xmem
import xmem.distributed as xd
from xmem.errors import XmemError

PLAN = {"blocks.*.up": "out", "blocks.*.down": "in"}
STEPS, BATCH, WIDTH, CLASSES = 10, 16, 32, 10


class Block(nn.Module):
    def __init__(self, width, dropout=0.0):
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def execute(self, x):
        return x + 0.1 * self.drop(self.down(nn.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout=0.0, blocks=4):
        self.blocks = nn.ModuleList([Block(WIDTH, dropout) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, CLASSES)
        fill(self)
        self.train()

    def execute(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Perceptron(nn.Module):
    """Layers that can all be shared out."""

    def __init__(self, width=256, hidden=1024, pairs=4):
        self.ups = nn.ModuleList([nn.Linear(width, hidden) for _ in range(pairs)])
        self.downs = nn.ModuleList([nn.Linear(hidden, width) for _ in range(pairs)])

    def execute(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = down(nn.gelu(up(x)))
        return x


def fill(model):
    """Give a model the same numbers everywhere."""
    random = np.random.RandomState(0)
    for _, p in sorted(model.named_parameters()):
        values = random.randn(*p.shape) / np.sqrt(p.shape[-1])
        p.assign(jt.array(values.astype("float32"))).start_grad()


def batches(count=STEPS):
    random = np.random.RandomState(1)
    return [
        (
            random.randn(BATCH, WIDTH).astype("float32"),
            random.randn(BATCH, CLASSES).astype("float32"),
        )
        for _ in range(count)
    ]


def mean_loss(output, target):
    return (output - target).sqr().mean()


def adam(model):
    # A large eps: near 0 Adam makes steps of their full size out of gradients that are rounding.
    return Adam([p for p in model.parameters() if not p.is_stop_grad()], 1e-3, eps=1e-4)


def alike(model):
    """Let nothing of a model be averaged: every rank computes the same on the whole batch."""
    for p in model.parameters():
        shares.mark(p, shares.Share("equal", tuple(p.shape), str(p.dtype)))
    methods.hold(model)
    return model


def together(dtype, bits):
    if dtype is not None:
        return xmem.autocast(dtype)
    return nullcontext() if bits is None else xmem.compress_activations(bits=bits, min_bytes=256)


def trained(model, *, parts=1, dtype=None, bits=None):
    """Train; returns the losses."""
    optimizer = adam(model)
    losses = []
    for x, y in batches():
        xmem.zero_grad(optimizer)
        total = 0.0
        with xmem.accumulate(parts):
            for inputs, targets in zip(np.split(x, parts), np.split(y, parts), strict=True):
                with together(dtype, bits):
                    loss = mean_loss(model(jt.array(inputs)), jt.array(targets))
                xmem.backward(loss, optimizer)
                total += loss.item() / parts
        losses.append(total)
        xmem.optimizer_step(optimizer)
    return losses


def whole(model):
    """Return all parameters as one process has them."""
    found = {}
    for name, p in model.named_parameters():
        share = shares.of(p)
        value = p.detach()
        if share is not None and share.kind == "part":
            value = jt.concat(list(xd.all_gather(value)), share.axis)
        found[name] = value.numpy()
    return found


def difference(first, second):
    assert first.keys() == second.keys()
    return float(max(np.abs(first[name] - second[name]).max() for name in first))


def parity(**options):
    """Return how far losses and parameters are from those of one process."""
    checkpointed = options.pop("checkpointed", False)
    alone = alike(Net())
    expected = trained(alone, **options)
    model = xd.tensor_parallel(Net(), PLAN)
    if checkpointed:
        xmem.apply_checkpointing(model, "every")
    losses = trained(model, **options)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return apart, difference(whole(model), whole(alone))


def parities():
    return {
        "plain": parity(),
        "accumulated": parity(parts=2),
        "checkpointed": parity(checkpointed=True),
        "both": parity(parts=2, checkpointed=True),
    }


def peak(model, step, optimizer):
    """Return bytes of a step."""
    step()
    step()
    gc.collect()
    with xmem.measure(model=model, optimizer=optimizer) as m:
        step()
        jt.sync_all()
    return {"static": m.static_bytes, "peak": m.peak_allocated_bytes}


def memory():
    """Return bytes of a step of a perceptron in one process, and of its parts."""
    found = {}
    random = np.random.RandomState(0)
    x, y = (jt.array(random.randn(512, 256).astype("float32")) for _ in range(2))
    for name in ("alone", "parts"):
        model = alike(Perceptron()) if name == "alone" else Perceptron()
        if name == "parts":
            xd.tensor_parallel(model, {"ups.*": "out", "downs.*": "in"})
        optimizer = adam(model)

        def step(model=model, optimizer=optimizer):
            xmem.zero_grad(optimizer)
            xmem.backward(mean_loss(model(x), y), optimizer)
            xmem.optimizer_step(optimizer)

        found[name] = peak(model, step, optimizer)
        found[name]["parameters"] = sum(p.nbytes for p in model.parameters())
        del model, optimizer, step
    return found


def dropout(rank):
    """Return whether ranks that were seeded differently agree on what is whole."""
    rows = []
    for checkpointed in (False, True):
        model = Net(dropout=0.2)
        jt.set_global_seed(100 + rank)
        xd.tensor_parallel(model, PLAN)
        if checkpointed:
            xmem.apply_checkpointing(model, "every")
        rows.append(trained(model))
        equal = [
            np.array_equal(values[0], values[rank])
            for _, p in model.named_parameters()
            if shares.of(p).kind == "equal"
            for values in [xd.all_gather(p.detach()).numpy()]
        ]
        rows.append(all(equal) and len(equal))
    return rows


def norms(rank, size):
    """Return norms over parts and in one process, and what a scaler does with one bad part."""
    found = []
    [(x, y)] = batches(1)
    x, y = jt.array(x), jt.array(y)
    for norm_type in (2.0, 1.0, float("inf")):
        row = []
        for model in (alike(Net()), xd.tensor_parallel(Net(), PLAN)):
            optimizer = adam(model)
            xmem.backward(mean_loss(model(x), y), optimizer)
            row.append(float(xmem.clip_grad_norm_(optimizer, 0.1, norm_type=norm_type).item()))
        found.append(row)
    model = xd.tensor_parallel(Net(), PLAN)
    optimizer = adam(model)
    scaler = xmem.GradScaler()
    before = {name: p.numpy() for name, p in model.named_parameters()}
    xmem.backward(scaler.scale(mean_loss(model(x), y)), optimizer)
    if rank == size - 1:
        group = optimizer.param_groups[0]
        parts = [shares.of(p).kind == "part" for p in group["params"]]
        gradient = group["grads"][parts.index(True)]
        gradient.update(gradient / 0)
    scaler.step(optimizer)
    scaler.update()
    stayed = all(np.array_equal(p.numpy(), before[name]) for name, p in model.named_parameters())
    return found, stayed


def traffic():
    """Return the all-reduces of one step, and of one with activations packed."""
    found = []
    for bits in (None, 8):
        model = xd.tensor_parallel(Net(), PLAN)
        optimizer = adam(model)
        [(x, y)] = batches(1)
        xd.traffic(reset=True)
        with together(None, bits):
            loss = mean_loss(model(jt.array(x)), jt.array(y))
        xmem.backward(loss, optimizer)
        loss.item()
        seen = xd.traffic()
        found.append([seen.calls, seen.sent_bytes])
    return found


def single(rank, size):
    """Return whether single layers compute their parts, and their gradients."""
    x = jt.array(np.random.RandomState(0).randn(5, 3, 8).astype("float32"))
    layer = nn.Linear(8, 12)
    xd.broadcast(layer.parameters(), in_place=True)
    expected = layer(x)
    out = xd.shard_linear(layer, dim="out")
    mine = expected.numpy()[..., rank * 12 // size : (rank + 1) * 12 // size]
    outputs_agree = np.allclose(out(x).numpy(), mine, atol=1e-6)
    gradient = jt.grad(out(x).sqr().sum(), x).numpy()
    gradients_agree = np.allclose(gradient, jt.grad(layer(x).sqr().sum(), x).numpy(), atol=1e-4)
    inner = nn.Linear(12, 4, bias=False)
    xd.broadcast(inner.parameters(), in_place=True)
    summed = xd.shard_linear(inner, dim="in")(jt.array(mine))
    sums_agree = np.allclose(summed.numpy(), inner(expected).numpy(), atol=1e-5)
    return [bool(v) for v in (outputs_agree, gradients_agree, sums_agree)]


def refusals(rank):
    """Return what wrong calls raise, and whether the model has stayed whole."""
    model = Net()
    before = [tuple(p.shape) for p in model.parameters()]
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    parallel = Net()
    xd.data_parallel(parallel, adam(parallel))
    done = xd.tensor_parallel(Net(), PLAN)

    def short():
        with xmem.accumulate(2):
            xd.tensor_parallel(model, PLAN)

    calls = {
        "path": lambda: xd.tensor_parallel(model, {"blocks.0.upp": "out"}),
        "sizes": lambda: xd.tensor_parallel(nn.Sequential(nn.Linear(4, 5)), {"0": "out"}),
        "tied": lambda: xd.tensor_parallel(tied, {"1": "out"}),
        "differs": lambda: xd.tensor_parallel(model, PLAN if rank else {"head": "out"}),
        "norm": lambda: xd.shard_linear(nn.LayerNorm(4), dim="out"),
        "dim": lambda: xd.shard_linear(nn.Linear(4, 4), dim=0),
        "averaged": lambda: xd.tensor_parallel(parallel, PLAN),
        "done": lambda: xd.tensor_parallel(done, {"head": "out"}),
        "accumulating": short,
        "inputs": lambda: xd.shard_linear(nn.Linear(8, 4), dim="in")(jt.zeros((1, 8))),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except XmemError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found, before == [tuple(p.shape) for p in model.parameters()]


def all_of_it(here, report):
    report(
        parities=parities(),
        half=parity(dtype="float16"),
        half_checkpointed=parity(dtype="float16", checkpointed=True),
        compressed=parity(bits=8),
        compressed_checkpointed=parity(bits=8, checkpointed=True),
        memory=memory(),
        dropout=dropout(here.rank),
        norms=norms(here.rank, here.size),
        traffic=traffic(),
        single=single(here.rank, here.size),
        refusals=refusals(here.rank),
    )
    xd.destroy()
