// The block-wise codec for a CPU; `xmem/codec.py` defines the format and explains it.
//
// Nothing here may depend on fused multiply-add, on fast math or on whether denormals are flushed:
// every implementation gives the same bits. Compile with -ffp-contract=off, without -ffast-math.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace xmem {

constexpr int BLOCK = 256;

enum Dtype { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };
enum Style { SIGNS = 0, PLAIN = 1, FLOOR = 2, NEAREST = 3 };
// The three low bits of a block's scale.
enum Mode { MODE_SIGNED = 0, MODE_POSITIVE = 1, MODE_SPECIAL = 2, MODE_FLOORED = 3, MODE_PLAIN = 4 };

constexpr uint32_t MAGNITUDE = 0x7fffffffu, INFINITE = 0x7f800000u, LEAST_NORMAL = 0x00800000u;
constexpr uint32_t MODE_MASK = 7u, LARGEST_AT_2_BITS = 0x7e800000u;  // 2^126
// Blocks with both signs have the number of codes for negative values above the mode.
constexpr uint32_t SPLIT_MASK = 0x7ffu, SPLIT_SHIFT = 3;

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

// A random number from an index and a seed: Murmur3's finalizer (Appleby, 2011) over a Weyl step.
inline uint32_t hash(uint32_t index, uint32_t seed) {
    uint32_t h = index * 0x9E3779B1u + seed;
    h ^= h >> 15;
    h *= 0x85EBCA77u;
    h ^= h >> 13;
    h *= 0xC2B2AE3Du;
    return h ^ (h >> 16);
}

// Fills a block with numbers in [0, 1), multiples of 2^-16. The first half takes the low half of the
// hash of an element's index, the second half the high one of the element BLOCK / 2 before.
inline void draw(float* __restrict u, uint32_t first, uint32_t seed) {
#pragma omp simd
    for (int i = 0; i < BLOCK / 2; i++) {
        uint32_t h = hash(first + (uint32_t)i, seed);
        u[i] = (float)(int32_t)(h & 0xffffu) * 0x1p-16f;
        u[i + BLOCK / 2] = (float)(int32_t)(h >> 16) * 0x1p-16f;
    }
}

// What is added before a value is cut: the same for all where the nearest code is wanted.
inline void draw_or_halve(float* __restrict u, uint32_t first, uint32_t seed, bool nearest) {
    if (nearest)
        std::fill(u, u + BLOCK, 0.5f);
    else
        draw(u, first, seed);
}

// The seed of a block, so that tensors of more than 2^32 elements repeat nothing.
inline uint32_t seed_at(int64_t first, uint32_t seed) {
    return seed + (uint32_t)((uint64_t)first >> 32) * 0x85EBCA6Bu;
}

inline int levels(int bits, int mode) {
    int half = (1 << (bits - 1)) - 1, full = (1 << bits) - 1;
    switch (mode) {
        case MODE_POSITIVE: return full - 1;
        case MODE_FLOORED: return full;
        case MODE_SPECIAL: return half - 2 - (bits == 8);  // two codes are taken; 124 and 5
        default: return half;
    }
}

// A scale is rounded up to make room below it, so no code exceeds its levels.
inline float rounded_up(float scale, uint32_t mask) {
    uint32_t b = (bits_of(scale) + mask) & ~mask;
    return float_of(std::max(b, LEAST_NORMAL));
}

inline float scale_for(uint32_t largest, int count, int bits) {
    if (bits == 2) largest = std::min(largest, LARGEST_AT_2_BITS);
    return rounded_up(float_of(largest) / (float)count, MODE_MASK);
}

inline uint32_t flushed(uint32_t magnitude) { return magnitude < LEAST_NORMAL ? 0 : magnitude; }

// How the steps of a block with both signs are shared: as its largest magnitudes are.
struct Split {
    int negative;  // steps below 0; there is one code more
    float scale;
};

// The step that reaches both ends, when so many of all are below 0.
inline float step_of(float a, float b, int negative, int steps) {
    float below = negative ? a / (float)negative : 0.0f;
    float above = negative < steps ? b / (float)(steps - negative) : 0.0f;
    return std::max(below, above);
}

