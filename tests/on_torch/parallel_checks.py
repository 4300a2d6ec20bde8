"""What is data_parallel's own: used by a program on ranks."""

import gc

import torch
from on_torch.shared_checks import compared
from on_torch.sharing import (
    away,
    batch,
    furthest,
    loss_of,
    mine,
    model,
    optimizer,
    share,
    train,
    train_alone,
)
from torch import nn

import xmem
import xmem.distributed as xd


def _alone():
    alone = model()
    return alone, train_alone(alone, optimizer(alone.parameters()))


def no_zeroing():
    """Gradients that are set to 0 instead of None stay where they are."""
    called, chosen = share("dp", model())
    losses = []
    for step in range(10):
        loss = loss_of(called, *map(mine, batch(step)))
        loss.backward()
        chosen.step()
        chosen.zero_grad(set_to_none=False)
        losses.append(float(xd.all_reduce(loss.detach(), "mean")))
    alone, expected = _alone()
    return [furthest(losses, expected), away(called, alone)]


def held_gradients():
    """Memory of gradients that someone else holds is not taken from them."""
    trained = model()
    called, chosen = share("dp", trained)
    losses = []
    for step in range(10):
        loss = loss_of(called, *map(mine, batch(step)))
        loss.backward()
        if step % 3 == 0:
            held = [p.grad for p in trained.parameters()]
        elif step % 3 == 1:
            held = [p.grad.detach()[:1] for p in trained.parameters()]
        else:
            held = [next(iter(trained.parameters())).grad]
        copies = [gradient.clone() for gradient in held]
        chosen.step()
        chosen.zero_grad()
        with torch.no_grad():
            called(batch(step)[0])
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
        held.clear()
        losses.append(float(xd.all_reduce(loss.detach(), "mean")))
    alone, expected = _alone()
    return [furthest(losses, expected), away(called, alone)]


def already_in_backward():
    trained = model()
    chosen = optimizer(trained.parameters())
    receipt = xmem.optimizer_in_backward(trained, chosen)
    try:
        xd.data_parallel(trained, chosen)
    finally:
        receipt.undo()


def past_the_wrapper():
    trained = model()
    _, chosen = share("dp", trained)
    xmem.backward(loss_of(trained, *map(mine, batch(0))), chosen)
    xmem.optimizer_step(chosen)


def all_forward_first():
    """The last forward pass lies in no_sync, so its backward averages nothing."""
    called, chosen = share("dp", model())
    parts = zip(*(mine(tensor).chunk(2) for tensor in batch(0)), strict=True)
    with xmem.accumulate(2, model=called):
        for loss in [loss_of(called, *part) for part in parts]:
            xmem.backward(loss, chosen)
    xmem.optimizer_step(chosen)


def unaveraged_at_last():
    """What is added after the average is this rank's own."""
    called, chosen = share("dp", model())
    xmem.backward(loss_of(called, *map(mine, batch(0))), chosen)
    with xd.no_sync(called):
        xmem.backward(loss_of(called, *map(mine, batch(1))), chosen)
    xmem.optimizer_step(chosen)


def backward_twice():
    """What a second backward of one forward pass adds is this rank's own."""
    called, chosen = share("dp", model())
    loss = loss_of(called, *map(mine, batch(0)))
    loss.backward(retain_graph=True)
    loss.backward()
    chosen.step()


def forward_twice():
    """Two forward passes before one backward are averaged as one."""
    losses = []
    for called, chosen, cut in (
        (*share("dp", model()), mine),
        (alone := model(), optimizer(alone.parameters()), lambda tensor: tensor),
    ):
        for step in range(0, 6, 2):
            loss = sum(loss_of(called, *map(cut, batch(step + i))) for i in range(2))
            loss.backward()
            chosen.step()
            chosen.zero_grad()
        losses.append(called)
    return away(*losses)


def thawed():
    """A layer that wants gradients only later is not averaged."""
    trained = model()
    trained.head.requires_grad_(False)
    called, chosen = share("dp", trained)
    for step in range(2):
        xmem.backward(loss_of(called, *map(mine, batch(step))), chosen)
        xmem.optimizer_step(chosen)
        xmem.zero_grad(chosen)
        trained.head.requires_grad_(True)


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, both):
        return self.sometimes(self.always(x)) if both else self.always(x)


def unused(*, said=True, **options):
    """Each rank uses all parameters in some steps, not in the same ones unless nothing is said."""
    trained, alone = Choosing(), Choosing()
    chosen, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (trained, alone))
    called = xd.data_parallel(trained, chosen, unused_parameters=said, **options)
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        both = [said and (step + rank) % 3 == 0 for rank in range(xd.world_size())]
        parts = zip(x.chunk(xd.world_size()), both, strict=True)
        other.zero_grad()
        sum(alone(*part).square().mean() / xd.world_size() for part in parts).backward()
        other.step()
        chosen.zero_grad()
        called(mine(x), both[xd.rank()]).square().mean().backward()
        chosen.step()
    return away(called, alone)


