"""Compressed activations on Jittor: gradients, statistics and random numbers of plain training."""

import numpy as np
import pytest
from chain import chain, error, gradients, learnt, normal, trained, transformer

import xmem

# 8 bits a number, stochastically rounded: about half a percent of a tensor of normal numbers.
MOST = 0.02


def compared(model, *inputs, targets=None, reduce=None, bits=8, loss_of=None, **options):
    """Return losses and gradients, plain and compressed, and the block."""
    import jittor as jt

    targets = trained(model) if targets is None else targets
    found = []
    block = None
    jt.sync_all(True)  # what the initialisers draw
    for compressed in (False, True):
        jt.set_global_seed(3)

        def loss():
            y = model(*inputs, **options)
            return (reduce or (lambda y: (y**2).mean()))(y)

        if compressed:
            with xmem.compress_activations(bits=bits, min_bytes=0) as block:
                made = loss()
        else:
            made = loss()
        grads = gradients(made, targets)
        found.append((made.item(), grads))
    return *found, block


def agree(plain, compressed, most=MOST):
    assert compressed[0] == pytest.approx(plain[0], rel=1e-6)
    errors = [error([f], [e]) for f, e in zip(compressed[1], plain[1], strict=True)]
    assert max(errors) <= most, errors
    assert any(g.any() for g in plain[1])


def test_a_chain_has_the_losses_of_plain_training_and_nearly_its_gradients(backend):
    plain, compressed, block = compared(chain(6, 64), normal(128, 64))
    agree(plain, compressed)
    assert max(error([f], [e]) for f, e in zip(compressed[1], plain[1], strict=True)) > 0
    assert block.receipt.applied_to >= 6


def test_an_unmodified_transformer_block_is_packed(backend):
    plain, compressed, block = compared(transformer(2, 64), normal(2, 32, 64))
    agree(plain, compressed)
    assert {"0.qkv", "1.up"} <= set(block.layers)
    assert block.packed_bytes < 0.3 * block.raw_bytes


@pytest.mark.parametrize(("bits", "most"), [(4, 0.2), (2, 1.0)])
def test_fewer_bits_cost_accuracy(backend, bits, most):
    plain, compressed, _ = compared(chain(4, 64), normal(256, 64), bits=bits)
    agree(plain, compressed, most)


def layers():
    from jittor import nn

    return {
        "conv": (lambda: nn.Conv(8, 8, 3, padding=1), (4, 8, 8, 8)),
        "batch_norm": (lambda: nn.BatchNorm(8), (4, 8, 8, 8)),
        "group_norm": (lambda: nn.GroupNorm(2, 8), (4, 8, 8, 8)),
        "layer_norm": (lambda: nn.LayerNorm(32), (16, 32)),
        "linear": (lambda: nn.Linear(32, 32), (16, 32)),
        "sigmoid": (lambda: nn.Sigmoid(), (16, 32)),
        "tanh": (lambda: nn.Tanh(), (16, 32)),
        "silu": (lambda: nn.SiLU(), (16, 32)),
        "relu": (lambda: nn.ReLU(), (16, 32)),
        "leaky_relu": (lambda: nn.LeakyReLU(), (16, 32)),
        "softmax": (lambda: nn.Softmax(dim=-1), (16, 32)),
        "max_pool": (lambda: nn.Pool(2, op="maximum"), (4, 8, 8, 8)),
        "mean_pool": (lambda: nn.Pool(2, op="mean"), (4, 8, 8, 8)),
    }


@pytest.mark.parametrize(
    "name",
    [
        "conv", "batch_norm", "group_norm", "layer_norm", "linear", "sigmoid", "tanh", "silu",
        "relu", "leaky_relu", "softmax", "max_pool", "mean_pool",
    ],
)  # fmt: skip
def test_layers_between_others_agree(backend, name):
    from jittor import nn

    make, shape = layers()[name]
    width = shape[-1] if len(shape) == 2 else None
    before = nn.Linear(32, 32) if width else nn.Conv(8, 8, 1, bias=False)
    net = nn.Sequential(before, make())
    # Cubes: a normalisation's squares have hardly a gradient. Their mean is near 0, hence the 10.
    plain, compressed, _ = compared(net, normal(*shape), reduce=lambda y: (y**3).mean() + 10)
    agree(plain, compressed)


def test_what_is_compared_in_backward_is_kept_and_its_gradient_is_exact(backend):
    from jittor import nn

    net = nn.Sequential(nn.Conv(8, 8, 1), nn.Pool(2, op="maximum"))
    x = normal(4, 8, 8, 8)
    plain, compressed, block = compared(net, x, reduce=lambda y: y.sum())
    assert "compared in backward" in block.kept_bytes
    assert error(compressed[1], plain[1]) <= 1e-6


