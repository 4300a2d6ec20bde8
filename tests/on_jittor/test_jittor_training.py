"""Optimizers and workload models on Jittor, against NumPy and PyTorch."""

import gc
import math

import numpy as np
import pytest
from chain import chain, normal, through, trained

import xmem
from xmem.workloads import make_batch, make_weights
from xmem.workloads import spec as declared
from xmem.workloads.catalog import workload


def static_bytes(backend):
    gc.collect()
    backend.measure.synchronize()
    return backend.measure.counters().allocated_bytes


def steps(name, gradients, learning_rate):
    """Update one parameter with given gradients; returns it after every step."""
    import jittor as jt
    from jittor import nn

    layer = nn.Linear(6, 6, bias=False)
    training = xmem.active().training
    optimizer = training.make_optimizer(name, layer, learning_rate=learning_rate)
    found = [layer.weight.numpy()]
    for gradient in gradients:
        # The gradient of sum(w * g) is g.
        training.backward((layer.weight * jt.array(gradient)).sum(), optimizer)
        training.optimizer_step(optimizer)
        training.zero_grad(optimizer)
        found.append(layer.weight.numpy())
    return found


def test_adam_is_the_rule_of_the_paper(backend):
    generator = np.random.default_rng(1)
    scales = 10.0 ** np.arange(-9, 1, 2)
    gradients = [
        (generator.standard_normal((6, 6)) * scales[i % 5]).astype(np.float32) for i in range(10)
    ]
    found = steps("adam", gradients, 1e-2)
    p = found[0].astype(np.float64)
    m = v = np.zeros((6, 6))
    for t, (g, after) in enumerate(zip(gradients, found[1:], strict=True), start=1):
        g = g.astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - 1e-2 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        assert np.abs(after - p).max() <= 1e-6 * max(1, np.abs(p).max())


def test_sgd_is_plain_and_keeps_no_state(backend):
    generator = np.random.default_rng(1)
    gradients = [generator.standard_normal((6, 6)).astype(np.float32) for _ in range(3)]
    found = steps("sgd", gradients, 0.1)
    expected = found[0] - 0.1 * sum(gradients)
    assert np.abs(found[-1] - expected).max() <= 1e-6
    net = chain(1, 8)
    optimizer = backend.training.make_optimizer("sgd", net, learning_rate=0.1)
    assert not backend.measure.owned(net, optimizer, None)["optimizer"]


def test_an_unknown_optimizer_is_named(backend):
    with pytest.raises(xmem.UsageError, match="Did you mean 'adam'"):
        backend.training.make_optimizer("adm", chain(1, 8), learning_rate=0.1)


def test_a_step_without_gradients_is_refused(backend):
    optimizer = backend.training.make_optimizer("adam", chain(1, 8), learning_rate=0.1)
    with pytest.raises(xmem.UsageError, match="before backward"):
        xmem.optimizer_step(optimizer)


def test_a_step_leaves_parameters_and_state_only(backend):
    before = static_bytes(backend)
    net, x = chain(4, 64), normal(256, 64)
    optimizer = backend.training.make_optimizer("adam", net, learning_rate=1e-3)
    weights = sum(p.nbytes for p in trained(net))
    for _ in range(2):
        loss = (through(net, x) ** 2).mean()
        xmem.backward(loss, optimizer)
        del loss
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)
        assert static_bytes(backend) - before == 3 * weights + x.nbytes


def test_gradients_are_float32_by_name(backend):
    net, x = chain(2, 8), normal(4, 8)
    optimizer = backend.training.make_optimizer("sgd", net, learning_rate=1e-3)
    xmem.backward((through(net, x) ** 2).mean(), optimizer)
    found = backend.training.gradients(net, optimizer)
    assert sorted(found) == ["0.0.bias", "0.0.weight", "1.0.bias", "1.0.weight"]
    assert all(g.dtype == np.float32 and g.any() for g in found.values())


LAYERS = {
    "linear": (declared.Linear(6, 5), (3, 4, 6)),
    "conv2d": (declared.Conv(2, 4, 6, 3, 2, 1), (2, 4, 9, 9)),
    "conv3d": (declared.Conv(3, 4, 6, 3, 1, 1), (2, 4, 5, 6, 7)),
    "conv3d_stride": (declared.Conv(3, 4, 6, 3, 2, 1, bias=False), (2, 4, 7, 6, 5)),
    "conv3d_pointwise": (declared.Conv(3, 4, 6, 1), (2, 4, 5, 6, 7)),
    "conv_transpose2d": (declared.ConvTranspose(2, 4, 6, 2), (2, 4, 5, 6)),
    "conv_transpose3d": (declared.ConvTranspose(3, 4, 6, 2), (2, 4, 3, 4, 5)),
    "batch_norm": (declared.BatchNorm(2, 4), (3, 4, 5, 5)),
    "layer_norm": (declared.LayerNorm(6), (3, 4, 6)),
    "group_norm": (declared.GroupNorm(2, 4), (3, 4, 5, 5, 5)),
    "gelu": (declared.Activation("gelu"), (3, 6)),
    "relu": (declared.Activation("relu"), (3, 6)),
    "max_pool2d": (declared.MaxPool(2, 3, 2, 1), (2, 4, 8, 8)),
    "max_pool3d": (declared.MaxPool(3, 2, 2), (2, 4, 4, 6, 8)),
    "average": (declared.GlobalAveragePool(3), (2, 4, 3, 4, 5)),
    "attention": (declared.Attention(8, 2, causal=False), (2, 5, 8)),
    "causal_attention": (declared.Attention(8, 2, causal=True), (2, 5, 8)),
    "residual": (declared.Residual(declared.Linear(6, 6)), (3, 6)),
    "concat": (declared.Concat(declared.Conv(2, 4, 6, 1)), (2, 4, 3, 3)),
}


