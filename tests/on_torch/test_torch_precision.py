"""Autocast on PyTorch: what runs in half, what stays, and that nothing is left behind."""

import pytest
import torch
from torch.nn import functional

import xmem


def dtypes():
    a = torch.randn(4, 4)
    return {
        "linear": functional.linear(a, a).dtype,
        "matmul": (a @ a).dtype,
        "softmax": functional.softmax(a, -1).dtype,
        "layer_norm": functional.layer_norm(a, (4,)).dtype,
    }


def test_linear_and_matmul_run_in_half_and_nothing_is_left_after_the_block(backend):
    plain = dtypes()
    with xmem.autocast():
        inside = dtypes()
        with xmem.autocast(enabled=False):
            assert dtypes() == plain
        assert dtypes() == inside
    assert inside["linear"] == inside["matmul"] == torch.bfloat16
    assert inside["softmax"] == torch.float32
    assert dtypes() == plain
    assert set(plain.values()) == {torch.float32}


def test_half_is_float16_where_asked_for(backend):
    with xmem.autocast("float16"):
        assert dtypes()["linear"] == torch.float16


def test_named_operations_stay_in_float32(backend):
    with xmem.autocast(keep_fp32=("linear",)):
        found = dtypes()
    assert found["linear"] == torch.float32
    assert found["matmul"] == torch.bfloat16


def test_kept_operations_take_half_inputs(backend):
    with xmem.autocast(keep_fp32=("linear",)):
        a = torch.randn(4, 4)
        half = a @ a
        assert half.dtype == torch.bfloat16
        assert functional.linear(half, a).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bf16"}, "unknown dtype 'bf16'.*auto, bfloat16, float16"),
        ({"keep_fp32": ("liner",)}, "Did you mean 'linear'"),
    ],
)
def test_unknown_names_are_refused_before_the_block(backend, arguments, message):
    with pytest.raises(xmem.UsageError, match=message):
        xmem.autocast(**arguments)


def test_weights_are_not_cached_in_half(backend):
    """The cast of a weight is freed at once; PyTorch's cache keeps it until the block ends."""
    layer = torch.nn.Linear(512, 512)
    x = torch.randn(2, 512)
    with torch.no_grad(), xmem.autocast():
        layer(x)
        before = backend.measure.counters().allocated_bytes
        layer(x)
        assert backend.measure.counters().allocated_bytes == before


def test_an_exception_inside_leaves_nothing_behind(backend):
    plain = dtypes()
    with pytest.raises(KeyError), xmem.autocast(keep_fp32=("matmul",)):
        raise KeyError
    assert dtypes() == plain
