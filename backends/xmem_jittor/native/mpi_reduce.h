// Sums, means and maxima of all of Jittor's types, over what several ranks sent.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__) && !defined(XMEM_PORTABLE)
#include <immintrin.h>
#endif

namespace xmem {

enum Dtype {
    BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64,
    FLOAT16, BFLOAT16, FLOAT32, FLOAT64, DTYPES
};
enum Op { SUM, MEAN, MAX };

inline const char* dtype_name(int dtype) {
    static const char* names[] = {
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64"};
    return dtype >= 0 && dtype < DTYPES ? names[dtype] : "?";
}

inline int64_t dtype_bytes(int dtype) {
    static const int64_t sizes[] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};
    return sizes[dtype];
}

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

struct Half {
    uint16_t bits;
    float wide() const {
        uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31;
        uint32_t mantissa = bits & 1023;
        if (exponent == 31) return as_float(sign | 0x7F800000 | mantissa << 13);
        if (exponent) return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
        return as_float(sign | as_bits((float)mantissa * as_float(0x33800000)));  // * 2^-24
    }
    static Half narrow(float value) {
        uint32_t pattern = as_bits(value), sign = pattern >> 16 & 0x8000;
        uint32_t magnitude = pattern & 0x7FFFFFFF;
        if (magnitude > 0x7F800000) return {(uint16_t)(sign | 0x7E00)};
        if (magnitude >= 0x477FF000) return {(uint16_t)(sign | 0x7C00)};
        if (magnitude < 0x38800000) {
            // Adding 0.5 leaves multiples of 2^-24 in the mantissa, rounded to nearest even.
            uint32_t rounded = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000;
            return {(uint16_t)(sign | rounded)};
        }
        magnitude += 0xFFF + (magnitude >> 13 & 1);
        return {(uint16_t)(sign | (magnitude - 0x38000000) >> 13)};
    }
};

struct Brain {
    uint16_t bits;
    float wide() const { return as_float((uint32_t)bits << 16); }
    static Brain narrow(float value) {
        uint32_t pattern = as_bits(value);
        if ((pattern & 0x7FFFFFFF) > 0x7F800000) return {(uint16_t)(pattern >> 16 | 64)};
        return {(uint16_t)((pattern + 0x7FFF + (pattern >> 16 & 1)) >> 16)};
    }
};

// How a type is added up: `Sum` is what is added up in. Halves are added up in float32 and rounded
// once.
template <class T> struct Kept {
    typedef T Sum;
    static Sum wide(T x) { return x; }
    static T narrow(Sum x) { return x; }
};
template <> struct Kept<Half> {
    typedef float Sum;
    static float wide(Half x) { return x.wide(); }
    static Half narrow(float x) { return Half::narrow(x); }
};
template <> struct Kept<Brain> {
    typedef float Sum;
    static float wide(Brain x) { return x.wide(); }
    static Brain narrow(float x) { return Brain::narrow(x); }
};

template <class T> void widen(const T* from, typename Kept<T>::Sum* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = Kept<T>::wide(from[i]);
}

template <class T> void narrow(const typename Kept<T>::Sum* from, T* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = Kept<T>::narrow(from[i]);
}

#if defined(__x86_64__) && !defined(XMEM_PORTABLE)
// The library is built for any processor of its kind; most have instructions for halves.
inline bool has_halves() {
    static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
    return has;
}

__attribute__((target("avx,f16c"))) inline int64_t widen_by_eight(
    const Half* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
    return i;
}

__attribute__((target("avx,f16c"))) inline int64_t narrow_by_eight(
    const float* from, Half* to, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(
            (__m128i*)(to + i),
            _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}

template <> inline void widen(const Half* from, float* to, int64_t count) {
    int64_t i = has_halves() ? widen_by_eight(from, to, count) : 0;
    for (; i < count; i++) to[i] = from[i].wide();
}

template <> inline void narrow(const float* from, Half* to, int64_t count) {
    int64_t i = has_halves() ? narrow_by_eight(from, to, count) : 0;
    for (; i < count; i++) to[i] = Half::narrow(from[i]);
}
#endif

// Whole numbers wrap around, which signed ones do not by themselves.
template <class T> inline T added(T a, T b) { return a + b; }
template <> inline int8_t added(int8_t a, int8_t b) { return a + (uint8_t)b; }
template <> inline int16_t added(int16_t a, int16_t b) { return a + (uint16_t)b; }
template <> inline int32_t added(int32_t a, int32_t b) { return (uint32_t)a + (uint32_t)b; }
template <> inline int64_t added(int64_t a, int64_t b) { return (uint64_t)a + (uint64_t)b; }

// A NaN is larger than all.
template <class T> inline T larger(T a, T b) { return b > a || b != b ? b : a; }

template <class T>
void combine(int op, int ranks, const void* const* sources, void* target, int64_t count) {
    typedef typename Kept<T>::Sum Sum;
    const int64_t BLOCK = 512;
    Sum sums[BLOCK], next[BLOCK];
    for (int64_t at = 0; at < count; at += BLOCK) {
        const int64_t size = count - at < BLOCK ? count - at : BLOCK;
        widen((const T*)sources[0] + at, sums, size);
        for (int rank = 1; rank < ranks; rank++) {
            widen((const T*)sources[rank] + at, next, size);
            if (op == MAX)
                for (int64_t i = 0; i < size; i++) sums[i] = larger(sums[i], next[i]);
            else
                for (int64_t i = 0; i < size; i++) sums[i] = added(sums[i], next[i]);
        }
        if (op == MEAN)
            for (int64_t i = 0; i < size; i++) sums[i] = sums[i] / (Sum)ranks;
        narrow(sums, (T*)target + at, size);
    }
}

// Truth values: any of them, for a sum as for a maximum.
inline void combine_truth(int ranks, const void* const* sources, void* target, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint8_t any = 0;
        for (int rank = 0; rank < ranks; rank++) any |= ((const uint8_t*)sources[rank])[i] != 0;
        ((uint8_t*)target)[i] = any;
    }
}

// Combines in the order of ranks; the target may be one of the sources.
inline void combine_any(
    int dtype, int op, int ranks, const void* const* sources, void* target, int64_t count) {
    switch (dtype) {
        case BOOL: return combine_truth(ranks, sources, target, count);
        case INT8: return combine<int8_t>(op, ranks, sources, target, count);
        case INT16: return combine<int16_t>(op, ranks, sources, target, count);
        case INT32: return combine<int32_t>(op, ranks, sources, target, count);
        case INT64: return combine<int64_t>(op, ranks, sources, target, count);
        case UINT8: return combine<uint8_t>(op, ranks, sources, target, count);
        case UINT16: return combine<uint16_t>(op, ranks, sources, target, count);
        case UINT32: return combine<uint32_t>(op, ranks, sources, target, count);
        case UINT64: return combine<uint64_t>(op, ranks, sources, target, count);
        case FLOAT16: return combine<Half>(op, ranks, sources, target, count);
        case BFLOAT16: return combine<Brain>(op, ranks, sources, target, count);
        case FLOAT32: return combine<float>(op, ranks, sources, target, count);
        case FLOAT64: return combine<double>(op, ranks, sources, target, count);
    }
}

}  // namespace xmem