inline Split split_for(uint32_t below, uint32_t above, int bits) {
    const int steps = (1 << bits) - 2;
    if (bits == 2) {
        below = std::min(below, LARGEST_AT_2_BITS);
        above = std::min(above, LARGEST_AT_2_BITS);
    }
    const float a = float_of(flushed(below)), b = float_of(flushed(above));
    int negative = 0;
    if (a > 0 && b > 0) {
        float share = a <= b ? (a / b) / (1.0f + a / b) : 1.0f / (1.0f + b / a);
        negative = std::min(std::max((int)(share * (float)steps), 1), steps - 1);
        if (negative + 1 < steps && step_of(a, b, negative + 1, steps) < step_of(a, b, negative, steps))
            negative++;
    } else if (a > 0) {
        negative = steps;
    }
    return {negative, rounded_up(step_of(a, b, negative, steps), SPLIT_MASK)};
}

// Turns a block with both signs into codes: those of negative values come first, downwards from 0.
template <int BITS>
uint32_t quantize_signed(const float* __restrict x, uint8_t* __restrict codes, Split split,
                         uint32_t first, uint32_t seed, bool nearest) {
    const float inverse = 1.0f / split.scale;
    const int32_t below = split.negative, above = (1 << BITS) - 2 - below, zero = below + 1;
    float u[BLOCK];
    draw_or_halve(u, first, seed, nearest);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        uint32_t b;
        std::memcpy(&b, x + i, 4);
        uint32_t a = b & MAGNITUDE, normal = flushed(a);
        float v;
        std::memcpy(&v, &normal, 4);
        int32_t sign = a ? (int32_t)b >> 31 : 0;
        int32_t k = (int32_t)(v * inverse + u[i]), top = sign ? below : above;
        k = k > top ? top : k;
        codes[i] = (uint8_t)(zero + (k ^ sign));
    }
    return bits_of(split.scale) | (uint32_t)zero << SPLIT_SHIFT | MODE_SIGNED;
}

// Turns a block of floats into codes of one byte each. Returns the header: the scale with the mode.
template <int BITS>
uint32_t quantize(const float* __restrict x, uint8_t* __restrict codes, int style, uint32_t first,
                  uint32_t seed) {
    const bool nearest = style == NEAREST;
    if (nearest) style = SIGNS;
    constexpr int SIGN_SHIFT = 31 - (BITS - 1);
    int32_t above = 0, below = 0;  // patterns of the largest magnitudes, by sign
#pragma omp simd reduction(max : above, below)
    for (int i = 0; i < BLOCK; i++) {
        int32_t b;
        std::memcpy(&b, x + i, 4);
        int32_t turned = b ^ INT32_MIN;
        above = b > above ? b : above;
        below = turned > below ? turned : below;
    }
    uint32_t largest = (uint32_t)(above > below ? above : below);
    if (largest == 0) {
        std::memset(codes, 0, BLOCK);
        return MODE_POSITIVE;
    }
    int mode = below > 0 ? (style == SIGNS ? MODE_SIGNED : MODE_PLAIN)
               : style == SIGNS ? MODE_POSITIVE
               : style == FLOOR ? MODE_FLOORED
                                : MODE_PLAIN;
    if (largest >= INFINITE) {
        mode = MODE_SPECIAL;
        largest = 0;
        for (int i = 0; i < BLOCK; i++) {
            uint32_t a = bits_of(x[i]) & MAGNITUDE;
            if (a < INFINITE && a > largest) largest = a;
        }
        if (BITS == 2) {  // no code is left for it
            std::memset(codes, 0, BLOCK);
            return LEAST_NORMAL | MODE_SPECIAL;
        }
    }
    if (mode == MODE_SIGNED)
        return quantize_signed<BITS>(x, codes, split_for(below, above, BITS), first, seed, nearest);
    const int count = levels(BITS, mode);
    const float scale = scale_for(largest, count, BITS);
    const float inverse = 1.0f / scale;
    // Codes of values that are not 0 begin here.
    const int32_t shift = mode == MODE_POSITIVE, least = mode == MODE_FLOORED;
    const uint32_t sign_mask = mode == MODE_POSITIVE || mode == MODE_FLOORED ? 0 : 1u << 31;
    const int32_t top = count;
    float u[BLOCK];
    draw_or_halve(u, first, seed, nearest);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) {
        uint32_t b;
        std::memcpy(&b, x + i, 4);
        uint32_t a = b & MAGNITUDE, normal = flushed(a);
        float v;
        std::memcpy(&v, &normal, 4);
        int32_t k = (int32_t)(v * inverse + u[i]);
        k = k > top ? top : k;
        k = k < least ? least : k;
        k += shift;
        uint32_t code = (uint32_t)k | ((b & sign_mask) >> SIGN_SHIFT);
        codes[i] = (uint8_t)(a ? code : 0);
    }
    if (mode == MODE_SPECIAL)
        for (int i = 0; i < BLOCK; i++) {
            uint32_t b = bits_of(x[i]), a = b & MAGNITUDE;
            if (a == INFINITE) codes[i] = (uint8_t)((count + 1) | ((b >> 31) << (BITS - 1)));
            if (a > INFINITE) codes[i] = (uint8_t)(count + 2);
        }
    return bits_of(scale) | (uint32_t)mode;
}