def test_statistics_of_batch_norm_are_updated_once_and_bit_equal(backend):
    import jittor as jt
    from jittor import nn

    found = []
    for compressed in (False, True):
        jt.set_global_seed(5)
        np.random.seed(5)
        net = nn.Sequential(nn.Conv(3, 8, 3), nn.BatchNorm(8), nn.ReLU(), nn.Conv(8, 4, 3))
        x = normal(4, 3, 10, 10)
        for _ in range(3):
            if compressed:
                with xmem.compress_activations(bits=4, min_bytes=0):
                    loss = (net(x) ** 2).mean()
            else:
                loss = (net(x) ** 2).mean()
            gradients(loss, trained(net))
        found.append([net[1].running_mean.numpy(), net[1].running_var.numpy()])
    assert np.abs(found[0][0]).max() > 0
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout_draws_what_it_draws_in_plain_training(backend):
    import jittor as jt
    from jittor import nn

    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5, is_train=True), nn.Linear(64, 64))
    net[1].is_train = True
    x = normal(32, 64)
    plain, compressed, block = compared(net, x, reduce=lambda y: y.sum())
    agree(plain, compressed)
    # A mask in bits is exact: where it is 0, nothing flows back.
    assert any(value for value in block.layers)
    jt.set_global_seed(9)
    after_plain = jt.rand(4).numpy()
    jt.set_global_seed(9)
    with xmem.compress_activations(min_bytes=0):
        after = jt.rand(4).numpy()
        net(x)
    np.testing.assert_array_equal(after, after_plain)


def test_a_mask_of_dropout_takes_a_bit_an_element(backend):
    from jittor import nn

    net = nn.Sequential(nn.Dropout(0.5, is_train=True))
    x = learnt(512, 64)
    _, _, block = compared(net, x, targets=[x], reduce=lambda y: y.sum())
    assert block.packed_bytes == 512 * 64 // 8


def test_small_positive_values_keep_the_mask_of_relu(backend):
    from jittor import nn

    x = learnt(64, 64)
    x.assign(x * 1e-6 + (x > 2) * 100)
    net = nn.Sequential(nn.ReLU(), nn.Linear(64, 64))
    for bits in (8, 4, 2):
        plain, compressed, _ = compared(net, x, targets=[x], reduce=lambda y: y.sum(), bits=bits)
        np.testing.assert_array_equal(compressed[1][0] != 0, plain[1][0] != 0)


def test_several_inputs_outputs_keywords_and_containers_come_through(backend):
    from jittor import nn

    class Mix(nn.Module):
        def __init__(self):
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.scale = learnt(16)

        def execute(self, pair, *, extra, factor):
            left, right = pair["a"], pair["b"][0]
            hidden = nn.gelu(self.first(left)) * right + extra
            return {
                "hidden": hidden,
                "all": [self.second(hidden) * self.scale, "text"],
                "n": factor,
            }

    net = nn.Sequential(Mix())
    a, b, c = learnt(8, 16), learnt(8, 16), learnt(8, 16)

    class Model(nn.Module):
        def __init__(self):
            self.blocks = net

        def execute(self, a, b, c):
            y = self.blocks[0]({"a": a, "b": (b, 1)}, extra=c, factor=2.0)
            assert y["all"][1] == "text"
            return (y["hidden"] ** 2).sum() * y["n"] + (y["all"][0] ** 3).sum()

    model = Model()
    plain, compressed, _ = compared(
        model, a, b, c, targets=[a, b, c, *trained(net)], reduce=lambda y: y
    )
    agree(plain, compressed)


def test_a_module_called_twice_and_one_whose_output_is_not_used(backend):
    from jittor import nn

    class Twice(nn.Module):
        def __init__(self):
            self.shared, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def execute(self, x):
            y = nn.gelu(self.shared(x))
            self.unused(y)
            return self.shared(y) + x

    model = Twice()
    plain, compressed, _ = compared(model, normal(32, 16))
    agree(plain, compressed)
    assert not compressed[1][2].any()


def test_frozen_parameters_get_no_gradient_and_others_do(backend):
    net = chain(4, 32)
    for p in net[1].parameters():
        p.stop_grad()
    plain, compressed, _ = compared(net, normal(64, 32))
    agree(plain, compressed)


