"""Models and runs that several tests share."""

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
