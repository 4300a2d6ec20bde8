"""Stages that read an output before the last, a driver for them, and random schedules."""

import torch
from planned import WIDTH, Chained, Drawn, Line, Mlp
from torch import nn

from xmem.planner import Chain, Option, Skip, Stage


class Merge(nn.Module):
    """Saves what it reads beside its input, and views of it."""

    def __init__(self, skips=1):
        super().__init__()
        self.line = nn.Linear((1 + skips) * WIDTH, WIDTH)

    def forward(self, x, *skips):
        y = self.line(torch.cat([x, *skips], -1)).relu()
        for skip in skips:
            y = y * skip + x.view(-1).view(x.shape) * skip.transpose(0, 1).sin().transpose(0, 1)
        return y


class Skipping(Chained):
    """Calls a stage with the outputs that `reads` says, besides the last one."""

    def __init__(self, plans, stages, reads, ops=None, **more):
        super().__init__(plans, stages, ops, **more)
        self.reads = reads
        self.middle = None

    def runner(self):
        """Return what calls a stage by its number."""
        if self.script is None or not self.plans.recording():
            return lambda i, *args: self.stages[i](*args)
        names = [f"stages.{i}" for i in range(len(self.script))]
        self.run = self.plans.open(self.script, names, self.how, traced=self.traced)
        return lambda i, *args: self.run.first(i, self.stages[i], args, {})

    def forward(self, x):
        run, count = self.runner(), len(self.stages)
        found = [x]
        for i in range(count):
            found.append(run(i, *(found[j] for j in (i, *self.reads.get(i, ())))))
        return found[count]


def u_net(random, depth):
    """Return stages down and up again, and what they read by number, besides the last output."""
    torch.manual_seed(random.randrange(1000))
    down = [random.choice([Mlp, Line])() for _ in range(depth)]
    middle = [random.choice([Mlp, Line, nn.GELU])() for _ in range(random.randint(1, 2))]
    stages, reads = [*down, *middle], {}
    for j in reversed(range(1, depth + 1)):
        also = [random.randint(1, depth)] if random.random() < 0.2 else []
        reads[len(stages)] = tuple(dict.fromkeys([j, *also]))
        stages.append(Merge(len(reads[len(stages)])))
        if random.random() < 0.3:
            stages.append(random.choice([Line, nn.GELU])())
    return stages, reads


def skipping_chain(stages, reads):
    """Return a chain of unit sizes with its skips."""
    made = [Stage("", 1.0, 1, (Option("keep all", 1.0, 2.0, 9, 5, 9),)) for _ in range(stages)]
    skips = tuple(Skip(j - 1, i, 3) for i, values in reads.items() for j in values)
    return Chain("drawn", tuple(made), (3,) * (stages + 1), skips)


class DrawnWithSkips(Drawn):
    """A random schedule that has what a stage reads at hand whenever it runs it."""

    def __init__(self, random, stages, reads):
        self.reads = reads
        super().__init__(random, stages)

    def gather(self, i):
        for j in self.reads.get(i, ()):
            self.reach(j)

    def forward(self, i):
        self.gather(i)
        super().forward(i)