// Turns codes back into floats; `least` is the smallest positive value that the result may hold.
template <int BITS>
void dequantize(uint32_t header, const uint8_t* __restrict codes, float* __restrict x, float least,
                float largest) {
    const int mode = header & MODE_MASK;
    const float scale = float_of(header & ~(mode == MODE_SIGNED ? SPLIT_MASK : MODE_MASK));
    float tiny = scale * 0x1p-16f;
    tiny = tiny < least ? least : tiny;
    constexpr uint32_t HALF = 1u << (BITS - 1);
    constexpr int SIGN_SHIFT = 31 - (BITS - 1);
    switch (mode) {
        case MODE_SIGNED: {
            const int32_t zero = (header >> SPLIT_SHIFT) & 255;
#pragma omp simd
            for (int i = 0; i < BLOCK; i++) {
                int32_t d = (int32_t)codes[i] - zero, sign = d >> 31, k = d ^ sign;
                float v = (float)k * scale;
                v = k ? v : tiny;
                uint32_t b;
                std::memcpy(&b, &v, 4);
                b |= (uint32_t)sign & ~MAGNITUDE;
                std::memcpy(x + i, &b, 4);
            }
            break;
        }
        case MODE_PLAIN:
#pragma omp simd
            for (int i = 0; i < BLOCK; i++) {
                uint32_t c = codes[i], sign = (c & HALF) << SIGN_SHIFT, b;
                float v = (float)(int32_t)(c & (HALF - 1)) * scale;
                std::memcpy(&b, &v, 4);
                b |= sign;
                std::memcpy(x + i, &b, 4);
            }
            break;
        case MODE_POSITIVE:
#pragma omp simd
            for (int i = 0; i < BLOCK; i++) {
                int32_t c = codes[i];
                float v = (float)(c - 1) * scale;
                v = c == 1 ? tiny : v;
                x[i] = c ? v : 0.0f;
            }
            break;
        case MODE_FLOORED:
#pragma omp simd
            for (int i = 0; i < BLOCK; i++) x[i] = (float)(int32_t)codes[i] * scale;
            break;
        default:
            for (int i = 0; i < BLOCK; i++) {
                int k = codes[i] & (HALF - 1), count = levels(BITS, MODE_SPECIAL);
                uint32_t sign = (codes[i] & HALF) << SIGN_SHIFT;
                float v = std::min((float)k * scale, largest);
                uint32_t b = k == count + 1 ? INFINITE : bits_of(k ? v : tiny);
                if (BITS == 2 || k == count + 2) b = 0x7fc00000u, sign = 0;
                x[i] = float_of(b | sign);
            }
            return;
    }
    if (scale >= 0x1p100f)  // the scale was rounded up
        for (int i = 0; i < BLOCK; i++) x[i] = std::max(-largest, std::min(largest, x[i]));
}

