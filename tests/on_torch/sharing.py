"""One model trained on one rank and on several, to compare: used by programs on ranks."""

import contextlib

import torch
from on_torch.gpt import GPT
from torch.nn import functional

import xmem
import xmem.distributed as xd

STEPS = 10
BATCH = 8


def model(**changed):
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "length": 16, "dropout": 0.0}
    return GPT(**{**sizes, **changed})


def optimizer(parameters):
    """AdamW. Gradients that are 0 but for rounding (of keys' biases) would make steps by its sign
    with PyTorch's own eps of 1e-8."""
    return torch.optim.AdamW(parameters, 1e-3, eps=1e-4)


def batch(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return tuple(torch.randint(0, 64, (BATCH, 16), generator=generator) for _ in range(2))


def mine(tensor):
    """Return this rank's rows."""
    return tensor.chunk(xd.world_size())[xd.rank()]


def loss_of(called, ids, targets):
    return functional.cross_entropy(called(ids).flatten(0, 1), targets.flatten())


def train_alone(trained, chosen, *, steps=range(STEPS), before=None, autocast=None):
    """Train on whole batches; returns the losses."""
    losses = []
    for step in steps:
        ids, targets = batch(step)
        with autocast() if autocast else contextlib.nullcontext():
            loss = loss_of(trained, ids, targets)
        loss.backward()
        losses.append(float(loss.detach()))
        if before is not None:
            before()
        chosen.step()
        chosen.zero_grad()
    return losses


def train(called, chosen, *, steps=range(STEPS), micro=1, before=None, autocast=None):
    """Train on this rank's share of each batch; returns the losses of whole batches."""
    losses = []
    for step in steps:
        parts = [mine(tensor).chunk(micro) for tensor in batch(step)]
        total = torch.zeros(())
        with xmem.accumulate(micro, model=called) if micro > 1 else contextlib.nullcontext():
            for ids, targets in zip(*parts, strict=True):
                with autocast() if autocast else contextlib.nullcontext():
                    loss = loss_of(called, ids, targets)
                xmem.backward(loss, chosen)
                total += loss.detach() / micro
        if before is not None:
            before()
        xmem.optimizer_step(chosen)
        xmem.zero_grad(chosen)
        losses.append(float(xd.all_reduce(total, "mean")))
    return losses


def share(kind, trained, make=optimizer, **options):
    """Return the model to call and its optimizer, shared in one of three ways."""
    if kind == "zero3":
        xd.shard_model(trained)
        return trained, make(trained.parameters())
    chosen = make(trained.parameters())
    if kind == "zero1":
        chosen = xd.shard_optimizer(chosen)
    return xd.data_parallel(trained, chosen, **options), chosen


def furthest(found, expected):
    """Return the largest difference of tensors of two states, or of numbers."""
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), (found.keys(), expected.keys())
        return max(furthest(found[name], expected[name]) for name in found)
    if isinstance(found, list):
        return max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found.float() - expected.float()).abs().max())


def away(called, expected):
    """Return how far a shared model is from a plain one; rank 0 knows, and tells the others."""
    state = xd.full_state(called)
    distance = torch.zeros(())
    if state is not None:
        distance += furthest(state["model"], dict(expected.state_dict()))
    return float(xd.broadcast(distance))


def checked(checks, wanted=None):
    """Run checks one after another on all ranks; an error of xmem's is a result: type and text."""
    torch.set_num_threads(1)
    results = {}
    for name, check in checks.items():
        if wanted is not None and name not in wanted:
            continue
        try:
            results[name] = check()
        except xmem.XmemError as error:
            results[name] = [type(error).__name__, str(error)]
        xd.barrier()
    return results