def test_a_tensor_that_two_layers_read_is_packed_once(backend):
    from jittor import nn

    class Heads(nn.Module):
        def __init__(self):
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
            self.first = nn.Linear(32, 32)

        def execute(self, x):
            x = self.first(x)
            return self.q(x) + self.k(x) * 2 + self.v(x) * 3

    plain, compressed, block = compared(Heads(), normal(64, 32))
    agree(plain, compressed)
    assert block.raw_bytes == 64 * 32 * 4


def test_what_somebody_holds_keeps_its_value_and_its_gradient(backend):
    from jittor import nn

    class Holding(nn.Module):
        def __init__(self):
            self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

        def execute(self, x):
            self.seen = nn.gelu(self.inner(x))
            self.log = self.seen.detach()
            return self.outer(self.seen)

    class Model(nn.Module):
        def __init__(self):
            self.blocks = nn.Sequential(Holding(), Holding())

        def execute(self, x):
            y = self.blocks(x)
            return (y**2).sum() + sum((b.seen**2).sum() for b in self.blocks)

    model = Model()
    plain, compressed, _ = compared(model, normal(32, 16), reduce=lambda y: y)
    agree(plain, compressed)
    for block in model.blocks:
        np.testing.assert_array_equal(block.seen.numpy(), block.log.numpy())
        assert np.isfinite(block.seen.numpy()).all()


def test_without_gradients_calls_are_plain(backend):
    import jittor as jt

    net, x = chain(2, 32), normal(16, 32)
    expected = net(x).numpy()
    with (
        jt.no_grad(),
        pytest.warns(xmem.XmemWarning, match="applied to nothing"),
        xmem.compress_activations(min_bytes=0) as block,
    ):
        y = net(x)
    assert y.is_stop_grad()
    assert not block.layers
    np.testing.assert_array_equal(y.numpy(), expected)


def test_gradients_come_once(backend):
    import jittor as jt

    net, x = chain(2, 32), normal(16, 32)
    with xmem.compress_activations(min_bytes=0):
        loss = (net(x) ** 2).mean()
    jt.grad(loss, trained(net), retain_graph=True)
    with pytest.raises(xmem.CompositionError, match="gradients were asked for twice"):
        jt.grad(loss, trained(net))


@pytest.mark.parametrize("squared", [True, False])
def test_views_of_small_tensors_that_were_packed_are_not_read_while_they_are_empty(
    backend, squared
):
    import jittor as jt
    from jittor import nn

    class Scaled(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(32, 32)

        def execute(self, x):
            # What the linear layer reads is made again of x and of a number for each row, which is
            # small beside x, and packed or made again itself.
            rows = (x * x).mean(-1)
            scale = jt.rsqrt(rows + 1e-5).unsqueeze(-1) if squared else 1 / (1 + rows.unsqueeze(-1))
            return self.linear(x * scale)

    net = nn.Sequential(nn.Linear(32, 32), nn.Sequential(Scaled(), nn.GELU()), Scaled())
    plain, compressed, block = compared(net, normal(1024, 32))
    agree(plain, compressed)
    assert block.packed_bytes < 0.3 * block.raw_bytes


def test_a_small_tensor_that_is_made_again_may_be_part_of_a_large_one(backend):
    from jittor import nn

    class Positions(nn.Module):
        def __init__(self):
            self.positions = learnt(32, 32)
            self.own, self.all = nn.Linear(32, 32), nn.Linear(32, 32)

        def execute(self, x):
            place = nn.gelu(nn.gelu(self.positions * 1.5) * 2)
            return self.all(nn.gelu(x + place)) + self.own(place)

    net = nn.Sequential(Positions(), Positions())
    plain, compressed, _ = compared(net, normal(32, 32, 32))
    agree(plain, compressed)


def test_modules_with_hooks_are_packed_and_their_hooks_run(backend):
    """A hook gives its class a `__call__` of its own."""
    import jittor as jt
    from jittor import nn

    class Hooked(nn.Linear):
        pass

    net, x = nn.Sequential(*[Hooked(64, 64) for _ in range(3)]), normal(256, 64)
    seen = []
    net[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    before = Hooked.__dict__["__call__"]
    with xmem.compress_activations(min_bytes=0, model=net) as block:
        loss = (net(x) ** 2).mean()
    assert Hooked.__dict__["__call__"] is before
    assert {"1", "2"} <= set(block.layers)
    assert len(seen) == 1
    plain = gradients((net(x) ** 2).mean(), trained(net))
    found = [g.numpy() for g in jt.grad(loss, trained(net), retain_graph=False)]
    assert max(error([f], [p]) for f, p in zip(found, plain, strict=True)) < 0.02