// Codes of a block of `count` values, several a byte: the first part of the block in the lowest bits.
template <int BITS>
void join(const uint8_t* __restrict codes, uint8_t* __restrict packed, int count) {
    constexpr int PARTS = 8 / BITS;
    const int step = (count + PARTS - 1) / PARTS;
    if (PARTS == 1) {
        std::memcpy(packed, codes, count);
    } else if (count == BLOCK) {
        constexpr int STEP = BLOCK / PARTS;
#pragma omp simd
        for (int i = 0; i < STEP; i++) {
            uint32_t byte = codes[i];
            for (int part = 1; part < PARTS; part++)
                byte |= (uint32_t)codes[i + part * STEP] << (part * BITS);
            packed[i] = (uint8_t)byte;
        }
    } else {  // codes behind `count` are 0
        for (int i = 0; i < step; i++) {
            uint32_t byte = codes[i];
            for (int part = 1; part < PARTS; part++)
                if (i + part * step < count) byte |= (uint32_t)codes[i + part * step] << (part * BITS);
            packed[i] = (uint8_t)byte;
        }
    }
}

template <int BITS>
void split(const uint8_t* __restrict packed, uint8_t* __restrict codes, int count) {
    constexpr int PARTS = 8 / BITS;
    constexpr uint32_t MASK = (1u << BITS) - 1;
    const int step = (count + PARTS - 1) / PARTS;
    if (PARTS == 1) {
        std::memcpy(codes, packed, count);
    } else if (count == BLOCK) {
        constexpr int STEP = BLOCK / PARTS;
        for (int part = 0; part < PARTS; part++)
#pragma omp simd
            for (int i = 0; i < STEP; i++)
                codes[i + part * STEP] = (uint8_t)((packed[i] >> (part * BITS)) & MASK);
    } else {
        for (int part = 0; part < PARTS; part++)
            for (int i = 0; i < step && i + part * step < count; i++)
                codes[i + part * step] = (uint8_t)((packed[i] >> (part * BITS)) & MASK);
    }
}

inline int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

// Where a block's codes begin, behind all headers.
inline int64_t codes_at(int64_t count, int64_t block, int bits) {
    return 4 * blocks_of(count) + block * (BLOCK * bits / 8);
}

inline float widen(uint16_t h, int dtype) {
    if (dtype == BFLOAT16) return float_of((uint32_t)h << 16);
    _Float16 v;
    std::memcpy(&v, &h, 2);
    return (float)v;
}

inline uint16_t narrow(float x, int dtype) {
    uint16_t h;
    if (dtype == BFLOAT16) {
        uint32_t b = bits_of(x);
        if ((b & MAGNITUDE) > INFINITE) return (uint16_t)((b >> 16) | 0x40);
        return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1)) >> 16);
    }
    _Float16 v = (_Float16)x;
    std::memcpy(&h, &v, 2);
    return h;
}

// Returns a block of values as floats, in place where it can; zeros behind the last.
inline const float* read(const void* values, int dtype, int64_t at, int count, float* buffer) {
    if (dtype == FLOAT32) {
        const float* x = (const float*)values + at;
        if (count == BLOCK) return x;
        std::memcpy(buffer, x, 4 * count);
    } else {
        const uint16_t* x = (const uint16_t*)values + at;
        if (dtype == BFLOAT16)
            for (int i = 0; i < count; i++) buffer[i] = widen(x[i], BFLOAT16);
        else
            for (int i = 0; i < count; i++) buffer[i] = widen(x[i], FLOAT16);
    }
    for (int i = count; i < BLOCK; i++) buffer[i] = 0;
    return buffer;
}

inline void write(const float* buffer, void* values, int dtype, int64_t at, int count) {
    if (dtype == FLOAT32) {
        if (buffer != (float*)values + at) std::memcpy((float*)values + at, buffer, 4 * count);
        return;
    }
    uint16_t* x = (uint16_t*)values + at;
    if (dtype == BFLOAT16)
        for (int i = 0; i < count; i++) x[i] = narrow(buffer[i], BFLOAT16);
    else
        for (int i = 0; i < count; i++) x[i] = narrow(buffer[i], FLOAT16);
}

}  // namespace xmem
