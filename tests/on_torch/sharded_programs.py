"""What the ranks of `test_torch_sharded_layers.py` run: tensor parallel beside one process."""

import copy

import gpt
import torch
from torch import nn
from torch.nn import functional

import xmem
import xmem.distributed as xd
from xmem.errors import XmemError

PLAN = {"layers.*.expand": "out", "layers.*.contract": "in"}
STEPS = 10


def small(dropout=0.0):
    torch.manual_seed(0)
    return gpt.GPT(layers=3, width=32, heads=2, vocabulary=50, length=16, dropout=dropout)


def batches(count=STEPS, *, vocabulary=50, length=16, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, vocabulary, (2, size, length), generator=generator) for _ in range(count)
    ]


def loss_of(model, x, y):
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def adam(model):
    # A large eps: near 0 Adam makes steps of their full size out of gradients that are rounding.
    return torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4, fused=True)


def trained(model, *, parts=1, dtype=None, bits=None):
    """Train; returns the losses."""
    optimizer = adam(model)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        total = 0.0
        with xmem.accumulate(parts):
            for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                with _together(dtype, bits):
                    loss = loss_of(model, inputs, targets)
                xmem.backward(loss, optimizer)
                total += loss.item() / parts
        losses.append(total)
        xmem.optimizer_step(optimizer)
    return losses


def _together(dtype, bits):
    if dtype is not None:
        return xmem.autocast(dtype)
    if bits is not None:
        return xmem.compress_activations(bits=bits, min_bytes=256)
    return torch.enable_grad()


def whole(model):
    """Return all parameters as one process has them."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            value = parameter.detach()
            axis = getattr(module, "cuts", {}).get(name)
            if axis is not None:
                value = torch.cat(list(xd.all_gather(value)), axis)
            found[f"{path}.{name}".removeprefix(".")] = value
    return found


def difference(first, second):
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def parity(**options):
    """Return how far losses and parameters are from those of one process."""
    checkpointed = options.pop("checkpointed", False)
    alone = small()
    expected = trained(alone, **options)
    model = xd.tensor_parallel(small(), PLAN)
    if checkpointed:
        xmem.apply_checkpointing(model, "every")
    losses = trained(model, **options)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return apart, difference(whole(model), whole(alone))


def memory():
    """Return the peak of a step of 13.1 MB of parameters, and what is left of the layers here."""
    torch.manual_seed(0)
    model = gpt.GPT(layers=4, width=256, heads=4, vocabulary=500, length=64, dropout=0.0)
    before = sum(p.nbytes for p in model.parameters())
    xd.tensor_parallel(model, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    [(x, y)] = batches(1, vocabulary=500, length=64, size=2)

    def step():
        optimizer.zero_grad()
        xmem.backward(loss_of(model, x, y), optimizer)
        xmem.optimizer_step(optimizer)

    step()
    step()
    with xmem.measure(model=model, optimizer=optimizer) as m:
        step()
    here = sum(p.nbytes for p in model.parameters())
    return {"peak": m.peak_allocated_bytes, "whole": before, "here": here}


def dropout(rank):
    """Return whether ranks that were seeded differently agree on what is whole."""
    model = small(dropout=0.2)
    torch.manual_seed(100 + rank)
    xd.tensor_parallel(model, PLAN)
    losses = trained(model)
    equal = [
        torch.equal(values[0], values[rank])
        for name, p in model.named_parameters()
        if not name.endswith(("expand.weight", "expand.bias", "contract.weight"))
        for values in [xd.all_gather(p.detach())]
    ]
    return all(equal), losses


def norms(rank, size):
    """Return norms over parts and in one process, and what a scaler does with one bad part."""
    found = []
    [(x, y)] = batches(1)
    for norm_type, dtype in (
        (2.0, "float"),
        (1.0, "float"),
        (float("inf"), "float"),
        (2.0, "double"),
    ):
        row = []
        made = [getattr(small(), dtype)() for _ in range(2)]
        for model in (made[0], xd.tensor_parallel(made[1], PLAN)):
            optimizer = adam(model)
            xmem.backward(loss_of(model, x, y), optimizer)
            row.append(float(xmem.clip_grad_norm_(optimizer, 0.1, norm_type=norm_type)))
        found.append(row)
    model = xd.tensor_parallel(small(), PLAN)
    optimizer = adam(model)
    scaler = xmem.GradScaler()
    before = {name: p.clone() for name, p in model.named_parameters()}
    xmem.backward(scaler.scale(loss_of(model, x, y)), optimizer)
    if rank == size - 1:
        model.layers[0].expand.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    stayed = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return found, stayed


def traffic():
    """Return the all-reduces of one step."""
    model = xd.tensor_parallel(small(), PLAN)
    optimizer = adam(model)
    [(x, y)] = batches(1)
    xd.traffic(reset=True)
    xmem.backward(loss_of(model, x, y), optimizer)
    seen = xd.traffic()
    return seen.calls, seen.sent_bytes, seen.buffer_bytes, seen.seconds


def single(rank, size):
    """Return whether single layers compute their parts, in halves of a type too."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, requires_grad=True)
    layer = nn.Linear(8, 12)
    expected = layer(x)
    out = xd.shard_linear(layer, dim="out")
    mine = expected.chunk(size, -1)[rank]
    outputs_agree = torch.allclose(out(x), mine, atol=1e-6)
    (out(x).square().sum() / 2).backward()
    gradient, x.grad = x.grad, None
    (expected.square().sum() / 2).backward()
    gradients_agree = torch.allclose(gradient, x.grad, atol=1e-5)
    inner = nn.Linear(12, 4, bias=False)
    sums_agree = torch.allclose(xd.shard_linear(inner, dim="in")(mine), inner(expected), atol=1e-5)
    copied = copy.deepcopy(out)
    copies_agree = torch.equal(copied(x), out(x)) and copied.cuts == {"weight": 0, "bias": 0}
    return [outputs_agree, gradients_agree, sums_agree, copies_agree]


