"""Autocast on Jittor: halves what is kept, and leaves nothing behind."""

import numpy as np
import pytest
from chain import chain, error, gradients, normal, peak_above_static_bytes, through, trained

import xmem


def attributes():
    """Return everything that autocast replaces, as it is now."""
    from xmem_jittor import operations

    return [owner.__dict__[name] for _, owner, name, _ in operations.replacements()]


def test_blocks_leave_everything_as_it_was(backend):
    before = attributes()
    with xmem.autocast("float16"):
        assert attributes() != before
        with xmem.autocast("auto", keep_fp32=("softmax",)), xmem.autocast(enabled=False):
            pass
    assert attributes() == before
    with pytest.raises(KeyError), xmem.autocast("float16"):
        raise KeyError
    assert attributes() == before


def test_blocks_nest(backend):
    from jittor import nn

    layer, x = nn.Linear(4, 4), normal(2, 4)
    dtypes = []
    with xmem.autocast("float16"):
        dtypes.append(layer(x).dtype)
        with xmem.autocast(enabled=False):
            dtypes.append(layer(x).dtype)
        with xmem.autocast("float16", keep_fp32=("linear",)):
            dtypes.append(layer(x).dtype)
        dtypes.append(layer(x).dtype)
    dtypes.append(layer(x).dtype)
    assert [str(d) for d in dtypes] == ["float16", "float32", "float32", "float16", "float32"]


def test_what_is_kept_halves_and_gradients_stay_float32(backend):
    import jittor as jt

    net, x = chain(8, 256), normal(2048, 256)

    def step(half):
        with xmem.autocast("float16", enabled=half):
            # A sum: gradients of a mean over so many numbers would need a loss scale in float16.
            loss = (through(net, x).float32() ** 2).sum()
        return jt.grad(loss, trained(net), retain_graph=False)

    found = {half: [g.numpy() for g in step(half)] for half in (False, True)}
    peaks = {
        half: peak_above_static_bytes(backend.measure, lambda h=half: step(h))
        for half in (False, True)
    }
    assert all(g.dtype == np.float32 for g in found[True])
    assert error(found[True], found[False]) <= 5e-3
    assert peaks[True] <= 0.7 * peaks[False], peaks


def layers():
    from jittor import nn

    width = 8
    return {
        "conv": (nn.Conv(width, width, 3, 1, 1), (2, width, 6, 6)),
        "conv_groups": (nn.Conv(width, width, 3, 1, 1, groups=2), (2, width, 6, 6)),
        "conv3d": (nn.Conv3d(width, 4, 3, 1, 1), (1, width, 4, 4, 4)),
        "conv_transpose": (nn.ConvTranspose(width, 4, 2, stride=2), (2, width, 4, 4)),
        "conv_transpose3d": (nn.ConvTranspose3d(width, 4, 2, stride=2), (1, width, 3, 3, 3)),
        "batch_norm": (nn.BatchNorm(width), (4, width, 5, 5)),
        "group_norm": (nn.GroupNorm(2, width), (4, width, 5, 5)),
        "layer_norm": (nn.LayerNorm(width), (4, 5, width)),
        "pool": (nn.Pool(2, 2, op="maximum"), (2, width, 6, 6)),
        "linear": (nn.Linear(width, 4), (3, 5, width)),
        "relu": (nn.ReLU(), (3, width)),
        "gelu": (nn.GELU(), (3, width)),
        "softmax": (nn.Softmax(dim=-1), (3, width)),
    }


@pytest.mark.parametrize("name", [
    "conv", "conv_groups", "conv3d", "conv_transpose", "conv_transpose3d", "batch_norm",
    "group_norm", "layer_norm", "pool", "linear", "relu", "gelu", "softmax",
])  # fmt: skip
def test_every_layer_takes_half_inputs_and_is_right(backend, name):
    import jittor as jt

    layer, shape = layers()[name]
    x = jt.array(np.random.randn(*shape).astype(np.float32))
    found = []
    for half in (False, True):
        with xmem.autocast("float16", enabled=half):
            y = layer(x.float16() if half else x.float16().float32())
        assert str(y.dtype) == ("float16" if half else "float32")
        weight = jt.array(np.arange(y.numel(), dtype=np.float32).reshape(y.shape) % 7 - 3)
        loss = (y.float32() * weight).sum()
        found.append([y.float32().numpy(), *gradients(loss, [*trained(layer), x])])
    assert error(found[1], found[0]) <= 1e-2


def test_matmul_of_activations_keeps_halves(backend):
    import jittor as jt

    a = jt.array(np.random.randn(2, 3, 16, 8).astype(np.float32))
    b = jt.array(np.random.randn(2, 3, 8, 16).astype(np.float32))
    found = []
    for half in (False, True):
        with xmem.autocast("float16", enabled=half):
            y = a @ b
        found.append([y.float32().numpy(), *gradients((y.float32() ** 2).sum(), [a, b])])
    assert str(y.dtype) == "float16"
    assert error(found[1], found[0]) <= 5e-3


def test_losses_are_computed_in_float32(backend):
    import jittor as jt
    from jittor import nn

    logits = jt.array(np.random.randn(6, 5).astype(np.float32)).float16()
    with xmem.autocast("float16"):
        loss = nn.cross_entropy_loss(logits, jt.array(np.arange(6, dtype=np.int32) % 5))
    assert str(loss.dtype) == "float32"


def test_names_are_checked(backend):
    with pytest.raises(xmem.UsageError, match="Did you mean 'softmax'"):
        xmem.autocast("float16", keep_fp32=("softmx",))
    with pytest.raises(xmem.UsageError, match="Did you mean 'float16'"):
        xmem.autocast("float61")
    with pytest.raises(xmem.CapabilityError, match="bfloat16"):
        xmem.autocast("bfloat16")
    assert "bfloat16" in backend.precision.gaps


def test_casts_are_exact(backend):
    import jittor as jt
    from xmem_jittor import halves

    generator = np.random.default_rng(0)
    sizes = 10.0 ** generator.uniform(-9, 5, 1003)
    values = (generator.standard_normal(1003) * sizes).astype(np.float32)
    values[:4] = [0, 65504, 70000, 1e-8]
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    half = halves.to_half(jt.array(values), "float16")
    assert str(half.dtype) == "float16"
    assert np.array_equal(half.numpy(), expected)
    assert np.array_equal(halves.to_float32(half).numpy(), expected.astype(np.float32))
    assert half is halves.to_half(half, "float16")
