"""Models with packed weights on PyTorch: saved, copied, shared, left alone, refused, put back."""

import copy
import pickle

import pytest
import torch
from test_torch_weights import error, linear
from torch import nn

import xmem
from xmem.weights import WeightsReceipt, dequantize, quantize_weights


class Tied(nn.Module):
    """An embedding and a head with one weight, and layers that read theirs in ways of their own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
        self.recurrent = nn.LSTM(128, 128, batch_first=True)
        self.small = nn.Linear(128, 4)
        self.head = nn.Linear(128, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.attention(x, x, x)[0]
        return self.head(self.recurrent(self.normed(x))[0])


def ids():
    return torch.randint(0, 500, (2, 9))


def test_a_receipt_tells_bytes_errors_and_what_was_left_out(backend):
    model = Tied()
    receipt = quantize_weights(model)
    assert isinstance(receipt, WeightsReceipt)
    assert receipt.names == ("embedding", "head")
    assert receipt.before_bytes == 4 * 500 * 128
    assert receipt.after_bytes == model.embedding.packed.nbytes
    assert receipt.measured_saving_bytes == receipt.before_bytes - receipt.after_bytes
    assert 0 < receipt.mean_error <= receipt.worst_error < 0.01
    assert dict(receipt.left_out) == {
        "attention.out_proj": "MultiheadAttention reads its weight itself",
        "normed": "its weight is computed (a parametrization)",
        "small": "fewer than 4096 weights",
    }
    assert "attention.out_proj: MultiheadAttention reads" in receipt.note


def test_a_shared_weight_is_packed_once_and_stays_shared(backend):
    model = Tied()
    tokens = ids()
    expected = model(tokens)
    quantize_weights(model)
    assert model.embedding.packed is model.head.packed
    again = copy.deepcopy(model)
    assert again.embedding.packed is again.head.packed
    assert error(model(tokens), expected) < 0.02
    dequantize(model)
    assert model.embedding.weight is model.head.weight


def test_a_weight_that_another_module_holds_is_left_alone(backend):
    model = nn.Sequential(linear(128, 128), nn.Bilinear(2, 2, 2))
    model[1].extra = model[0].weight
    with pytest.warns(xmem.XmemWarning, match=r"its weight is also 1\.extra"):
        receipt = quantize_weights(model)
    assert receipt.applied_to == 0
    assert type(model[0]) is nn.Linear


def test_a_module_in_two_places_is_packed_once(backend):
    layer = linear(128, 128)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert quantize_weights(model).names == ("0",)
    assert model(torch.randn(2, 128)).shape == (2, 128)


def test_modules_keep_their_place_their_type_and_their_hooks(backend):
    layer = linear(128, 128)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    quantize_weights(layer)
    assert isinstance(layer, nn.Linear)
    assert type(layer).__name__ == "Linear"
    assert "bits=8" in repr(layer)
    layer(torch.randn(2, 128))
    assert calls == [1]


@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy", "float weights"])
def test_a_packed_model_is_saved_and_loaded_bit_for_bit(backend, way):
    model = Tied()
    float_state = copy.deepcopy(model.state_dict())
    quantize_weights(model, 4, scheme="dynamic")
    if way == "pickle":
        model.normed = nn.Identity()  # PyTorch does not pickle parametrizations
        other = pickle.loads(pickle.dumps(model))
    elif way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        other = Tied()
        quantize_weights(other, 4, scheme="dynamic")
        other.load_state_dict(float_state if way == "float weights" else model.state_dict())
    tokens = ids()
    assert torch.equal(other(tokens), model(tokens))
    assert "head.packed" in model.state_dict()
    assert "head.weight" not in model.state_dict()


def test_a_state_of_other_bits_is_refused(backend):
    one, other = linear(128, 128), linear(128, 128)
    quantize_weights(one, 8)
    quantize_weights(other, 4)
    with pytest.raises(RuntimeError, match="size mismatch for packed"):
        other.load_state_dict(one.state_dict())


def test_undo_gives_parameters_that_are_as_the_packed_unpack(backend):
    model = nn.Sequential(linear(128, 128), linear(64, 128))
    model[1].weight.requires_grad_(False)
    receipt = quantize_weights(model)
    x = torch.randn(8, 128)
    expected, weight = model(x), model[0].weight
    receipt.undo()
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, weight)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
    assert error(model(x), expected) <= 1e-6
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    receipt.undo()
    with pytest.raises(xmem.UsageError, match="no layer of Sequential has packed weights"):
        dequantize(model)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_skip_leaves_modules_and_what_is_inside_them(backend):
    model = nn.Sequential(nn.Sequential(linear(128, 128)), linear(128, 128), linear(128, 128))
    receipt = quantize_weights(model, skip=("0", "2*"))
    assert receipt.names == ("1",)
    assert dict(receipt.left_out) == {"0.0": "in skip", "2": "in skip"}


def test_values_that_no_scale_fits_are_left_alone(backend):
    model = nn.Sequential(linear(128, 128), linear(128, 128), linear(128, 128), linear(128, 128))
    for layer, value in zip(model, (torch.nan, torch.inf, 2e38, 0), strict=False):
        layer.weight.data[5, 5] = value
    model[3].weight.data[:] = 0
    receipt = quantize_weights(model)
    assert receipt.names == ("3",)
    assert [why for _, why in receipt.left_out] == [
        "it has values that are infinite, NaN or beyond 1e37"
    ] * 3
    assert not model[3].weight.any()


def test_other_forwards_and_types_are_left_alone(backend):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "scaled": Scaled(128, 128),
            "named": Named(128, 128),
            "doubled": linear(128, 128).double(),
            "clipped": nn.Embedding(128, 128, max_norm=1.0),
            "transposed": nn.ConvTranspose1d(64, 64, 3),
        }
    )
    receipt = quantize_weights(model)
    assert receipt.names == ("named",)
    assert isinstance(model["named"], Named)
    assert set(dict(receipt.left_out)) == {"scaled", "doubled", "clipped"}


def test_an_embedding_looks_up_rows_and_keeps_its_errors(backend):
    layer = nn.Embedding(1000, 300)
    expected = layer(ids()[:, :3]).shape
    weight = layer.weight.detach().clone()
    quantize_weights(layer)
    assert layer(ids()[:, :3]).shape == expected
    assert torch.equal(layer(torch.arange(1000)), layer.weight)
    assert error(layer.weight, weight) < 0.0065
    with pytest.raises(IndexError):
        layer(torch.tensor([1000]))


def test_packed_twice_warns_and_changes_nothing(backend):
    layer = linear(128, 128)
    quantize_weights(layer)
    packed = layer.packed
    with pytest.warns(xmem.XmemWarning, match="packed already"):
        assert quantize_weights(layer, 4).applied_to == 0
    assert layer.packed is packed


def test_what_something_else_holds_is_not_counted_as_saved(backend):
    model = linear(256, 256)
    held = list(model.parameters())
    receipt = quantize_weights(model)
    assert receipt.measured_saving_bytes < 0 < receipt.expected_saving_bytes
    assert "something else holds weights" in receipt.note
    assert len(held) == 2


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((2,), {}, "bits is 2; weights are packed in 8 or 4"),
        ((True,), {}, "bits is True"),
        ((8,), {"scheme": "dynamc"}, "Did you mean 'dynamic'"),
        ((8.0,), {}, "packed in 8 or 4"),
        ((8,), {"min_elements": -1}, "min_elements is -1"),
        ((8,), {"skip": "0"}, "give a sequence"),
        ((8,), {"skip": ("9",)}, "unknown module in skip '9'"),
    ],
)
def test_unknown_values_are_refused_before_anything_changes(backend, arguments, options, said):
    model = nn.Sequential(linear(128, 128))
    with pytest.raises(xmem.UsageError, match=said):
        quantize_weights(model, *arguments, **options)
    assert type(model[0]) is nn.Linear


def test_what_is_left_out_comes_with_a_remedy(backend):
    model = nn.Sequential(linear(128, 128))
    with pytest.warns(xmem.XmemWarning, match=r"fewer than 99999 weights\. Lower min_elements\.$"):
        quantize_weights(model, min_elements=99999)
    quantize_weights(model)
    with pytest.warns(xmem.XmemWarning, match=r"packed already\. Call xmem\.dequantize") as warned:
        quantize_weights(model, 4)
    assert "min_elements" not in str(warned[0].message)


def test_a_model_without_layers_warns_and_no_model_is_refused(backend):
    with pytest.warns(xmem.XmemWarning, match="No linear, convolution or embedding layer"):
        assert quantize_weights(nn.Sequential(nn.ReLU())).applied_to == 0
    with pytest.raises(xmem.UsageError, match="no module of the active backend"):
        quantize_weights([1, 2])
