"""A model with every kind of layer, and a loop that updates block by block: for several tests."""

import gc
import warnings

import numpy as np
import pytest
from chain import trained

from xmem.errors import XmemWarning


def network(width=128, blocks=4, *, seed=0, tied=True):
    """Embedding, blocks with both norms, one of them called twice, and a tied head."""
    import jittor as jt
    from jittor import nn

    class Block(nn.Module):
        def __init__(self):
            self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm(width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def execute(self, x):
            return x + 0.1 * self.down(nn.gelu(self.up(self.batch(self.norm(x)))))

    class Net(nn.Module):
        def __init__(self):
            self.embedding, self.position = nn.Embedding(50, width), jt.randn(1, width)
            self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
            self.head = nn.Linear(width, 50, bias=False)
            if tied:
                self.head.weight = self.embedding.weight

        def execute(self, tokens):
            x = self.embedding(tokens) + self.position
            for block in self.blocks:
                x = block(x)
            return self.head(self.blocks[0](x))

    net = Net()
    generator = np.random.default_rng(seed)
    for parameter in trained(net):
        drawn = generator.standard_normal(tuple(parameter.shape)) * 0.1
        parameter.assign(jt.array(drawn.astype(np.float32)))
    jt.sync(net.parameters())
    net.train()
    return net


def tokens(seed=0):
    """Return a batch for `network`."""
    import jittor as jt

    drawn = np.random.default_rng(seed).integers(0, 50, (32,)).astype(np.int32)
    return jt.array(drawn).sync()


def values(model):
    """Return all that a model holds, as NumPy arrays."""
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def descend(optimizer, loss, rate=1e-2, block=3):
    """Update a few parameters at a time, as an optimizer does whose states are streamed."""
    import jittor as jt
    from xmem_jittor.streamed_parameters import brought_in

    optimizer.backward(loss)
    [group] = optimizer.param_groups
    held = list(zip(group["params"], group["grads"], strict=True))
    for start in range(0, len(held), block):
        part = held[start : start + block]
        with brought_in([p for p, _ in part]):
            for p, g in part:
                p.update(p - rate * g)
            jt.sync([p for p, _ in part])


def furthest(found, expected):
    """Return the distance of all values from their twins, relative to these.

    All together: of some (a bias before a normalization) the gradient is nothing but rounding.
    """
    assert found.keys() == expected.keys()
    apart = sum(float(np.square(found[n] - expected[n], dtype=np.float64).sum()) for n in found)
    whole = sum(float(np.square(expected[n], dtype=np.float64).sum()) for n in found)
    return (apart / whole) ** 0.5


def noted(parameter):
    """Return who streams a parameter."""
    from xmem_jittor import streamed_steps

    return streamed_steps.noted(parameter)


def offload(model, to="disk", **options):
    """Offload parameters, and leave out what is said of a CPU's memory."""
    from xmem.offload.streaming import offload_parameters

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XmemWarning)
        return offload_parameters(model, to, **options)


@pytest.fixture
def moving(backend):
    """Return the module; nothing may stay in a depot."""
    from xmem_jittor import moving

    gc.collect()
    before = moving.streamed().pieces  # what a test that failed has left
    yield moving
    gc.collect()
    assert moving.streamed().pieces <= before, "something stays in a depot"