def refusals(rank):
    """Return what wrong calls raise, and whether the model has stayed whole."""
    model = small()
    before = [tuple(p.shape) for p in model.parameters()]
    tied = small()
    tied.head.weight = tied.token.weight
    parallel = nn.parallel.DistributedDataParallel(small())

    def short():
        with xmem.accumulate(2):
            xd.tensor_parallel(model, PLAN)

    calls = {
        "path": lambda: xd.tensor_parallel(model, {"layers.0.expanded": "out"}),
        "sizes": lambda: xd.tensor_parallel(nn.Sequential(nn.Linear(4, 5)), {"0": "out"}),
        "tied": lambda: xd.tensor_parallel(tied, {"head": "out"}),
        "differs": lambda: xd.tensor_parallel(model, PLAN if rank else {"head": "out"}),
        "norm": lambda: xd.shard_linear(nn.LayerNorm(4), dim="out"),
        "dim": lambda: xd.shard_linear(nn.Linear(4, 4), dim=0),
        "averaged": lambda: xd.tensor_parallel(parallel, PLAN),
        "accumulating": short,
        "inputs": lambda: xd.shard_linear(nn.Linear(8, 4), dim="in")(torch.zeros(1, 8)),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except XmemError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found, before == [tuple(p.shape) for p in model.parameters()]


CASES = {
    "plain": {},
    "accumulated": {"parts": 2},
    "checkpointed": {"checkpointed": True},
    "both": {"parts": 2, "checkpointed": True},
}


def parities(names=tuple(CASES)):
    return {name: parity(**CASES[name]) for name in names}


def all_of_it(here):
    xd.tensor_parallel(small(), PLAN)  # imports, first connections
    return {
        "memory": memory(),
        "parities": parities(),
        "half": parity(dtype="bfloat16"),
        "half_checkpointed": parity(dtype="bfloat16", checkpointed=True),
        "compressed": parity(bits=8),
        "compressed_checkpointed": parity(bits=8, checkpointed=True),
        "dropout": dropout(here.rank),
        "norms": norms(here.rank, here.size),
        "traffic": traffic(),
        "single": single(here.rank, here.size),
        "refusals": refusals(here.rank),
    }
