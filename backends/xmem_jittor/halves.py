"""Casts between float16 and float32 on a CPU, eight numbers at a time.

Jittor 1.3.11 converts float16 in software, number by number, and a kernel that such a cast is
fused into is not vectorised: GELU over 262144 numbers took 14 ms with the casts fused and takes
1 ms between casts of its own. Gradients do not flow through these casts; they are for inside of a
`jt.Function`.
"""

from __future__ import annotations

from typing import Any

import jittor as jt

_HEADER = """
#ifdef __F16C__
#include <immintrin.h>
#endif
"""
_LOOP = """
    const int64 count = in0->num, whole = count / 8 * 8;
    int64 i = 0;
#ifdef __F16C__
    #pragma omp parallel for if (count > 100000)
    for (int64 k = 0; k < whole; k += 8) {{ {eight} }}
    i = whole;
#endif
    for (; i < count; i++) out0_p[i] = in0_p[i];
"""
_TO_HALF = _LOOP.format(
    eight="""
        _mm_storeu_si128((__m128i*)(out0_p + k), _mm256_cvtps_ph(
            _mm256_loadu_ps(in0_p + k), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));"""
)
_TO_FLOAT32 = _LOOP.format(
    eight="""
        _mm256_storeu_ps(out0_p + k, _mm256_cvtph_ps(
            _mm_loadu_si128((const __m128i*)(in0_p + k))));"""
)


def to_half(x: Any, dtype: str) -> Any:
    """Return x in a half type, in memory of its own where it was not."""
    if str(x.dtype) == dtype:
        return x
    if jt.flags.use_cuda or dtype != "float16" or str(x.dtype) != "float32":
        # Unfused, or what reads it would keep the float32 alive instead.
        return x.cast(dtype).stop_fuse()
    return jt.code(x.shape, dtype, [x], cpu_header=_HEADER, cpu_src=_TO_HALF)


def to_float32(x: Any) -> Any:
    """Return x in float32."""
    if jt.flags.use_cuda or str(x.dtype) != "float16":
        return x.float32()
    return jt.code(x.shape, "float32", [x], cpu_header=_HEADER, cpu_src=_TO_FLOAT32)


def cast(x: Any, dtype: Any) -> Any:
    """Return x in any type."""
    if str(x.dtype) == str(dtype):
        return x
    return to_float32(x) if str(dtype) == "float32" else to_half(x, str(dtype))
