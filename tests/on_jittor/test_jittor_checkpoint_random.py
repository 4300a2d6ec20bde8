"""What a region draws at random, it draws twice the same, and disturbs nobody."""

import random

import numpy as np
import pytest
from chain import gradients, learnt, normal

import xmem


@pytest.mark.parametrize("kind", ["dropout", "uniform", "normal"])
def test_random_numbers_are_drawn_again_the_same(backend, kind):
    import jittor as jt
    from jittor import nn

    x, dropout = learnt(64, 32), nn.Dropout(0.5, is_train=True)
    noise = {
        "dropout": lambda x: dropout(x),
        "uniform": lambda x: x * jt.rand(64, 32),
        "normal": lambda x: x * jt.randn(64, 32),
    }[kind]
    y = xmem.checkpoint(noise, x)
    factor = y.numpy() / x.numpy()
    [found] = gradients(y.sum(), [x])
    # y = x * factor, so the gradient of the sum is the factor that was drawn.
    assert np.allclose(found, factor, rtol=1e-4, atol=1e-6)
    assert factor.std() > 0.1


def test_random_numbers_of_a_nested_region_are_drawn_again_the_same(backend):
    from jittor import nn

    x, dropout = learnt(64, 32), nn.Dropout(0.5, is_train=True)

    def inner(x):
        return dropout(x)

    def outer(x):
        return dropout(xmem.checkpoint(inner, dropout(x)))

    y = xmem.checkpoint(outer, x)
    [found] = gradients(y.sum(), [x])
    assert np.allclose(found, y.numpy() / x.numpy(), rtol=1e-4)


def test_replayed_numbers_are_random(backend):
    import jittor as jt
    from xmem_jittor import replay

    with replay.recorded() as seeds:
        uniform, normal_ = jt.rand(1000, 1000), jt.randn(1000, 1000)
    u, z = uniform.numpy(), normal_.numpy()
    assert len(seeds) == 3
    assert u.min() >= 0
    assert u.max() < 1
    assert u.mean() == pytest.approx(0.5, abs=2e-3)
    assert u.std() == pytest.approx(12**-0.5, abs=2e-3)
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 5e-3
    assert z.mean() == pytest.approx(0, abs=5e-3)
    assert z.std() == pytest.approx(1, abs=5e-3)
    assert (z**4).mean() == pytest.approx(3, abs=0.05)


def test_jittors_random_is_its_own_outside_of_regions(backend):
    import jittor as jt

    original = jt.random
    with pytest.raises(KeyError):
        xmem.checkpoint(lambda x: {}["missing"], normal(4))
    xmem.checkpoint(lambda x: x * jt.rand(4), learnt(4)).sync()
    assert jt.random is original


def test_the_seed_fixes_what_regions_draw(backend):
    import jittor as jt

    found = []
    for _ in range(2):
        jt.set_global_seed(5)
        found.append(xmem.checkpoint(lambda x: x * jt.rand(16), learnt(16) * 0 + 1).numpy())
    assert np.array_equal(*found)


def test_a_region_leaves_the_streams_of_python_and_numpy_alone(backend):
    import jittor as jt

    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    gradients(xmem.checkpoint(lambda x: x * jt.rand(4), learnt_ones(4)).sum(), [])
    assert (random.random(), np.random.rand()) == expected


def learnt_ones(*shape):
    import jittor as jt

    return jt.array(np.ones(shape, np.float32))


def test_seeding_again_with_the_same_seed_starts_anew_and_without_it_numbers_go_on(backend):
    import jittor as jt

    def drawn():
        return xmem.checkpoint(lambda x: x * jt.rand(16), learnt_ones(16)).numpy()

    jt.set_seed(7)
    first, second = drawn(), drawn()
    jt.set_seed(7)
    third = drawn()
    jt.set_seed(8)
    assert np.array_equal(first, third)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, drawn())


def sources():
    held = {
        "random.Random": random.Random(5),
        "Generator": np.random.default_rng(5),
        "RandomState": np.random.RandomState(5),
    }
    return {
        "python": random.random,
        "numpy": np.random.rand,
        "random.Random": held["random.Random"].random,
        "Generator": held["Generator"].random,
        "RandomState": held["RandomState"].rand,
    }


@pytest.mark.parametrize("name", sources())
def test_numbers_of_the_host_are_drawn_again_the_same(backend, name):
    draw, x = sources()[name], learnt_ones(4)
    between = []

    def noisy(x):
        return x * float(draw())

    y = xmem.checkpoint(noisy, x)
    between.append(draw())  # the stream goes on where it was
    [found] = gradients(y.sum(), [x])
    between.append(draw())
    assert np.allclose(found, y.numpy(), rtol=1e-6)
    assert len({float(y.numpy()[0]), *np.float32(between)}) == 3


def test_a_generator_that_a_submodule_holds_is_set_back(backend):
    from jittor import nn

    class Noise(nn.Module):
        def __init__(self):
            self.stream = np.random.default_rng(1)

        def execute(self, x):
            return x * float(self.stream.random())

    net, x = nn.Sequential(nn.Sequential(Noise()), Noise()), learnt_ones(4)
    y = xmem.checkpoint(net, x)
    [found] = gradients(y.sum(), [x])
    assert np.allclose(found, y.numpy(), rtol=1e-6)


def test_jittors_own_random_operation_in_a_region_is_refused(backend):
    import jittor as jt

    captured, operation, x = jt.random, jt.ops.random, learnt_ones(4)
    for noisy in (
        lambda x: x * jt.ops.random([4], "float32", "uniform"),
        lambda x: x * captured((4,)),
        lambda x: x * operation([4], "float32", "uniform"),
    ):
        with pytest.raises(xmem.CompositionError, match="cannot be recomputed"):
            xmem.checkpoint(noisy, x)
        assert jt.random is captured
        assert jt.ops.random is operation
    # Without the promise to draw the same numbers it is allowed.
    y = xmem.checkpoint(lambda x: x * captured((4,)), x, preserve_rng=False)
    assert y.numpy().any()


def test_a_segment_draws_again_what_each_of_its_blocks_drew(backend):
    from jittor import nn

    net = nn.Sequential(*[nn.Sequential(nn.Dropout(0.3, is_train=True)) for _ in range(4)])
    xmem.apply_checkpointing(net, [[net[0], net[1]], [net[2], net[3]]])
    x = learnt_ones(64, 32)
    y = net(x)
    [found] = gradients(y.sum(), [x])
    assert np.allclose(found, y.numpy(), rtol=1e-5)
    assert 0.5 < (found == 0).mean() < 0.95
