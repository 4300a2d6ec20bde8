"""Packed weights on Jittor: what is lost, what is held, how models are saved and trained on."""

import gc
import hashlib
import pickle

import numpy as np
import pytest
from chain import normal

import xmem
from xmem.weights import WeightsReceipt, dequantize, quantize_weights
from xmem.weights_format import unpack

DIGESTS = {8: "f58808d41c537248", 4: "63e895bfc3727e7c"}
"""Of packed normal weights; the test for PyTorch has the same."""


def error(found, expected):
    found, expected = (np.asarray(v.numpy() if hasattr(v, "numpy") else v, np.float64)
                       for v in (found, expected))  # fmt: skip
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def linear(rows, columns, seed=0):
    import jittor as jt
    from jittor import nn

    layer = nn.Linear(columns, rows)
    weight = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    layer.weight.update(jt.array(weight))
    jt.sync_all(True)
    return layer


def sequential(*layers):
    from jittor import nn

    return nn.Sequential(*layers)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_pack_into_the_same_bytes_on_every_framework(backend, bits):
    layer = linear(96, 300)
    quantize_weights(layer, bits)
    assert hashlib.sha256(layer.packed.numpy().tobytes()).hexdigest()[:16] == DIGESTS[bits]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 4, 5, 64])
def test_every_number_of_inputs_is_multiplied_by_what_the_definition_unpacks(backend, rows, bits):
    layer = linear(300, 520)
    quantize_weights(layer, bits)
    weight = unpack(layer.packed.numpy(), layer.packing)
    assert np.array_equal(layer.weight.numpy(), weight)
    x = normal(rows, 520)
    assert error(layer(x), x.numpy() @ weight.T + layer.bias.numpy()) <= 1e-6


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 33])
def test_dynamic_multiplies_rows_rounded_to_127_levels(backend, rows, bits):
    layer = linear(130, 600)
    receipt = quantize_weights(layer, bits, scheme="dynamic")
    assert receipt.layers[0].scheme == "dynamic"
    weight, x = layer.weight.numpy(), normal(rows, 600)
    step = np.abs(x.numpy()).max(1, keepdims=True) / 127
    expected = np.rint(x.numpy() / step) * step @ weight.T + layer.bias.numpy()
    assert error(layer(x), expected) <= 1e-4  # a tie may be rounded to the other side
    assert 1e-3 < error(layer(x), x.numpy() @ weight.T + layer.bias.numpy()) < 2e-2


def test_two_layers_of_sixteen_mebibytes_are_off_by_at_most_six_per_mille(backend):
    from jittor import nn

    model = sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    x = normal(64, 1024)
    expected = model(x).numpy()
    receipt = quantize_weights(model)
    assert receipt.after_bytes <= 1.02 * sum(layer.elements for layer in receipt.layers)
    assert 0 < error(model(x), expected) <= 6e-3


def layers():
    from jittor import nn

    return {
        "conv1d": (nn.Conv1d(32, 64, 5), (2, 32, 50)),
        "conv2d": (nn.Conv2d(64, 64, 3, padding=1, stride=2), (2, 64, 16, 16)),
        "groups": (nn.Conv2d(64, 64, 3, padding=1, groups=2), (2, 64, 16, 16)),
        "conv3d": (nn.Conv3d(16, 32, 3), (2, 16, 8, 8, 8)),
        "linear": (nn.Linear(300, 200), (2, 3, 300)),
        "dynamic": (nn.Linear(300, 200), (2, 3, 300)),
    }


@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "groups", "conv3d", "linear", "dynamic"])
def test_gradients_reach_inputs_and_biases_as_through_the_unpacked(backend, kind):
    import jittor as jt

    layer, shape = layers()[kind]
    values = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    quantize_weights(layer, scheme="dynamic" if kind == "dynamic" else "weight_only")

    def results():
        x = jt.array(values).start_grad()
        y = layer(x)
        g = jt.array(np.random.default_rng(2).standard_normal(y.shape, dtype=np.float32))
        return [y.numpy(), *(v.numpy() for v in jt.grad((y * g).sum(), [x, layer.bias]))]

    packed = results()
    dequantize(layer)
    plain = results()
    assert error(packed[0], plain[0]) <= (2e-2 if kind == "dynamic" else 1e-6)
    assert error(packed[1], plain[1]) <= 1e-5
    assert error(packed[2], plain[2]) <= 1e-5


