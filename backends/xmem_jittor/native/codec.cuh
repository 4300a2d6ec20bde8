// The codec of `xmem/codec.py` on CUDA: a block of threads for a block of elements, the same bytes
// as everywhere. Rounding is asked for by name, since kernels are compiled with fast math. The
// phases between barriers are functions, so that a host can run them too (tests do).
#pragma once
#include <cstdint>
#ifdef __CUDACC__
#define XMEM_DEVICE __device__ __forceinline__
#else
#define XMEM_DEVICE inline
#endif

namespace xmem {

constexpr int BLOCK = 256;
constexpr uint32_t MAGNITUDE = 0x7fffffffu, INFINITE = 0x7f800000u, LEAST_NORMAL = 0x00800000u;
enum { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };
enum { SIGNS = 0, PLAIN = 1, FLOOR = 2, NEAREST = 3 };
enum { MODE_SIGNED = 0, MODE_POSITIVE = 1, MODE_SPECIAL = 2, MODE_FLOORED = 3, MODE_PLAIN = 4 };

// What the threads of a block share.
struct Shared {
    uint32_t values[BLOCK];
    uint32_t largest, finite, above, below;
    uint32_t codes[BLOCK];
};

inline long long blocks_of(long long count) { return (count + BLOCK - 1) / BLOCK; }

XMEM_DEVICE float as_float(uint32_t b) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(b);
#else
    float x;
    __builtin_memcpy(&x, &b, 4);
    return x;
#endif
}
XMEM_DEVICE uint32_t as_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t b;
    __builtin_memcpy(&b, &x, 4);
    return b;
#endif
}
XMEM_DEVICE float times(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}
XMEM_DEVICE float plus(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}
XMEM_DEVICE float over(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}
XMEM_DEVICE void raise(uint32_t* to, uint32_t value) {
#ifdef __CUDA_ARCH__
    atomicMax(to, value);
#else
    if (value > *to) *to = value;
#endif
}

// A random number in [0, 1) for an element of a block; the second half of the block takes the high
// halves of the first one's hashes.
XMEM_DEVICE float uniform(uint32_t first, int i, uint32_t seed) {
    uint32_t h = (first + (uint32_t)(i % (BLOCK / 2))) * 0x9E3779B1u + seed;
    h ^= h >> 15;
    h *= 0x85EBCA77u;
    h ^= h >> 13;
    h *= 0xC2B2AE3Du;
    h ^= h >> 16;
    return times((float)(int32_t)(i < BLOCK / 2 ? h & 0xffffu : h >> 16), 1.52587890625e-05f);
}

XMEM_DEVICE int levels(int bits, int mode) {
    int half = (1 << (bits - 1)) - 1, full = (1 << bits) - 1;
    if (mode == MODE_POSITIVE) return full - 1;
    if (mode == MODE_FLOORED) return full;
    if (mode == MODE_SPECIAL) return half - 2 - (bits == 8);
    return half;
}