def random_weights(spec):
    generator = np.random.default_rng(3)
    return {
        name: generator.standard_normal(p.shape).astype(np.float32) * 0.3
        for name, p in declared.parameters(spec)
    }


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_what_pytorch_makes_of_it(backend, name):
    torch = pytest.importorskip("torch")
    import jittor as jt
    from xmem_torch.models import Models as TorchModels

    spec, shape = LAYERS[name]
    weights = random_weights(spec)
    values = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    theirs, ours = TorchModels("cpu").build(spec, weights), backend.models.build(spec, weights)
    x = torch.tensor(values, requires_grad=True)
    y = theirs(x)
    factor = np.random.default_rng(5).standard_normal(y.shape).astype(np.float32)
    (y * torch.tensor(factor)).sum().backward()
    v = jt.array(values)
    found = ours(v)
    named = [(n, p) for n, p in ours.named_parameters() if not p.is_stop_grad()]
    grads = jt.grad((found * jt.array(factor)).sum(), [v, *(p for _, p in named)])
    assert tuple(found.shape) == tuple(y.shape)
    close(found.numpy(), y.detach().numpy())
    close(grads[0].numpy(), x.grad.numpy())
    expected = dict(theirs.named_parameters())
    assert {n for n, _ in named} == set(expected) == set(weights)
    for (n, _), g in zip(named, grads[1:], strict=True):
        close(g.numpy(), expected[n].grad.numpy())


def close(found, expected):
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected) + 1e-6


def test_embedding_adds_positions(backend):
    spec = declared.Embedding(10, 6, 4)
    weights = random_weights(spec)
    ids = np.array([[1, 9, 1], [0, 3, 2]], np.int32)
    found = backend.models.build(spec, weights)(backend.models.tensor(ids)).numpy()
    expected = weights["token.weight"][ids] + weights["position.weight"][:3]
    assert np.allclose(found, expected)


@pytest.mark.parametrize(
    ("kind", "axis", "shape"),
    [("cross_entropy", 2, (3, 4, 7)), ("cross_entropy_channels", 1, (3, 7, 4, 2))],
)
def test_cross_entropy_is_the_mean_over_targets(backend, kind, axis, shape):
    generator = np.random.default_rng(2)
    output = generator.standard_normal(shape).astype(np.float32) * 4
    spots = tuple(size for i, size in enumerate(shape) if i != axis)
    target = generator.integers(0, 7, spots).astype(np.int32)
    moved = np.moveaxis(output.astype(np.float64), axis, -1)
    logs = moved - np.log(np.exp(moved).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logs, target[..., None], -1).mean()
    models = backend.models
    found = models.item(models.loss(kind, models.tensor(output), models.tensor(target)))
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_mean_over_many_numbers_is_exact(backend):
    models = backend.models
    values = np.random.default_rng(2).standard_normal((1024, 1024)).astype(np.float32)
    found = models.item(models.loss("mse", models.tensor(values), models.tensor(values * 0)))
    assert found == pytest.approx((values.astype(np.float64) ** 2).mean(), rel=1e-6)


def test_tensors_keep_their_integers(backend):
    models = backend.models
    for dtype in (np.float32, np.int32, np.int64):
        tensor = models.tensor(np.array([1, 2], dtype))
        assert str(tensor.dtype) == np.dtype(dtype).name
        assert tensor.is_stop_grad()


def test_weights_of_another_model_are_refused(backend):
    spec = declared.Linear(4, 4)
    weights = random_weights(spec)
    with pytest.raises(xmem.UsageError, match="only in the model"):
        backend.models.build(spec, {"weight": weights["weight"]})
    with pytest.raises(xmem.UsageError, match="has shape"):
        backend.models.build(spec, {**weights, "bias": np.zeros(3, np.float32)})


def test_blocks_come_in_the_order_of_the_declaration(backend):
    quick = workload("unet3d")
    model = backend.models.build(quick.model, make_weights(quick))
    names = {id(m): name for name, m in model.named_modules()}
    assert [names[id(b)] for b in backend.models.blocks(model)] == [
        "net.encode",
        "net.skip.body.inner.encode",
        "net.skip.body.inner.skip.body.inner",
        "net.skip.body.inner.decode",
        "net.decode",
    ]


def test_a_workload_learns(backend):
    quick = workload("mlp")
    models, training = backend.models, backend.training
    model = models.build(quick.model, make_weights(quick))
    optimizer = training.make_optimizer(quick.optimizer, model, learning_rate=quick.learning_rate)
    x, target = map(models.tensor, make_batch(quick))
    losses = []
    for _ in range(3):
        loss = models.loss(quick.loss, model(x), target)
        training.backward(loss, optimizer)
        training.optimizer_step(optimizer)
        training.zero_grad(optimizer)
        losses.append(models.item(loss))
    assert losses[2] < losses[1] < losses[0]
    assert all(map(math.isfinite, losses))