def twice():
    called, chosen = share("dp", model())
    xd.data_parallel(called, chosen)


def foreign():
    trained = model()
    xd.data_parallel(trained, optimizer(model().parameters()))


def mismatch():
    trained = nn.Linear(4 + xd.rank(), 8)
    xd.data_parallel(trained, torch.optim.SGD(trained.parameters(), 0.1))


def mismatch_of_what_is_frozen():
    trained = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 + xd.rank()).requires_grad_(False))
    xd.data_parallel(trained, torch.optim.SGD(trained[0].parameters(), 0.1))


def start():
    torch.manual_seed(xd.rank())
    trained = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    trained[1].running_mean.normal_()
    xd.data_parallel(trained, torch.optim.SGD(trained.parameters(), 0.1))
    everything = torch.cat([t.float().flatten() for t in trained.state_dict().values()])
    return float((xd.all_gather(everything) - everything).abs().max())


def squeezed(how):
    """Return how far training comes out, and which part of float32's bytes is sent."""
    wide = torch.float32.itemsize * sum(p.numel() for p in model().parameters())
    called, chosen = share("dp", model(), compress=how)
    xd.traffic(reset=True)
    train(called, chosen, steps=range(1))
    sent = sum(xd.traffic().sent_bytes.values())
    sent -= xd.traffic().sent_bytes["all_reduce"]  # of the loss
    whole = 2 * (xd.world_size() - 1) * wide // xd.world_size()
    return [*compared("dp", compress=how), sent / whole]


def three_hundred_steps():
    """Learn a function by heart; returns the last losses with and without compression."""
    losses = []
    for compress in (None, "int8"):
        torch.manual_seed(0)
        trained = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        chosen = torch.optim.SGD(trained.parameters(), 0.05, momentum=0.9)
        called = xd.data_parallel(trained, chosen, compress=compress)
        x = torch.randn(64, 8)
        y = x.prod(1, keepdim=True).tanh() + x[:, :1]
        for _ in range(300):
            loss = (called(mine(x)) - mine(y)).square().mean()
            xmem.backward(loss, chosen)
            xmem.optimizer_step(chosen)
            xmem.zero_grad(chosen)
        losses.append(float(xd.all_reduce(loss.detach(), "mean")))
    return losses


def traffic():
    """A step all-reduces the gradients, and gives buffers to all before its forward pass."""
    trained = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    chosen = torch.optim.SGD(trained.parameters(), 0.1)
    called = xd.data_parallel(trained, chosen)
    for _ in range(2):
        xd.traffic(reset=True)
        called(torch.randn(8, 64)).square().mean().backward()
        chosen.step()
        chosen.zero_grad()
    ranks = xd.world_size()
    gradients = sum(p.nbytes for p in trained.parameters())
    buffers = sum(b.nbytes for b in trained.buffers())
    return {
        "counted": xd.traffic().sent_bytes,
        "expected": {
            "all_reduce": 2 * (ranks - 1) * gradients // ranks,
            "broadcast": (ranks - 1) * buffers // ranks,
        },
    }


def gone():
    """Return whether parameters are still held to be averaged, and the hooks that are left."""
    from xmem_torch.data_parallel import is_averaged

    trained = model()
    called, chosen = share("dp", trained)
    train(called, chosen, steps=range(3))
    del called
    gc.collect()
    parameters = list(trained.parameters())
    hooks = len(chosen._optimizer_step_pre_hooks) + len(chosen._optimizer_step_post_hooks)
    left = sum(len(p._backward_hooks or ()) for p in parameters)
    return [is_averaged(parameters[0]), hooks, left]


CHECKS = {
    "no zeroing": no_zeroing,
    "held gradients": held_gradients,
    "already in backward": already_in_backward,
    "past the wrapper": past_the_wrapper,
    "all forward first": all_forward_first,
    "unaveraged at last": unaveraged_at_last,
    "backward twice": backward_twice,
    "forward twice": forward_twice,
    "thawed": thawed,
    "unused": unused,
    "unused unsaid": lambda: unused(said=False),
    "unused unsaid in buckets": lambda: unused(said=False, bucket=1),
    "twice": twice,
    "foreign": foreign,
    "mismatch": mismatch,
    "frozen mismatch": mismatch_of_what_is_frozen,
    "start": start,
    "bf16": lambda: squeezed("bf16"),
    "fp16": lambda: squeezed("fp16"),
    "int8": lambda: squeezed("int8"),
    "300 steps": three_hundred_steps,
    "traffic": traffic,
    "gone": gone,
}
