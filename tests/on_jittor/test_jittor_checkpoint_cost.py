"""What a call keeps and how long it takes, measured on Jittor."""

import random

import numpy as np
from chain import MIB, chain, learnt, normal, trained

import xmem


def test_the_cost_of_a_block_is_what_it_keeps_beyond_inputs_and_outputs(backend):
    from jittor import nn

    x = normal(4096, 256)
    block = chain(1)[0]
    cost = backend.checkpoint.cost(block, (x,), {})
    # The output of the linear layer; some constants are kept besides.
    assert 4 * MIB <= cost.saved_bytes <= 4 * MIB + 64
    assert 0 < cost.forward_seconds < 10
    three = backend.checkpoint.cost(chain(3), (x,), {})
    assert 20 * MIB <= three.saved_bytes <= 20 * MIB + 256
    assert backend.checkpoint.cost(nn.Linear(256, 256), (x,), {}).saved_bytes <= 64
    assert backend.checkpoint.cost(lambda x: x.int32(), (x,), {}).saved_bytes == 0
    assert backend.checkpoint.cost(lambda: None, (), {}).saved_bytes == 0


def test_measuring_a_cost_leaves_no_trace(backend):
    import jittor as jt
    from jittor import nn

    net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5, is_train=True))
    x, stream = learnt(16, 32), np.random.default_rng(1)

    def function(x):
        return net(x) * (random.random() + np.random.rand() + stream.random())

    def state():
        jt.sync_all(True)
        return (
            random.getstate(),
            np.random.get_state()[1].tobytes(),
            str(stream.bit_generator.state),
            net[1].running_mean.numpy().tobytes(),
            [p.numpy().tobytes() for p in trained(net)],
            jt.liveness_info(),
            backend.measure.counters().allocated_bytes,
        )

    backend.checkpoint.cost(function, (x,), {})
    before = state()
    backend.checkpoint.cost(function, (x,), {})
    assert state() == before
    jt.set_seed(3)
    expected = xmem.checkpoint(lambda x: x * jt.rand(16, 32), x).numpy()
    jt.set_seed(3)
    backend.checkpoint.cost(function, (x,), {})
    assert np.array_equal(xmem.checkpoint(lambda x: x * jt.rand(16, 32), x).numpy(), expected)


def test_costs_are_measured_inside_the_forward_of_a_model(backend):
    from jittor import nn

    class Wide(nn.Module):
        def __init__(self, width):
            self.up, self.down = nn.Linear(256, width), nn.Linear(width, 256)

        def execute(self, x):
            return self.down(nn.gelu(self.up(x)))

    model, x = nn.Sequential(Wide(64), Wide(1024), Wide(128)), normal(1024, 256)
    layers = xmem.KeyLayers(types=(Wide,), min_saved_bytes="4MiB")
    receipt = xmem.apply_checkpointing(model, layers, inputs=(x,))
    assert receipt.names == ("1",)
    # The inputs of gelu and of the second linear layer.
    assert 8 * MIB <= receipt.expected_saving_bytes <= 8 * MIB + 64
