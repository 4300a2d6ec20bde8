"""Packed weights on PyTorch: the format, what is lost, what is held, and what is left alone."""

import copy
import hashlib
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import xmem
from xmem.weights import quantize_weights
from xmem.weights_format import packing_for, unpack

DIGESTS = {8: "f58808d41c537248", 4: "63e895bfc3727e7c"}
"""Of packed normal weights; the test for Jittor has the same."""


def error(found, expected):
    return float((found - expected).detach().norm() / expected.detach().norm())


def weights_of(shape, kind="normal", seed=0):
    generator = np.random.default_rng(seed)
    if kind == "uniform":
        return generator.uniform(-1, 1, shape).astype(np.float32)
    return generator.standard_normal(shape, dtype=np.float32)


def linear(rows, columns, kind="normal"):
    layer = nn.Linear(columns, rows)
    layer.weight.data = torch.from_numpy(weights_of((rows, columns), kind))
    return layer


def packed_in_numpy(weight, packing):
    """Pack at 8 bits, a block at a time."""
    rows = []
    for row in weight:
        blocks = [row[i : i + packing.block] for i in range(0, len(row), packing.block)]
        wanted = [np.float32(np.abs(b).max()) / np.float32(127.5) for b in blocks]
        top = np.float32(max(wanted)) * (np.float32(64) / np.float32(63))
        header = (int(top.view(np.uint32)) + 0xFFFF) >> 16
        scale = np.uint32(header << 16).view(np.float32)
        line = [header & 255, header >> 8]
        codes = []
        for block, want in zip(blocks, wanted, strict=True):
            bits = (int(np.float32(want / scale).view(np.uint32)) + (1 << 18) - 1) >> 18
            q = min(255, max(0, bits - (119 << 5)))
            line.append(q)
            step = scale * np.uint32((q + (119 << 5)) << 18).view(np.float32)
            k = np.clip(np.rint(block * (np.float32(1) / step)), -127, 127)
            codes.append(k.astype(np.int8).view(np.uint8))
        rows.append(np.concatenate([np.array(line, np.uint8), *codes]))
    return np.stack(rows)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_pack_into_the_same_bytes_on_every_framework(backend, bits):
    layer = linear(96, 300)
    quantize_weights(layer, bits)
    assert hashlib.sha256(layer.packed.numpy().tobytes()).hexdigest()[:16] == DIGESTS[bits]


@pytest.mark.parametrize("shape", [(96, 300), (5, 77), (64, 1024), (3, 17), (2, 1)])
def test_eight_bits_are_the_nearest_codes_of_the_definition(backend, shape):
    layer = linear(*shape)
    weight = layer.weight.detach().clone().numpy()
    if shape == (2, 1):
        with pytest.warns(xmem.XmemWarning, match="no less packed"):
            quantize_weights(layer, 8, min_elements=0)
        return
    quantize_weights(layer, 8, min_elements=0)
    assert np.array_equal(layer.packed.numpy(), packed_in_numpy(weight, layer.packing))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scheme", ["weight_only", "dynamic"])
@pytest.mark.parametrize("columns", [37, 64, 289, 576, 1025])
def test_kernels_unpack_as_defined(backend, bits, scheme, columns):
    layer = linear(31, columns)
    quantize_weights(layer, bits, scheme=scheme, min_elements=0)
    assert np.array_equal(layer.weight.numpy(), unpack(layer.packed.numpy(), layer.packing))


@pytest.mark.parametrize("shape", [(1024, 1024), (512, 512), (768, 3072), (256, 256)])
@pytest.mark.parametrize(("bits", "most"), [(8, 1.02), (4, 0.52)])
def test_a_weight_takes_little_more_than_its_bits(backend, shape, bits, most):
    packing = packing_for(shape, bits)
    assert packing.packed_bytes <= most * shape[0] * shape[1], packing


@pytest.mark.parametrize(
    ("kind", "bits", "most"),
    [("uniform", 8, 0.0040), ("normal", 8, 0.0061), ("uniform", 4, 0.065), ("normal", 4, 0.096)],
)
def test_a_layer_s_output_is_off_by_as_much_as_its_weight(backend, kind, bits, most):
    layer = linear(1024, 1024, kind)
    x = torch.randn(64, 1024)
    expected = layer(x)
    receipt = quantize_weights(layer, bits)
    assert 0 < receipt.worst_error <= most
    assert 0.8 * receipt.worst_error <= error(layer(x), expected) <= 1.1 * most


def test_two_layers_of_sixteen_mebibytes_are_off_by_at_most_six_per_mille(backend):
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    x = torch.randn(64, 1024)
    expected = model(x)
    quantize_weights(model)
    assert error(model(x), expected) <= 6e-3


def test_clipping_loses_less_at_four_bits_than_the_largest_magnitude(backend):
    weight = weights_of((256, 1024))
    blocks = weight.reshape(-1, 64)
    step = np.abs(blocks).max(1, keepdims=True) / 7
    plain = np.linalg.norm(np.rint(blocks / step) * step - blocks) / np.linalg.norm(blocks)
    layer = linear(256, 1024)
    assert quantize_weights(layer, 4).worst_error <= 0.9 * plain


