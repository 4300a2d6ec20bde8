"""Arrays that try a codec: magnitudes, signs, zeros, infinities, NaN, denormals."""

import numpy as np
from hypothesis import strategies as st

from xmem import codec

MAGNITUDES = (1e-38, 1e-30, 1e-7, 1.0, 1e4, 1e30, 3.3e38)
KINDS = ("normal", "positive", "zeros", "infinite", "nan", "denormal", "two values")


def values(kind, count, magnitude, seed):
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        x = (rng.standard_normal(count) * magnitude).astype(np.float32)
    some = rng.integers(0, count, max(1, count // 50))
    if kind == "positive":
        return np.maximum(x, 0)
    if kind == "zeros":
        return np.where(rng.random(count) < 0.5, np.float32(0), np.float32(-0.0))
    if kind == "infinite":
        x[some] = np.where(rng.random(some.size) < 0.5, np.inf, -np.inf)
    if kind == "nan":
        x[some] = np.nan
    if kind == "denormal":
        return rng.integers(0, 1 << 23, count).astype(np.uint32).view(np.float32)
    if kind == "two values":
        return np.where(x > 0, np.float32(min(magnitude, 1e38)), np.float32(0))
    return x


def stored(x, dtype):
    """Return values as NumPy holds them for the codec: bfloat16 as uint16."""
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


CASES = {
    "kind": st.sampled_from(KINDS),
    "count": st.sampled_from([1, 2, 5, 127, 128, 255, 256, 257, 1000, 40000]),
    "magnitude": st.sampled_from(MAGNITUDES),
    "dtype": st.sampled_from(codec.DTYPES),
    "bits": st.sampled_from(codec.BITS),
    "seed": st.integers(0, 2**32 - 1),
}
