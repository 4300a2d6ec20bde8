"""Stages of many kinds, models that play schedules on them, random schedules, and checks."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from xmem.planner import Op, parse_ops
from xmem.playing import script
from xmem.records import Recompute

WIDTH = 16


def soaked(seeds):
    """Return parameters that only `make soak` takes."""
    return [pytest.param(seed, marks=pytest.mark.soak) for seed in seeds]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = functional.gelu(self.up(self.norm(x)))
        return x + functional.dropout(self.down(h), 0.2, self.training)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        return x + self.heads(h, h, h, need_weights=False)[0]


class Convolution(nn.Module):
    """Works in place, on what it has made itself."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        h = self.norm(self.conv(x.transpose(1, 2)))
        return functional.relu_(h).transpose(1, 2)


class Line(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))


class Folded(nn.Module):
    """Its output is a view of its input."""

    def forward(self, x):
        return x.flip(1) if x.dim() == 2 else x.view(x.shape)


class Same(nn.Module):
    def forward(self, x):
        return x


KINDS = (Mlp, Attention, Convolution, Line, Folded, nn.GELU, Same)


def make_stages(random, count):
    torch.manual_seed(random.randrange(1000))
    made = [random.choice(KINDS)() for _ in range(count)]
    return [random.choice([Mlp, Line, Attention])(), *made[1:]]


class Chained(nn.Module):
    """A model whose stages are played, or plainly called where there are no operations.

    Args:
        plans: the backend's.
        stages: the stages.
        ops: the schedule.
    """

    def __init__(self, plans, stages, ops=None, how=Recompute(), *, traced=False):  # noqa: B008
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.plans, self.how, self.traced = plans, how, traced
        self.script = None
        if ops is not None:
            self.script = script(parse_ops(ops) if isinstance(ops, str) else ops, len(stages))
        self.run = None

    def forward(self, x):
        if self.script is None or not self.plans.recording():
            for stage in self.stages:
                x = stage(x)
            return x
        names = [f"stages.{i}" for i in range(len(self.stages))]
        self.run = self.plans.open(self.script, names, self.how, traced=self.traced)
        for i, stage in enumerate(self.stages):
            x = self.run.first(i, stage, (x,), {})
        return x


def mean_square(model, batch):
    return model(batch).square().mean()


def result(model, loss_fn, batch, seed=5):
    """Return the loss, the gradients and the buffers after one step, and put buffers back."""
    before = [b.clone() for b in model.buffers()]
    model.zero_grad()
    torch.manual_seed(seed)
    loss = loss_fn(model, batch)
    loss.backward()
    found = [loss.detach()]
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found += [b.clone() for b in model.buffers()]
    found.append(torch.rand(3))
    for buffer, was in zip(model.buffers(), before, strict=True):
        buffer.copy_(was)
    return found


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def counts(ops, stages):
    return [sum(op.code in ("N", "G") and op.index == i for op in ops) for i in range(stages)]


def every(stages):
    """Return the schedule that keeps values only, and drops each when it is used up."""
    ops = [*(Op("N", i) for i in range(stages)), Op("L")]
    for i in reversed(range(stages)):
        if i == stages - 1:
            ops.append(Op("Da", i + 1))
        ops += [Op("G", i), Op("B", i)]
        ops += [Op("Da", i)] if i else []
    return ops


class Drawn:
    """A random valid schedule: forwards, drops and recomputation as chance will have it."""

    def __init__(self, random, stages):
        self.random, self.stages = random, stages
        self.values, self.kept, self.ops = {0}, set(), []
        for i in range(stages):
            self.forward(i)
            self.clutter(i + 1)
        self.ops.append(Op("L"))
        for i in reversed(range(stages)):
            self.clutter(i)
            self.reach(i)
            self.gather(i)
            if i not in self.kept:
                self.do("G", i)
            self.do("B", i)

    def gather(self, i):
        """Have at hand what a stage reads beside the value before it; here nothing."""

    def there(self, j):
        return j in self.values or j - 1 in self.kept

    def do(self, code, i):
        self.ops.append(Op(code, i))
        if code == "N":
            self.values.add(i + 1)
        elif code == "G":
            self.kept.add(i)
        elif code in ("B", "Ds"):
            self.kept.discard(i)
        else:
            self.values.discard(i)

    def forward(self, i):
        can = [c for c in "NG" if not (i in self.kept if c == "G" else i + 1 in self.values)]
        self.do(self.random.choice(can), i)

    def reach(self, j):
        start = max(k for k in range(j + 1) if self.there(k))
        start = self.random.choice([k for k in range(start + 1) if self.there(k)])
        for i in range(start, j):
            if not self.there(i + 1):
                self.forward(i)

    def clutter(self, needed):
        """Drop some of what is not needed at once, and run something again."""
        for j in sorted(self.values - {0}):
            if self.random.random() < 0.5 and (j != needed or j - 1 in self.kept):
                self.do("Da", j)
        for i in sorted(self.kept):
            gone = i + 1 == needed and needed not in self.values
            if self.random.random() < 0.2 and not gone:
                self.do("Ds", i)
        again = self.random.randrange(needed + 1)
        free = again < needed and (again not in self.kept or again + 1 not in self.values)
        if self.random.random() < 0.2 and free and self.there(again):
            self.forward(again)


FOUR = "N0 N1 Da1 G2.0 Da2 N3 L Da4 G3.0 B3 N0 N1 Da1 B2 Da2 N0 G1.0 B1 Da1 G0.0 B0"
KEPT = "G0.0 G1.0 G2.0 G3.0 L B3 B2 B1 B0"
PLANS = (FOUR, KEPT, every(4))


def four():
    torch.manual_seed(1)
    return [Mlp(), Convolution(), Attention(), Line()]


def batch(seed=2):
    return torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


def check(plans, stages, train, ops=PLANS, x=None, model=Chained):
    """Hold a way of training with each plan to the same without, bit by bit."""
    for one in ops:
        plain, planned = model(plans, stages), model(plans, stages, one)
        x = batch() if x is None else x
        assert equal(result(plain, train, x), result(planned, train, x)), one


class Functions(Chained):
    """Calls each of four stages with what `inputs` makes of what came before."""

    def forward(self, x):
        found, run = [x], None
        if self.script is not None and torch.is_grad_enabled():
            run = self.run = self.plans.open(
                self.script, [f"s{i}" for i in range(4)], self.how, traced=False
            )
        for i, stage in enumerate(self.stages):
            args, kwargs = self.inputs(i, found)
            made = run.first(i, stage, args, kwargs) if run else stage(*args, **kwargs)
            found.append(made)
        return found[-1]

    def inputs(self, i, found):
        return (found[-1],), {}
