"""Models whose blocks take and return other things than one tensor.

Imports Jittor: only after `xmem.use`.
"""

import jittor as jt
from jittor import nn

WIDTH = 32


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self):
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def execute(self, x, y):
        return nn.gelu(self.first(x)) + self.second(y)


class Inputs(nn.Module):
    def __init__(self):
        self.blocks = nn.ModuleList([Two() for _ in range(3)])

    def execute(self, x):
        y = x
        for block in self.blocks:
            x, y = block(x, y), x
        return x


class Scaled(nn.Module):
    """Takes keywords, of which one is no tensor, and one may be missing."""

    def __init__(self):
        self.linear = nn.Linear(WIDTH, WIDTH)

    def execute(self, x, *, scale=1.0, skip=None):
        y = nn.gelu(self.linear(x)) * scale
        return y if skip is None else y + skip


class Keywords(nn.Module):
    def __init__(self):
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])

    def execute(self, x):
        skip = None
        for i, block in enumerate(self.blocks):
            x, skip = block(x=x, scale=0.5 + i, skip=skip), x
        return x


class Pair(nn.Module):
    """Returns a dict of tensors, one of whole numbers, and something else."""

    def __init__(self):
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def execute(self, x):
        return {"left": self.left(x), "right": (nn.gelu(self.right(x)), (x > 0).int32())}, "kept"


class Outputs(nn.Module):
    def __init__(self):
        self.blocks = nn.ModuleList([Pair() for _ in range(3)])

    def execute(self, x):
        for block in self.blocks:
            found, kept = block(x)
            assert kept == "kept"
            right, positive = found["right"]
            x = found["left"] + right * positive.float32()
        return x


class Loose(nn.Module):
    """Has a parameter beside its blocks, and one in them that nothing reads."""

    def __init__(self):
        self.scale = jt.ones((WIDTH,))
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])
        self.blocks[1].unread = jt.ones((WIDTH,))

    def execute(self, x):
        for block in self.blocks:
            x = block(x) * self.scale
        return x


class Tied(nn.Module):
    """Has one weight in two blocks."""

    def __init__(self):
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])
        self.blocks[2].linear.weight = self.blocks[0].linear.weight

    def execute(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Lists(nn.Module):
    """Takes a list of tensors; a block is called twice."""

    def __init__(self):
        self.blocks = nn.ModuleList([Summed() for _ in range(2)])

    def execute(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = block([x, x * 0.5])
        return x


class Summed(nn.Module):
    def __init__(self):
        self.linear = nn.Linear(WIDTH, WIDTH)

    def execute(self, xs):
        return nn.gelu(self.linear(xs[0] + xs[1]))


class Dropped(nn.Module):
    """Scales, and drops half."""

    def __init__(self):
        self.weight = jt.ones((WIDTH,))
        self.drop = nn.Dropout(0.5)

    def execute(self, x):
        return self.drop(x * self.weight)


ODD = {
    "inputs": Inputs,
    "keywords": Keywords,
    "outputs": Outputs,
    "loose": Loose,
    "tied": Tied,
    "lists": Lists,
}


def odd_loss(net, x):
    return (net(x) ** 2).mean()
