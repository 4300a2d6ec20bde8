"""The codec and lossless packing: the definitions in NumPy, and the native kernels against them."""

import numpy as np
import pytest
from codec_values import CASES, stored, values
from hypothesis import given, settings
from hypothesis import strategies as st

from xmem import codec, exact
from xmem.errors import UsageError
from xmem.native import codec as native
from xmem.native import exact as native_exact
from xmem.native.build import find_compiler

compiled = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def packed_natively(x, dtype, bits, seed, style="signs"):
    packed = np.empty(codec.packed_bytes(x.size, bits), np.uint8)
    native.pack(x.ctypes.data, dtype, x.size, bits, seed, packed.ctypes.data, style)
    return packed


def unpacked_natively(packed, count, bits, dtype):
    x = np.empty(count, np.float32 if dtype == "float32" else np.uint16)
    native.unpack(packed.ctypes.data, count, bits, dtype, x.ctypes.data)
    return x


def roundtrip(x, bits, seed=1, style="signs", dtype="float32"):
    return codec.unpack(codec.pack(x, bits, seed, style), x.size, bits, dtype)


@compiled
@settings(max_examples=300, deadline=None)
@given(**CASES, signed_style=st.sampled_from(codec.STYLES))
def test_native_kernels_give_the_bytes_of_the_definition(
    kind, count, magnitude, dtype, bits, seed, signed_style
):
    x = values(kind, count, magnitude, seed)
    style = signed_style if (np.sign(x) >= 0).all() or signed_style != "floor" else "plain"
    x = stored(x, dtype)
    expected = codec.pack(x, bits, seed, style)
    assert np.array_equal(packed_natively(x, dtype, bits, seed, style), expected)
    back = codec.unpack(expected, count, bits, dtype)
    as_integers = np.uint32 if dtype == "float32" else np.uint16
    found = unpacked_natively(expected, count, bits, dtype)
    assert np.array_equal(found.view(as_integers), back.view(as_integers))


@settings(max_examples=200, deadline=None)
@given(**{k: v for k, v in CASES.items() if k not in ("kind", "dtype")})
def test_no_value_is_off_by_more_than_a_step_and_no_sign_changes(count, magnitude, bits, seed):
    x = values("normal", count, magnitude, seed)
    x = np.clip(x, -1e38, 1e38)
    x[np.abs(x) < 2.0**-126] = 0
    back = roundtrip(x, bits, seed).astype(np.float64)
    steps = np.abs(x).astype(np.float64)
    for first in range(0, count, codec.BLOCK):
        block = slice(first, first + codec.BLOCK)
        step = steps[block].max() / codec.levels(bits, 0) * (1 + 2.0**-11) + 2.0**-126
        assert (np.abs(back[block] - x[block]) <= step).all()
    assert (np.sign(back[x != 0]) == np.sign(x[x != 0])).all()


@compiled
@pytest.mark.parametrize("bits", codec.BITS)
@pytest.mark.parametrize("kind", ["normal", "positive"])
def test_the_mean_of_10000_draws_is_the_value(bits, kind):
    """Within 4 standard errors, and the step / 65536 that stands for 0."""
    x = values(kind, 256, 1.0, 7)
    count, total, squares = 10_000, np.zeros(256), np.zeros(256)
    for seed in range(count):
        # nearby seeds as callers give them, spread over 32 bits
        drawn = packed_natively(x, "float32", bits, seed * 0x9E3779B1 & 0xFFFFFFFF)
        back = unpacked_natively(drawn, 256, bits, "float32").astype(np.float64)
        total += back
        squares += back**2
    mean = total / count
    error = np.sqrt(np.maximum(squares / count - mean**2, 0) / count)
    step = np.abs(x).max() / codec.levels(bits, 1 if kind == "positive" else 0)
    off = np.abs(mean - x)
    assert (off <= 4 * error + step * 2.0**-15).all(), (off / np.maximum(error, 1e-12)).max()


@pytest.mark.parametrize("bits", [8, 4])
def test_infinity_and_nan_come_back_where_they_were(bits):
    x = values("infinite", 1000, 1.0, 3)
    x[17] = np.nan
    back = roundtrip(x, bits)
    assert np.array_equal(np.isnan(back), np.isnan(x))
    assert np.array_equal(back[np.isinf(x)], x[np.isinf(x)])
    finite = np.isfinite(x)
    assert np.isfinite(back[finite]).all()


@compiled
def test_the_largest_finite_values_stay_finite_beside_infinity():
    """The scale is rounded up, so the largest code times the scale is more than a float32 holds."""
    x = np.full(256, np.finfo(np.float32).max, np.float32)
    x[3] = np.inf
    for bits in (8, 4):
        packed = codec.pack(x, bits, 1)
        for back in (
            codec.unpack(packed, 256, bits),
            unpacked_natively(packed, 256, bits, "float32"),
        ):
            assert np.isinf(back).sum() == 1


