"""What is shard_optimizer's and shard_model's own: used by a program on ranks."""

import torch
from on_torch.sharing import away, batch, loss_of, mine, model, optimizer, share, train
from torch import nn

import xmem
import xmem.distributed as xd


def shares():
    """Return the bytes of all states, and of those on each rank."""
    trained = model()
    called, chosen = share("zero1", trained)
    train(called, chosen, steps=range(2))
    own = sum(t.nbytes for s in chosen.state.values() for t in s.values())
    return [int(n) for n in xd.all_gather(torch.tensor(own))]


def not_averaged():
    """Step by shares of gradients that nobody averages."""
    import warnings

    trained = model()
    chosen = xd.shard_optimizer(optimizer(trained.parameters()))
    said = []
    for step in range(2):
        loss_of(trained, *map(mine, batch(step))).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen.step()
        said.append([str(w.message) for w in caught if w.category is xmem.XmemWarning])
    return said


def by_closure():
    trained = model()
    chosen = xd.shard_optimizer(optimizer(trained.parameters()))
    chosen.step(lambda: loss_of(trained, *map(mine, batch(0))))


def with_states():
    trained = model()
    chosen = optimizer(trained.parameters())
    loss_of(trained, *batch(0)).backward()
    chosen.step()
    xd.shard_optimizer(chosen)


def of_all_at_once():
    xd.shard_optimizer(torch.optim.LBFGS(model().parameters()))


def twice():
    xd.shard_optimizer(xd.shard_optimizer(optimizer(model().parameters())))


def of_sharded_parameters():
    _, chosen = share("zero3", model())
    xd.shard_optimizer(chosen)


def sharded_twice():
    xd.shard_model(xd.shard_model(model()))


def of_data_parallel():
    called, _ = share("dp", model())
    xd.shard_model(called)


def wrapped_after():
    trained, chosen = share("zero3", model())
    xd.data_parallel(trained, chosen)


def a_list_of_modules():
    xd.shard_model(model(), blocks=["layers"])


def named_blocks():
    """Blocks by path; those of other ranks are others."""
    xd.shard_model(model(), blocks=[f"layers.{xd.rank()}"])


def looked_at():
    """A look at the model between backward and step leaves nothing gathered that gets old."""
    trained, chosen = share("zero3", model())
    alone = model()
    other = optimizer(alone.parameters())
    for step in range(3):
        loss_of(trained, *map(mine, batch(step))).backward()
        loss_of(alone, *batch(step)).backward()
        with torch.no_grad():
            trained(batch(step)[0])
        for each in (chosen, other):
            each.step()
            each.zero_grad()
    return away(trained, alone)


def tied():
    """A parameter lies in two blocks."""
    trained = model()
    trained.layers[1].expand.weight = trained.layers[0].expand.weight
    try:
        xd.shard_model(trained)
    finally:
        assert not any(hasattr(p, "full_tensor") for p in trained.parameters())


def start():
    """All take rank 0's values."""
    torch.manual_seed(xd.rank())
    trained = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    first = torch.cat([p.detach().flatten() for p in trained.parameters()])
    first = xd.broadcast(first)
    xd.shard_model(trained)
    whole = torch.cat([p.full_tensor().detach().flatten() for p in trained.parameters()])
    return float((whole - first).abs().max())


def streamed():
    """States of a share of the parameters, in a file: how far that is from shares in memory."""
    found = []
    for order in ("in memory", "streamed first", "shared first", "parameters, too"):
        trained = model()
        chosen = optimizer(trained.parameters())
        if order == "streamed first":
            xmem.offload_optimizer(chosen, "disk", block="16KiB")
        chosen = xd.shard_optimizer(chosen)
        if order in ("shared first", "parameters, too"):
            xmem.offload_optimizer(chosen, "disk", block="16KiB")
        called = xd.data_parallel(trained, chosen)
        receipt = xmem.offload_parameters(trained, "disk") if "too" in order else None
        train(called, chosen, steps=range(3))
        if receipt is not None:
            receipt.undo()
        found.append(torch.cat([p.detach().flatten() for p in trained.parameters()]))
    return [float((other - found[0]).abs().max()) for other in found[1:]]


def streamed_parts():
    _, chosen = share("zero3", model())
    xmem.offload_optimizer(chosen, "disk")


CHECKS = {
    "shares": shares,
    "not averaged": not_averaged,
    "by closure": by_closure,
    "with states": with_states,
    "of all at once": of_all_at_once,
    "twice": twice,
    "of sharded parameters": of_sharded_parameters,
    "sharded twice": sharded_twice,
    "of data-parallel": of_data_parallel,
    "wrapped after": wrapped_after,
    "a list of modules": a_list_of_modules,
    "named blocks": named_blocks,
    "looked at": looked_at,
    "tied": tied,
    "start": start,
    "streamed": streamed,
    "streamed parts": streamed_parts,
}