def test_adapters_beside_packed_layers_train(backend):
    import jittor as jt
    from jittor import nn

    model = sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    quantize_weights(model)
    for p in model.parameters():
        p.stop_grad()
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
    up.weight.update(jt.zeros_like(up.weight))
    optimizer = jt.optim.Adam([*down.parameters(), *up.parameters(), *model.parameters()], 1e-2)
    before = model[0].packed.numpy()
    x = normal(128, 64)
    target = (model(x) + normal(64)).stop_grad()
    losses = []
    for _ in range(40):
        loss = (model(x + up(down(x))) - target).sqr().mean()
        optimizer.step(loss)
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert np.array_equal(model[0].packed.numpy(), before)


@pytest.mark.parametrize("gradients", [False, True])
def test_one_layer_is_unpacked_at_a_time(backend, gradients):
    import jittor as jt

    model = sequential(*(linear(512, 512, seed) for seed in range(6)))
    for p in model.parameters():
        p.stop_grad()
    values = normal(8, 512)

    def peak():
        for _ in range(2):
            gc.collect()
            x = values.clone()
            x = (x.start_grad() if gradients else x.stop_grad()).sync()
            with xmem.measure(model=model, inputs=x) as m:
                y = model(x)
                (jt.grad(y.sum(), x) if gradients else y).sync()
                del y
        return m.peak_above_static_bytes

    plain = peak()
    quantize_weights(model)
    layer_bytes = 4 * 512 * 512
    assert layer_bytes <= peak() <= plain + layer_bytes + 2**17, (peak(), plain)


def test_autocast_and_inference_work_around_it(backend):
    from jittor import nn

    model = sequential(linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    quantize_weights(model)
    x = normal(16, 256)
    expected = model(x).numpy()
    with xmem.autocast() as block:
        y = model(x)
    assert str(y.dtype) == "float16"
    assert block.operations["linear"] == {"float16": 2}
    assert 0 < error(y.float32(), expected) <= 1e-2
    with xmem.inference(model):
        assert error(model(x), expected) <= 1e-6


def test_a_packed_layer_inside_a_checkpointed_block_has_the_same_gradient(backend):
    import jittor as jt
    from jittor import nn

    model = sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 16, 3))
    quantize_weights(model)
    values = np.random.default_rng(1).standard_normal((2, 16, 12, 12), dtype=np.float32)
    found = []
    for run in (model, lambda x: xmem.checkpoint(model, x)):
        x = jt.array(values).start_grad()
        found.append(jt.grad(run(x).sqr().sum(), x).numpy())
    assert error(found[1], found[0]) <= 1e-5


def test_a_receipt_tells_bytes_errors_and_what_was_left_out(backend):
    import jittor as jt
    from jittor import nn

    model = sequential(linear(128, 128), nn.Linear(4, 4), nn.ConvTranspose(8, 8, 3))
    jt.sync_all(True)
    receipt = quantize_weights(model)
    assert isinstance(receipt, WeightsReceipt)
    assert receipt.names == ("0",)
    assert receipt.before_bytes == 4 * 128 * 128
    assert receipt.after_bytes == model[0].packed.nbytes
    assert receipt.measured_saving_bytes == receipt.before_bytes - receipt.after_bytes
    assert dict(receipt.left_out) == {"1": "fewer than 4096 weights"}
    with pytest.warns(xmem.XmemWarning, match="packed already"):
        assert quantize_weights(model, 4).applied_to == 0