def test_a_relu_keeps_its_mask_at_every_number_of_bits():
    x = values("positive", 5000, 1.0, 5)
    for bits in codec.BITS:
        assert np.array_equal(roundtrip(x, bits) > 0, x > 0)


@pytest.mark.parametrize("bits", codec.BITS)
def test_packed_bytes_are_what_packing_takes(bits):
    for count in (0, 1, 3, 255, 256, 257, 511, 512, 1000):
        x = values("normal", count, 1.0, 0) if count else np.zeros(0, np.float32)
        assert codec.pack(x, bits, 0).size == codec.packed_bytes(count, bits)


@pytest.mark.parametrize("bits", [3, 16, True, "8"])
def test_other_numbers_of_bits_are_refused_by_name(bits):
    with pytest.raises(UsageError, match=str(bits)):
        codec.check_bits(bits)


# ------------------------------------------------------------------ lossless
INTEGERS = {
    "count": st.sampled_from([1, 7, 8, 255, 256, 257, 3000, 70000]),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=100, deadline=None)
@given(
    **INTEGERS,
    dtype=st.sampled_from(exact.INTEGERS),
    spread=st.sampled_from([1, 2, 255, 256, 257, 65535, 65536, 65537, 2**31, 2**32, 2**63]),
    start=st.sampled_from([0, -5, 2**40, -(2**62)]),
)
@compiled
def test_integers_come_back_and_kernels_agree(count, seed, dtype, spread, start):
    info = np.iinfo(dtype)
    low = min(max(start, info.min), info.max)
    high = min(low + spread, info.max)
    x = np.random.default_rng(seed).integers(low, high, count, dtype=dtype, endpoint=True)
    width = exact.offset_width(x)
    assert native_exact.offset_width(x.ctypes.data, x.itemsize, count) == width
    if width is None:
        return
    packed = exact.pack_offsets(x, width)
    assert packed.size == exact.offsets_bytes(count, width)
    assert np.array_equal(exact.unpack_offsets(packed, count, width, dtype), x)
    found, back = np.empty_like(packed), np.empty_like(x)
    native_exact.pack_offsets(x.ctypes.data, x.itemsize, count, width, found.ctypes.data)
    native_exact.unpack_offsets(found.ctypes.data, count, x.itemsize, width, back.ctypes.data)
    assert np.array_equal(found, packed)
    assert np.array_equal(back, x)


def test_offsets_are_no_wider_than_they_need_be():
    assert exact.offset_width(np.arange(256, dtype=np.int64) + 2**40) == 1
    assert exact.offset_width(np.arange(257, dtype=np.int64) * 255) == 2
    assert exact.offset_width(np.array([0, 65536], np.int64)) == 4
    assert exact.offset_width(np.array([0, 2**32], np.int64)) is None
    assert exact.offset_width(np.array([0, 65536], np.int32)) is None


@settings(max_examples=100, deadline=None)
@given(
    **INTEGERS,
    dtype=st.sampled_from(["float32", "float16"]),
    kind=st.sampled_from(["dropout", "zeros", "negative zero", "three", "late"]),
)
@compiled
def test_two_valued_tensors_are_found_and_come_back_bit_for_bit(count, seed, dtype, kind):
    rng = np.random.default_rng(seed)
    x = (rng.random(count) < 0.9).astype(dtype) * np.dtype(dtype).type(1 / 0.9)
    if kind == "zeros":
        x[:] = 0
    if kind == "negative zero":
        x[0] = -0.0
    if kind == "three":
        x[rng.integers(0, count)] = 3
    if kind == "late":
        x[-1] = 2
    unsigned = f"u{x.itemsize}"
    expected = {int(p) for p in x.view(unsigned)} - {0}
    pattern = exact.second_value(x)
    assert native_exact.second_value(x.ctypes.data, x.itemsize, count) == pattern
    if len(expected) > 1:
        assert pattern is None
        return
    packed = exact.pack_bits(x)
    back = exact.unpack_bits(packed, count, x.itemsize, pattern)
    assert np.array_equal(back, x.view(unsigned))
    found, values_back = np.empty_like(packed), np.empty_like(x)
    native_exact.pack_bits(x.ctypes.data, x.itemsize, count, found.ctypes.data)
    assert np.array_equal(found, packed)
    native_exact.unpack_bits(found.ctypes.data, count, x.itemsize, pattern, values_back.ctypes.data)
    assert np.array_equal(values_back.view(unsigned), x.view(unsigned))