def test_outliers_cost_their_block_and_not_their_row(backend):
    layer = linear(64, 1024)
    layer.weight.data[:, 3] = 50.0
    expected = layer.weight.detach()[:, 128:].clone()
    quantize_weights(layer)
    assert error(layer.weight[:, 128:], expected) <= 0.0065


@pytest.mark.parametrize("rows", [1, 4, 5, 64])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_number_of_inputs_is_multiplied_by_the_unpacked_weight(backend, rows, bits):
    layer = linear(300, 520)
    quantize_weights(layer, bits)
    x = torch.randn(rows, 520)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert error(layer(x), expected) <= 1e-6


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 7, 8, 33])
def test_dynamic_multiplies_rows_rounded_to_127_levels(backend, rows, bits):
    layer = linear(130, 600)
    receipt = quantize_weights(layer, bits, scheme="dynamic")
    assert receipt.layers[0].scheme == "dynamic"
    x = torch.randn(rows, 600)
    step = x.abs().amax(1, keepdim=True) / 127
    expected = nn.functional.linear((x / step).round() * step, layer.weight, layer.bias)
    assert error(layer(x), expected) <= 1e-4  # a tie may be rounded to the other side
    assert 1e-3 < error(layer(x), nn.functional.linear(x, layer.weight, layer.bias)) < 2e-2


def test_dynamic_hands_on_what_is_not_finite(backend):
    layer = linear(70, 100)
    quantize_weights(layer, scheme="dynamic")
    x = torch.randn(3, 100)
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    y = layer(x)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()
    assert y[2].isfinite().all()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(32, 64, 5, padding="same"), (2, 32, 50)),
        (nn.Conv2d(64, 64, 3, padding=1, stride=2), (2, 64, 16, 16)),
        (nn.Conv2d(64, 64, 3, padding=1, padding_mode="circular", groups=2), (2, 64, 16, 16)),
        (nn.Conv2d(64, 64, 3, dilation=2), (64, 16, 16)),
        (nn.Conv3d(16, 32, 3), (2, 16, 8, 8, 8)),
        (nn.Linear(300, 200), (300,)),
        (nn.Linear(300, 200, bias=False), (2, 3, 300)),
    ],
    ids=str,
)
@pytest.mark.parametrize("scheme", ["weight_only", "dynamic"])
def test_gradients_reach_inputs_and_biases_as_through_the_unpacked(backend, layer, shape, scheme):
    plain, packed = copy.deepcopy(layer), copy.deepcopy(layer)
    quantize_weights(packed, scheme=scheme)
    plain.weight.data = packed.weight
    results = []
    for module in (plain, packed):
        torch.manual_seed(1)
        x = torch.randn(shape, requires_grad=True)
        y = module(x)
        y.backward(torch.randn_like(y))
        results.append((y.detach(), x.grad, module.bias.grad if module.bias is not None else y))
    most = 2e-2 if scheme == "dynamic" and isinstance(layer, nn.Linear) else 1e-6
    assert error(results[1][0], results[0][0]) <= most
    assert error(results[1][1], results[0][1]) <= 1e-6
    if layer.bias is not None:
        assert error(results[1][2], results[0][2]) <= 1e-6


def test_adapters_beside_packed_layers_train(backend):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
    nn.init.zeros_(up.weight)
    model.requires_grad_(False)
    quantize_weights(model)
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters()], 1e-2)
    x = torch.randn(128, 64)
    target = model(x) + torch.randn(64)
    losses = []
    for _ in range(40):
        loss = (model(x + up(down(x))) - target).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("gradients", [False, True])
def test_no_more_than_four_mebibytes_of_weights_are_unpacked_at_a_time(backend, gradients):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3)))
    model.requires_grad_(False)
    x = torch.randn(8, 2048, requires_grad=gradients)

    def peak():
        for _ in range(2):
            with xmem.measure(model=model, inputs=x) as m:
                y = model(x)
                if gradients:
                    y.sum().backward()
                    x.grad = None
        return m.peak_above_static_bytes

    plain = peak()
    quantize_weights(model)
    assert peak() <= plain + 2**22 + 2**17, (peak(), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_are_packed_and_half_inputs_computed_in_half(backend, dtype):
    layer = linear(256, 256).to(dtype)
    expected = layer.weight.detach().float()
    receipt = quantize_weights(layer)
    assert receipt.before_bytes == 2 * 256 * 256
    assert layer.weight.dtype == dtype
    assert error(layer.weight.float(), expected) <= 0.0068
    assert layer(torch.randn(8, 256, dtype=dtype)).dtype == dtype
    assert layer.float().weight.dtype == torch.float32
    assert layer.packed.dtype == torch.uint8


def test_autocast_and_inference_work_around_it(backend):
    model = nn.Sequential(linear(256, 256), nn.ReLU(), linear(64, 256))
    quantize_weights(model)
    x = torch.randn(16, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xmem.autocast("bfloat16") as block:
            y = model(x)
    assert y.dtype == torch.bfloat16
    assert block.operations["linear"] == {"bfloat16": 2}
    assert error(y.float(), model(x)) <= 2e-2
    with xmem.autocast("bfloat16", keep_fp32=("linear",)) as block:
        assert model(x).dtype == torch.float32
        torch.mm(x, x.t())  # or nothing would run in half
    assert block.operations["linear"] == {"float32": 2}
    with xmem.inference(model):
        assert not model(x).requires_grad
