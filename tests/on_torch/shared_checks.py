"""What works together with each way to share a model, or is refused: used by programs on ranks."""

import math
from functools import partial

import torch
from on_torch.sharing import (
    STEPS,
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

import xmem
import xmem.distributed as xd

EACH = tuple((micro, layout) for micro in (1, 2) for layout in (None, "every"))


def parities(kind, ways=EACH):
    """Return how far loss and parameters are from one process, accumulated, and in regions."""
    alone = model()
    losses = train_alone(alone, optimizer(alone.parameters()))
    found = {}
    for micro, layout in ways:
        trained = model()
        if layout is not None:
            xmem.apply_checkpointing(trained, layout)
        called, chosen = share(kind, trained)
        loss = furthest(train(called, chosen, micro=micro), losses)
        found[f"{micro} micro-batches, layout {layout}"] = [loss, away(called, alone)]
    return found


def compared(kind, *, before=None, make=optimizer, autocast=None, steps=range(STEPS), **options):
    """Train alone and shared in the same way; returns how far apart that comes out."""
    alone = model()
    chosen = make(alone.parameters())
    hook = before and (lambda: before(chosen))
    losses = train_alone(alone, chosen, steps=steps, before=hook, autocast=autocast)
    trained = model()
    called, other = share(kind, trained, make, **options)
    hook = before and (lambda: before(other))
    found = train(called, other, steps=steps, before=hook, autocast=autocast)
    return [furthest(found, losses), away(called, alone)]


def clipped(kind, norm_type, micro=1):
    """Clip by the norm of whole gradients: the norms agree, and the training."""
    norms, limit = {}, 0.005 if norm_type == math.inf else 0.05

    def before(chosen):
        norm = xmem.clip_grad_norm_(chosen, limit, norm_type=norm_type)
        norms.setdefault(id(chosen), []).append(float(norm))

    distances = compared(kind, before=before)
    alone, shared = norms.values()
    assert min(alone) > limit  # or nothing is clipped
    return [*distances, furthest(shared, alone)]


def scaled(kind, *, fused):
    """Scale losses, of which one is infinite on the last rank: all skip that step."""

    def make(parameters):
        return torch.optim.AdamW(parameters, 1e-3, eps=1e-4, fused=fused)

    def run(called, chosen, cut, last):
        scaler, scales = xmem.GradScaler(init_scale=2.0**8), []
        for step in range(6):
            loss = loss_of(called, *map(cut, batch(step)))
            if step == 2 and last:
                loss = loss * float("inf")
            xmem.backward(scaler.scale(loss), chosen)
            if step % 2:
                scaler.unscale_(chosen)
                xmem.clip_grad_norm_(chosen, 0.05)
            scaler.step(chosen)
            scaler.update()
            xmem.zero_grad(chosen)
            scales.append(scaler.get_scale())
        return scales

    alone = model()
    expected = run(alone, make(alone.parameters()), lambda tensor: tensor, last=True)
    called, chosen = share(kind, model(), make)
    scales = run(called, chosen, mine, xd.rank() == xd.world_size() - 1)
    return [scales == expected, scales, away(called, alone)]


def packed(kind, *, layout=None, frozen=False):
    """Compress activations; returns the error of gradients, and how many bytes were packed."""

    def gradients(trained):
        found = [p.grad for p in trained.parameters() if p.grad is not None]
        return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]

    def make(**changed):
        made = model(**changed)
        made.layers[0].requires_grad_(not frozen)
        return made

    trained = make()
    if layout is not None:
        xmem.apply_checkpointing(trained, layout)
    called, chosen = share(kind, trained, lambda ps: optimizer(p for p in ps if p.requires_grad))
    with xmem.compress_activations(bits=8, min_bytes=1, seed=1) as block:
        loss = loss_of(called, *map(mine, batch(0)))
    xmem.backward(loss, chosen)
    alone = make()
    loss_of(alone, *batch(0)).backward()
    pairs = list(zip(gradients(trained), gradients(alone), strict=True))
    error = sum(float((a - b).square().sum()) for a, b in pairs)
    return [(error / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5, block.receipt.note]


def planned(kind, *, after):
    """Put a plan on a model before or after it is shared."""
    trained = model()

    def plan():
        profile = xmem.profile(trained, tuple(map(mine, batch(0))), lambda m, b: loss_of(m, *b))
        xmem.plan(profile, budget=0.7, verify=False).apply(trained)

    if not after:
        plan()
    called, chosen = share(kind, trained)
    if after:
        plan()
    alone = model()
    losses = train_alone(alone, optimizer(alone.parameters()))
    return [furthest(train(called, chosen), losses), away(called, alone)]


def segmented(kind, *, after):
    """One segment of all blocks, put on before or after the model is shared."""
    trained = model()
    if not after:
        xmem.apply_checkpointing(trained, 1)
    called, chosen = share(kind, trained)
    if after:
        xmem.apply_checkpointing(trained, 1)
    alone = model()
    losses = train_alone(alone, optimizer(alone.parameters()))
    return [furthest(train(called, chosen), losses), away(called, alone)]


def scheduled(kind):
    """Step sizes by PyTorch's schedule."""

    def run(trainer, called, chosen):
        schedule = torch.optim.lr_scheduler.StepLR(chosen, 2, 0.5)
        losses = []
        for step in range(6):
            losses += trainer(called, chosen, steps=[step])
            schedule.step()
        return losses

    alone = model()
    losses = run(train_alone, alone, optimizer(alone.parameters()))
    called, chosen = share(kind, model())
    return [furthest(run(train, called, chosen), losses), away(called, alone)]


def in_eight_bits(kind):
    """States in 8 bits are those of one rank, as far as gradients are."""

    def make(parameters):
        return xmem.optim.AdamW(parameters, 1e-3, eps=1e-4, state_bits=8, min_elements=1)

    return compared(kind, make=make)


def in_backward(kind):
    """Step in backward what is averaged after it."""
    trained = model()
    _, chosen = share(kind, trained)
    xmem.optimizer_in_backward(trained, chosen)


def in_halves(kind):
    """Train a model that is half throughout; returns how far its losses are from float32's."""
    trained = model()
    xmem.cast_model(trained, "bfloat16")
    called, chosen = share(kind, trained, lambda ps: torch.optim.SGD(ps, 0.1))
    alone = model()
    expected = train_alone(alone, torch.optim.SGD(alone.parameters(), 0.1))
    return furthest(train(called, chosen), expected)


def with_masters(kind):
    """Share what has float32 masters."""
    trained = model()
    chosen = optimizer(trained.parameters())
    xmem.cast_model(trained, "bfloat16", optimizer=chosen)
    if kind == "zero3":
        xd.shard_model(trained)
    elif kind == "zero1":
        xd.shard_optimizer(chosen)
    else:
        xd.data_parallel(trained, chosen)


def with_frozen_layers(kind):
    """Some parameters want no gradient."""

    def freeze():
        made = model()
        made.layers[0].requires_grad_(False)
        made.token.weight.requires_grad_(False)
        return made

    def make(parameters):
        return optimizer([p for p in parameters if p.requires_grad])

    alone, trained = freeze(), freeze()
    losses = train_alone(alone, make(alone.parameters()))
    called, chosen = share(kind, trained, make)
    return [furthest(train(called, chosen), losses), away(called, alone)]


def by_hand(kind):
    """Accumulate by no_sync and the framework's own backward."""
    called, chosen = share(kind, model())
    losses = []
    for step in range(STEPS):
        first, second = zip(*(mine(tensor).chunk(2) for tensor in batch(step)), strict=True)
        with xd.no_sync(called):
            half = loss_of(called, *first) / 2
            half.backward()
        other = loss_of(called, *second) / 2
        other.backward()
        chosen.step()
        chosen.zero_grad()
        losses.append(float(xd.all_reduce((half + other).detach(), "mean")))
    alone = model()
    expected = train_alone(alone, optimizer(alone.parameters()))
    return [furthest(losses, expected), away(called, alone)]


def together(kind):
    """Return all checks of one way to share."""
    bf16 = partial(xmem.autocast, "bfloat16")
    return {
        "parities": partial(parities, kind),
        "by hand": partial(by_hand, kind),
        "autocast": partial(compared, kind, autocast=bf16),
        "clip": partial(clipped, kind, 2.0),
        "clip by largest": partial(clipped, kind, math.inf),
        "scaler": partial(scaled, kind, fused=False),
        "fused scaler": partial(scaled, kind, fused=True),
        "packed": partial(packed, kind),
        "packed in regions": partial(packed, kind, layout="every"),
        "packed frozen": partial(packed, kind, frozen=True),
        "segment": partial(segmented, kind, after=False),
        "segment after": partial(segmented, kind, after=True),
        "plan": partial(planned, kind, after=False),
        "plan after": partial(planned, kind, after=True),
        "schedule": partial(scheduled, kind),
        "8 bits": partial(in_eight_bits, kind),
        "in backward": partial(in_backward, kind),
        "halves": partial(in_halves, kind),
        "masters": partial(with_masters, kind),
        "frozen": partial(with_frozen_layers, kind),
    }
