"""The codec on Jittor gives the bytes of its definition, on a CPU and by what CUDA would run."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from xmem import codec

SHIM = """
#include <cstddef>
#include "codec.cuh"
using namespace xmem;
extern "C" void pack(const void* values, int dtype, long long count, int bits, int style,
                     uint32_t seed, uint8_t* packed) {
    for (long long block = 0; block < blocks_of(count); block++) {
        static Shared s;
        const long long first = block * BLOCK;
        const int here = count - first < BLOCK ? (int)(count - first) : BLOCK;
        for (int i = 0; i < BLOCK; i++) start(s, i);
        for (int i = 0; i < BLOCK; i++) read(s, i, values, dtype, first, here);
        for (int i = 0; i < BLOCK; i++) encode(s, i, bits, style, first, seed);
        for (int i = 0; i < BLOCK; i++) write(s, i, packed, count, block, here, bits, style);
    }
}
extern "C" void unpack(const uint8_t* packed, long long count, int bits, int dtype, void* values) {
    for (long long block = 0; block < blocks_of(count); block++)
        for (int i = 0; i < BLOCK; i++) decode(i, packed, count, block, bits, dtype, values);
}
"""


def cases():
    """Return arrays with all that a codec can meet."""
    rng = np.random.default_rng(0)
    plain = rng.standard_normal(1000).astype(np.float32)
    odd = plain[:700].copy()
    odd[[3, 300, 301]] = np.inf, np.nan, -np.inf
    wide = (plain[:600] * np.exp(rng.uniform(-80, 80, 600))).astype(np.float32)
    wide[:4] = 3.4e38, -3.4e38, 1e-40, -1e-45
    sparse = plain[:513] * (rng.random(513) < 0.2)
    return [plain, np.abs(plain), odd, wide, sparse.astype(np.float32), np.zeros(300, np.float32)]


def halves(x, dtype):
    """Return an array as the codec takes it: float16, or uint16 that holds bfloat16."""
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture(scope="module")
def device_code(tmp_path_factory):
    """Return CUDA's kernels, compiled for this processor."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    import xmem_jittor

    folder = tmp_path_factory.mktemp("device")
    (folder / "shim.cc").write_text(SHIM)
    native = Path(xmem_jittor.__file__).parent / "native"
    subprocess.run(
        [compiler, "-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", f"-I{native}",
         str(folder / "shim.cc"), "-o", str(folder / "shim.so")],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(folder / "shim.so"))
    library.pack.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_int, ctypes.c_int,
        ctypes.c_uint32, ctypes.c_void_p,
    ]  # fmt: skip
    library.unpack.argtypes = [
        ctypes.c_void_p,
        ctypes.c_longlong,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    return library


@pytest.mark.parametrize("dtype", codec.DTYPES)
@pytest.mark.parametrize("bits", codec.BITS)
def test_what_cuda_runs_gives_the_bytes_of_the_definition(device_code, bits, dtype):
    number = codec.DTYPES.index(dtype)
    for style in codec.STYLES:
        for seed, x in enumerate(cases()):
            x = halves(x, dtype)
            expected = codec.pack(x, bits, seed, style)
            packed = np.empty_like(expected)
            device_code.pack(
                x.ctypes.data, number, x.size, bits, codec.STYLES.index(style), seed,
                packed.ctypes.data,
            )  # fmt: skip
            np.testing.assert_array_equal(packed, expected)
            back = np.empty_like(x)
            device_code.unpack(packed.ctypes.data, x.size, bits, number, back.ctypes.data)
            size = np.uint32 if dtype == "float32" else np.uint16
            values = codec.unpack(expected, x.size, bits, dtype)
            np.testing.assert_array_equal(back.view(size), values.view(size))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", codec.BITS)
def test_lazy_operations_give_the_bytes_of_the_definition(backend, bits, dtype):
    import jittor as jt
    from xmem_jittor import codec as lazy

    for seed, x in enumerate(cases()):
        x = halves(x, dtype)
        packed = lazy.pack(jt.array(x), bits, seed)
        expected = codec.pack(x, bits, seed)
        np.testing.assert_array_equal(packed.numpy(), expected)
        back = lazy.unpack(packed, x.shape, bits, dtype).numpy()
        values = codec.unpack(expected, x.size, bits, dtype)
        size = np.uint32 if dtype == "float32" else np.uint16
        np.testing.assert_array_equal(back.view(size), values.view(size))


def test_other_seeds_round_otherwise(backend):
    import jittor as jt
    from xmem_jittor import codec as lazy

    x = jt.rand(700)
    first, again, other = (lazy.pack(x, 8, seed).numpy() for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_truth_values_take_a_bit_each_and_come_back(backend):
    import jittor as jt
    from xmem_jittor import codec as lazy

    for count in (1, 8, 13, 200001):
        x = np.random.default_rng(count).random(count) < 0.5
        packed = lazy.pack_bits(jt.array(x))
        assert packed.numel() == lazy.bits_bytes((count,)) == -(-count // 8)
        np.testing.assert_array_equal(lazy.unpack_bits(packed, (count,)).numpy(), x)