// Halves as bits of floats and back, in integers.
XMEM_DEVICE uint32_t widened(uint32_t h, int dtype) {
    if (dtype == BFLOAT16) return h << 16;
    uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, rest = h & 0x3ffu;
    if (exponent == 31) return sign | INFINITE | rest << 13;
    if (exponent) return sign | (exponent + 112) << 23 | rest << 13;
    return sign | as_bits(times((float)rest, 5.9604644775390625e-08f));  // rest * 2^-24
}
XMEM_DEVICE uint32_t narrowed(uint32_t b, int dtype) {
    uint32_t a = b & MAGNITUDE;
    if (dtype == BFLOAT16)
        return a > INFINITE ? (b >> 16) | 0x40 : (b + 0x7fffu + ((b >> 16) & 1)) >> 16;
    uint32_t sign = (b >> 16) & 0x8000u;
    if (a > INFINITE) return sign | 0x7e00u;
    if (a >= 0x477ff000u) return sign | 0x7c00u;  // rounds beyond the largest
    if (a >= 0x38800000u) return sign | (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
    if (a < 0x33000000u) return sign;  // less than half of the smallest
    uint32_t shift = 126 - (a >> 23), whole = (a & 0x7fffffu) | 0x800000u;  // shift in 14..24
    uint32_t result = whole >> shift, lost = whole & ((1u << shift) - 1), half = 1u << (shift - 1);
    return sign | (result + (lost > half || (lost == half && (result & 1))));
}

XMEM_DEVICE void start(Shared& s, int i) {
    if (i == 0) s.largest = s.finite = s.above = s.below = 0;
}
XMEM_DEVICE void read(Shared& s, int i, const void* values, int dtype, long long first, int here) {
    uint32_t b = 0;
    if (i < here)
        b = dtype == FLOAT32 ? ((const uint32_t*)values)[first + i]
                             : widened(((const uint16_t*)values)[first + i], dtype);
    uint32_t a = b & MAGNITUDE;
    s.values[i] = b;
    raise(&s.largest, a);
    if (a < INFINITE) raise(&s.finite, a);
    raise(b >> 31 ? &s.below : &s.above, a);
}
XMEM_DEVICE uint32_t normal_of(uint32_t a, int bits) {
    if (bits == 2 && a > 0x7e800000u) a = 0x7e800000u;
    return a < LEAST_NORMAL ? 0 : a;
}
XMEM_DEVICE int mode_of(const Shared& s, int style) {
    if (s.largest == 0) return MODE_POSITIVE;
    if (s.largest >= INFINITE) return MODE_SPECIAL;
    const bool signs = style == SIGNS || style == NEAREST;
    if (s.below) return signs ? MODE_SIGNED : MODE_PLAIN;
    return signs ? MODE_POSITIVE : style == FLOOR ? MODE_FLOORED : MODE_PLAIN;
}
// The step that reaches both ends, when so many of all are below 0.
XMEM_DEVICE float step_of(float a, float b, int below, int steps) {
    const float one = below ? over(a, (float)below) : 0.0f;
    const float other = below < steps ? over(b, (float)(steps - below)) : 0.0f;
    return one > other ? one : other;
}
// The steps of a block with both signs that are below 0: shared as its largest magnitudes are.
XMEM_DEVICE int steps_below(const Shared& s, int bits) {
    const int steps = (1 << bits) - 2;
    const float a = as_float(normal_of(s.below, bits)), b = as_float(normal_of(s.above, bits));
    if (!(a > 0)) return 0;
    if (!(b > 0)) return steps;
    const float ratio = a <= b ? over(a, b) : over(b, a);
    const float share = over(a <= b ? ratio : 1.0f, plus(1.0f, ratio));
    int found = (int)times(share, (float)steps);
    found = found < 1 ? 1 : found > steps - 1 ? steps - 1 : found;
    return found + 1 < steps && step_of(a, b, found + 1, steps) < step_of(a, b, found, steps)
               ? found + 1
               : found;
}
XMEM_DEVICE uint32_t scale_bits(const Shared& s, int bits, int mode) {
    if (s.largest == 0) return 0;
    if (mode == MODE_SIGNED) {
        const int below = steps_below(s, bits), above = (1 << bits) - 2 - below;
        const float a = as_float(normal_of(s.below, bits)), b_ = as_float(normal_of(s.above, bits));
        const uint32_t b = (as_bits(step_of(a, b_, below, below + above)) + 0x7ffu) & ~0x7ffu;
        return b < LEAST_NORMAL ? LEAST_NORMAL : b;
    }
    if (mode == MODE_SPECIAL && bits == 2) return LEAST_NORMAL;
    uint32_t largest = mode == MODE_SPECIAL ? s.finite : s.largest;
    if (bits == 2 && largest > 0x7e800000u) largest = 0x7e800000u;
    uint32_t b = as_bits(over(as_float(largest), (float)levels(bits, mode)));
    b = (b + 7) & ~7u;
    return b < LEAST_NORMAL ? LEAST_NORMAL : b;
}
XMEM_DEVICE void encode(Shared& s, int i, int bits, int style, long long first, uint32_t seed) {
    const int mode = mode_of(s, style), count = levels(bits, mode);
    const uint32_t scale = scale_bits(s, bits, mode), b = s.values[i], a = b & MAGNITUDE;
    s.codes[i] = 0;
    const int below = mode == MODE_SIGNED ? steps_below(s, bits) : 0;
    if (a == 0 && mode == MODE_SIGNED && s.largest) s.codes[i] = (uint32_t)(below + 1);
    if (a == 0 || s.largest == 0 || (mode == MODE_SPECIAL && bits == 2)) return;
    const bool unsigned_mode = mode == MODE_POSITIVE || mode == MODE_FLOORED;
    const uint32_t sign = unsigned_mode ? 0 : (b >> 31) << (bits - 1);
    if (a >= INFINITE) {
        s.codes[i] = a == INFINITE ? (uint32_t)(count + 1) | sign : (uint32_t)(count + 2);
        return;
    }
    const uint32_t shifted = seed + (uint32_t)((uint64_t)first >> 32) * 0x85EBCA6Bu;
    const float v = as_float(a < LEAST_NORMAL ? 0 : a);
    const float inverse = over(1.0f, as_float(scale));
    const float u = style == NEAREST ? 0.5f : uniform((uint32_t)first, i, shifted);
    int k = (int)plus(times(v, inverse), u);
    if (mode == MODE_SIGNED) {
        const int most = b >> 31 ? below : (1 << bits) - 2 - below;
        k = k > most ? most : k;
        s.codes[i] = (uint32_t)(b >> 31 ? below - k : below + 1 + k);
        return;
    }
    k = k > count ? count : k;
    if (mode == MODE_FLOORED && k < 1) k = 1;
    s.codes[i] = (uint32_t)(k + (mode == MODE_POSITIVE)) | sign;
}
XMEM_DEVICE void write(const Shared& s, int i, uint8_t* packed, long long count, long long block,
                       int here, int bits, int style) {
    const int mode = mode_of(s, style), parts = 8 / bits, step = (here + parts - 1) / parts;
    if (i == 0) {
        uint32_t header = scale_bits(s, bits, mode) | (uint32_t)mode;
        if (mode == MODE_SIGNED) header |= (uint32_t)(steps_below(s, bits) + 1) << 3;
        for (int byte = 0; byte < 4; byte++) packed[4 * block + byte] = header >> (8 * byte);
    }
    if (i >= step) return;
    uint32_t byte = 0;
    for (int part = 0; part < parts; part++)
        if (i + part * step < here) byte |= s.codes[i + part * step] << (part * bits);
    packed[4 * ((count + BLOCK - 1) / BLOCK) + block * (BLOCK * bits / 8) + i] = (uint8_t)byte;
}
XMEM_DEVICE void decode(int i, const uint8_t* packed, long long count, long long block, int bits,
                        int dtype, void* values) {
    const long long first = block * BLOCK;
    const int here = count - first < BLOCK ? (int)(count - first) : BLOCK;
    if (i >= here) return;
    const int parts = 8 / bits, step = (here + parts - 1) / parts;
    uint32_t header = 0;
    for (int byte = 0; byte < 4; byte++) header |= (uint32_t)packed[4 * block + byte] << (8 * byte);
    const uint8_t* codes =
        packed + 4 * ((count + BLOCK - 1) / BLOCK) + block * (BLOCK * bits / 8);
    const int c = codes[i % step] >> (i / step * bits) & ((1 << bits) - 1);
    const int mode = header & 7, half = 1 << (bits - 1);
    const float scale = as_float(header & ~(mode == MODE_SIGNED ? 0x7ffu : 7u));
    const float least = as_float(dtype == FLOAT16 ? 0x33800000u : LEAST_NORMAL);
    const float largest = as_float(dtype == BFLOAT16 ? 0x7f7f0000u : 0x7f7fffffu);
    float tiny = times(scale, 1.52587890625e-05f);
    tiny = tiny < least ? least : tiny;
    const bool unsigned_mode = mode == MODE_POSITIVE || mode == MODE_FLOORED;
    int k = unsigned_mode ? c - (mode == MODE_POSITIVE) : c & (half - 1);
    uint32_t sign = unsigned_mode ? 0u : (uint32_t)(c & half) << (32 - bits);
    if (mode == MODE_SIGNED) {
        k = c - (int)(header >> 3 & 255);
        sign = k < 0 ? 0x80000000u : 0u;
        k = k < 0 ? -1 - k : k;
    }
    float v = times((float)k, scale);
    v = v > largest ? largest : v;
    if (mode == MODE_POSITIVE) v = c == 0 ? 0.0f : c == 1 ? tiny : v;
    if (k == 0 && (mode == MODE_SIGNED || mode == MODE_SPECIAL)) v = tiny;
    uint32_t b = as_bits(v);
    if (mode == MODE_SPECIAL) {
        const int most = levels(bits, mode);
        if (k == most + 1) b = INFINITE;
        if (bits == 2 || k == most + 2) b = 0x7fc00000u, sign = 0;
    }
    b |= sign;
    if (dtype == FLOAT32)
        ((uint32_t*)values)[first + i] = b;
    else
        ((uint16_t*)values)[first + i] = (uint16_t)narrowed(b, dtype);
}

#ifdef __CUDACC__
static __global__ void pack(const void* values, int dtype, long long count, int bits, int style,
                            uint32_t seed, uint8_t* packed) {
    __shared__ Shared s;
    const int i = threadIdx.x;
    const long long block = blockIdx.x, first = block * BLOCK;
    const int here = count - first < BLOCK ? (int)(count - first) : BLOCK;
    start(s, i);
    __syncthreads();
    read(s, i, values, dtype, first, here);
    __syncthreads();
    encode(s, i, bits, style, first, seed);
    __syncthreads();
    write(s, i, packed, count, block, here, bits, style);
}
static __global__ void unpack(const uint8_t* packed, long long count, int bits, int dtype,
                              void* values) {
    decode(threadIdx.x, packed, count, blockIdx.x, bits, dtype, values);
}
static __global__ void pack_bits(const uint8_t* values, long long count, uint8_t* packed) {
    const long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (8 * k >= count) return;
    uint32_t byte = 0;
    for (int bit = 0; bit < 8 && 8 * k + bit < count; bit++)
        byte |= (uint32_t)(values[8 * k + bit] != 0) << bit;
    packed[k] = (uint8_t)byte;
}
static __global__ void unpack_bits(const uint8_t* packed, long long count, uint8_t* values) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = packed[i / 8] >> (i % 8) & 1;
}
#endif

}  // namespace xmem