def test_shared_weights_stay_shared_and_other_holders_are_named(backend):
    from jittor import nn

    model = sequential(nn.Embedding(500, 128), nn.Linear(128, 500, bias=False))
    model[1].weight = model[0].weight
    receipt = quantize_weights(model)
    assert receipt.names == ("0", "1")
    assert model[0].packed is model[1].packed
    dequantize(model)
    assert model[0].weight is model[1].weight
    model[1].extra = model[0].weight
    with pytest.warns(xmem.XmemWarning, match=r"its weight is also 1\.extra"):
        assert quantize_weights(model).applied_to == 0


def test_attention_is_left_the_weight_that_it_reads(backend):
    from jittor import attention

    receipt = quantize_weights(sequential(attention.MultiheadAttention(128, 4), linear(64, 128)))
    assert receipt.names == ("1",)
    assert dict(receipt.left_out) == {"0.out_proj": "MultiheadAttention reads its weight itself"}


def test_an_embedding_looks_up_unpacked_rows(backend):
    import jittor as jt
    from jittor import nn

    layer = nn.Embedding(1000, 300)
    quantize_weights(layer)
    ids = np.random.default_rng(0).integers(0, 1000, (4, 5))
    assert np.array_equal(layer(jt.array(ids)).numpy(), layer.weight.numpy()[ids])


def test_states_are_saved_loaded_and_pickled(backend, tmp_path):
    one, other = linear(128, 128), linear(128, 128, seed=1)
    quantize_weights(one, 4)
    quantize_weights(other, 4)
    x = normal(8, 128)
    assert set(one.state_dict()) == {"packed", "bias"}
    one.save(str(tmp_path / "model.pkl"))
    other.load(str(tmp_path / "model.pkl"))
    again = pickle.loads(pickle.dumps(one))
    for model in (other, again):
        assert np.array_equal(model(x).numpy(), one(x).numpy())
        assert model.packed.is_stop_grad()
        assert str(model.packed.dtype) == "uint8"


def test_float_weights_are_not_loaded_in_silence(backend, capfd):
    """Jittor writes into what `getattr` gives it; that would be a tensor just unpacked."""
    layer = linear(128, 128)
    quantize_weights(layer)
    before = layer.packed.numpy()
    assert layer.load_parameters({"weight": np.zeros((128, 128), np.float32)}) is None
    assert np.array_equal(layer.packed.numpy(), before)
    assert "load parameter weight failed" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_undo_gives_weights_in_their_places(backend, dtype):
    model = sequential(linear(128, 128), linear(64, 128))
    model[1].weight.stop_grad()
    names = list(model.state_dict())
    if dtype == "float16":
        model.float16()
    receipt = quantize_weights(model)
    expected = model[0].weight.numpy()
    receipt.undo()
    assert list(model.state_dict()) == names
    assert np.array_equal(model[0].weight.numpy(), expected)
    assert str(model[0].weight.dtype) == dtype
    assert not model[0].weight.is_stop_grad()
    assert model[1].weight.is_stop_grad()
    receipt.undo()
    with pytest.raises(xmem.UsageError, match="no layer of Sequential has packed weights"):
        dequantize(model)


def test_modes_change_and_packed_weights_never_require_gradients(backend):
    model = sequential(*(linear(128, 128, seed) for seed in range(3)))
    model.eval()
    quantize_weights(model)
    for _ in range(3):
        model.train()
        assert all(layer.packed.is_stop_grad() for layer in model)
        assert not any(layer.bias.is_stop_grad() for layer in model)
        model.eval()
    model.float16()
    assert str(model[0].packed.dtype) == "uint8"


def test_values_that_no_scale_fits_are_left_alone(backend):
    model = sequential(*(linear(128, 128) for _ in range(3)))
    for layer, value in zip(model, (np.nan, np.inf, 0), strict=True):
        weight = layer.weight.numpy().copy()
        weight[5, 5] = value
        layer.load_parameters({"weight": weight})
    receipt = quantize_weights(model)
    assert receipt.names == ("2",)
    assert {why for _, why in receipt.left_out} == {
        "it has values that are infinite, NaN or beyond 1e37"
    }
