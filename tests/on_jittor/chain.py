"""Models and runs that several tests share."""

import functools
import gc

MIB = 1 << 20


def chain(depth=24, width=256):
    """depth x (Linear and GELU)."""
    from jittor import nn

    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def normal(*shape):
    """Return normal numbers that ask for no gradient."""
    import jittor as jt
    import numpy as np

    return jt.array(np.random.randn(*shape).astype(np.float32)).stop_grad()


def through(blocks, x, checkpoint=None):
    """Run blocks one after the other, each in a region of its own where `checkpoint` is given."""
    for block in blocks:
        x = checkpoint(block, x) if checkpoint else block(x)
    return x


def trained(model):
    return [p for p in model.parameters() if not p.is_stop_grad()]


def gradients(loss, targets):
    """Return gradients as NumPy arrays."""
    import jittor as jt

    return [g.numpy() for g in jt.grad(loss, targets, retain_graph=False)]


def error(found, expected):
    """Return the largest distance of an array from its twin, relative to the twin's norm."""
    import numpy as np

    return max(
        float(np.linalg.norm(f - e) / (np.linalg.norm(e) + 1e-30))
        for f, e in zip(found, expected, strict=True)
    )


def peak_above_static_bytes(measure, step):
    """Run a step and return how far the peak rose."""
    gc.collect()
    measure.synchronize()
    measure.reset_peak()
    before = measure.counters().allocated_bytes
    kept = step()
    measure.synchronize()
    peak = measure.counters().peak_allocated_bytes
    del kept
    return peak - before


def learnt(*shape):
    """Return normal numbers that ask for gradients."""
    import jittor as jt
    import numpy as np

    return jt.array(np.random.randn(*shape).astype(np.float32))


def both(function, *inputs, targets, reduce=None, **options):
    """Return gradients without and with a region."""
    import xmem

    found = []
    for call in (function, functools.partial(xmem.checkpoint, function)):
        y = call(*inputs, **options)
        loss = (reduce or (lambda y: (y**2).sum()))(y)
        found.append(gradients(loss, targets))
    return found


def counted(blocks):
    """Count how often each block's execute runs; returns the list of counts."""
    counts = [0] * len(blocks)

    def counting(index, execute):
        def run(*args, **kwargs):
            counts[index] += 1
            return execute(*args, **kwargs)

        return run

    for index, block in enumerate(blocks):
        block.execute = counting(index, block.execute)
    return counts


def transformer(depth=8, width=256, heads=4, dropout=0.0):
    """depth x (pre-norm attention and MLP of four times the width), in training mode."""
    import jittor as jt
    from jittor import nn

    class Block(nn.Module):
        def __init__(self):
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.dropout = nn.Dropout(dropout, is_train=True)

        def execute(self, x):
            batch, length, _ = x.shape
            parts = self.qkv(self.norm1(x)).reshape(batch, length, 3, heads, width // heads)
            q, k, v = (parts[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
            scores = jt.matmul(q, k.transpose(0, 1, 3, 2)) * (width // heads) ** -0.5
            mixed = jt.matmul(self.dropout(nn.softmax(scores, -1)), v)
            x = x + self.project(mixed.transpose(0, 2, 1, 3).reshape(batch, length, width))
            return x + self.down(nn.gelu(self.up(self.norm2(x))))

    return nn.Sequential(*[Block() for _ in range(depth)])
