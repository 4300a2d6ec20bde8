// Weights in 8 or 4 bits for inference; `xmem/weights.py` defines the format.
//
// Packing gives the same bytes on every machine: sums are taken in sixteen lanes, in order, and
// nothing is contracted. Products are as exact as float32 sums in any order are.
#include "codec.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

using namespace xmem;

namespace {

// A weight of a half type that was rounded up stays finite.
inline float within(float x, int dtype) {
    return dtype == FLOAT16 ? std::max(-65504.0f, std::min(65504.0f, x)) : x;
}

constexpr int LANES = 16, GROUP = 8, CANDIDATES = 11;
constexpr uint32_t SCALE_SHIFT = 18, LEAST_SCALE = 119u << 5;
constexpr float LEAST_ROW = 0x1p-100f;

struct Layout {
    int64_t columns;
    int bits, block;
    int64_t blocks() const { return (columns + block - 1) / block; }
    int64_t codes_at() const { return 2 + blocks(); }
    int64_t row_bytes() const {
        int64_t full = columns / block, rest = columns % block;
        return codes_at() + (bits == 8 ? columns : full * (block / 2) + (rest + 1) / 2);
    }
    int count(int64_t b) const { return (int)std::min<int64_t>(block, columns - b * block); }
    int64_t code(int64_t b) const { return codes_at() + b * (bits == 8 ? block : block / 2); }
};

inline float row_scale(const uint8_t* row) {
    return float_of((uint32_t)row[0] << 16 | (uint32_t)row[1] << 24);
}
inline float block_scale(const uint8_t* row, int64_t b) {
    return row_scale(row) * float_of((row[2 + b] + LEAST_SCALE) << SCALE_SHIFT);
}

inline int rounded(float x, float inverse, int least, int most) {
    float k = __builtin_rintf(x * inverse);
    k = k < (float)least ? (float)least : k;
    k = k > (float)most ? (float)most : k;
    return (int)k;
}

inline float largest_of(const float* x, int64_t count) {
    float largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; i++) {
        float a = __builtin_fabsf(x[i]);
        largest = a > largest ? a : largest;
    }
    return largest;
}

inline float summed(float* lanes) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

// The scale with the least squared error at 4 bits: of several ways to clip, each rescaled.
float fitted_scale(const float* x, int count, float largest) {
    float best = -1, scale = largest / 7.5f;
    for (int c = 0; c < CANDIDATES; c++) {
        const float inverse = 7.5f / (largest * (0.5f + 0.05f * (float)c));
        float cross[LANES] = {0}, square[LANES] = {0};
        for (int i = 0; i < count; i += LANES) {
            const int here = std::min(LANES, count - i);
#pragma omp simd
            for (int l = 0; l < here; l++) {
                float k = (float)rounded(x[i + l], inverse, -8, 7);
                cross[l] += x[i + l] * k;
                square[l] += k * k;
            }
        }
        const float a = summed(cross), b = summed(square);
        if (b > 0 && a * (a / b) > best) best = a * (a / b), scale = a / b;
    }
    return scale;
}

void pack_row(const float* x, const Layout& layout, uint8_t* row, float* wanted, double* error) {
    const int64_t blocks = layout.blocks();
    std::memset(row, 0, layout.row_bytes());
    float top = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const float* from = x + b * layout.block;
        const float largest = largest_of(from, layout.count(b));
        wanted[b] = largest < LEAST_ROW ? 0
                    : layout.bits == 8  ? largest / 127.5f
                                        : fitted_scale(from, layout.count(b), largest);
        top = std::max(top, wanted[b]);
    }
    for (int64_t i = 0; i < layout.columns; i++) error[1] += (double)x[i] * x[i];
    const uint32_t whole = (bits_of(top * (64.0f / 63.0f)) + 0xffffu) >> 16;
    row[0] = (uint8_t)whole, row[1] = (uint8_t)(whole >> 8);
    if (top == 0) {
        if (layout.bits == 4) std::memset(row + layout.codes_at(), 0x88, layout.row_bytes() - layout.codes_at());
        error[0] = error[1];
        return;
    }
    const uint32_t up = layout.bits == 8 ? (1u << SCALE_SHIFT) - 1 : 1u << (SCALE_SHIFT - 1);
    for (int64_t b = 0; b < blocks; b++) {
        const int count = layout.count(b), half = (count + 1) / 2;
        const float* from = x + b * layout.block;
        int64_t q = ((bits_of(wanted[b] / row_scale(row)) + up) >> SCALE_SHIFT) - (int64_t)LEAST_SCALE;
        row[2 + b] = (uint8_t)std::max<int64_t>(0, std::min<int64_t>(255, q));
        const float scale = block_scale(row, b), inverse = 1.0f / scale;
        uint8_t* codes = row + layout.code(b);
        for (int i = 0; i < count; i++) {
            int k = layout.bits == 8 ? rounded(from[i], inverse, -127, 127)
                                     : rounded(from[i], inverse, -8, 7);
            double d = (double)from[i] - (double)((float)k * scale);
            error[0] += d * d;
            if (layout.bits == 8) codes[i] = (uint8_t)(int8_t)k;
            else codes[i % half] |= (uint8_t)((k + 8) << (i < half ? 0 : 4));
        }
        if (layout.bits == 4 && count % 2) codes[half - 1] |= 0x80;
    }
}

// A row's codes as signed bytes.
void spread(const uint8_t* row, const Layout& layout, int8_t* codes) {
    for (int64_t b = 0; b < layout.blocks(); b++) {
        const int count = layout.count(b), half = (count + 1) / 2;
        const uint8_t* from = row + layout.code(b);
        int8_t* to = codes + b * layout.block;
#pragma omp simd
        for (int i = 0; i < half; i++) to[i] = (int8_t)((from[i] & 15) - 8);
#pragma omp simd
        for (int i = half; i < count; i++) to[i] = (int8_t)((from[i - half] >> 4) - 8);
    }
}

void unpack_row(const uint8_t* row, const Layout& layout, float* x) {
    for (int64_t b = 0; b < layout.blocks(); b++) {
        const int count = layout.count(b), half = (count + 1) / 2;
        const uint8_t* codes = row + layout.code(b);
        const float scale = block_scale(row, b);
        float* to = x + b * layout.block;
        if (layout.bits == 8) {
#pragma omp simd
            for (int i = 0; i < count; i++) to[i] = (float)(int8_t)codes[i] * scale;
        } else {
#pragma omp simd
            for (int i = 0; i < half; i++) to[i] = (float)((codes[i] & 15) - 8) * scale;
#pragma omp simd
            for (int i = half; i < count; i++) to[i] = (float)((codes[i - half] >> 4) - 8) * scale;
        }
    }
}

float dot(const float* a, const float* b, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++)
#ifdef __FMA__
        sum = __builtin_fmaf(a[i], b[i], sum);
#else
        sum += a[i] * b[i];
#endif
    return sum;
}

// Of `group` rows of activations (bytes around 128) with one row of codes; `padded` bytes a row.
void products(const uint8_t* u, int64_t padded, int group, const int8_t* w, const uint8_t* row,
              const Layout& layout, float* sums) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    const __m512i ones = _mm512_set1_epi8(1);
    __m512 sum[GROUP];
    for (int r = 0; r < GROUP; r++) sum[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < layout.blocks(); b++) {
        const int count = layout.count(b);
        __m512i acc[GROUP], codes = _mm512_setzero_si512();
        for (int r = 0; r < GROUP; r++) acc[r] = _mm512_setzero_si512();
        for (int i = 0; i < count; i += 64) {
            const __mmask64 mask = count - i >= 64 ? ~0ull : (1ull << (count - i)) - 1;
            const int64_t at = b * layout.block + i;
            const __m512i c = _mm512_maskz_loadu_epi8(mask, w + at);
            codes = _mm512_dpbusd_epi32(codes, ones, c);
            for (int r = 0; r < GROUP; r++)  // rows behind the group repeat its last one
                acc[r] = _mm512_dpbusd_epi32(
                    acc[r], _mm512_loadu_si512(u + std::min(r, group - 1) * padded + at), c);
        }
        const __m512i shift = _mm512_slli_epi32(codes, 7);  // 128 times the codes
        const __m512 scale = _mm512_set1_ps(block_scale(row, b));
        for (int r = 0; r < GROUP; r++)
            sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(acc[r], shift)), scale, sum[r]);
    }
    for (int r = 0; r < group; r++) sums[r] = _mm512_reduce_add_ps(sum[r]);
#else
    for (int r = 0; r < group; r++) {
        sums[r] = 0;
        for (int64_t b = 0; b < layout.blocks(); b++) {
            const uint8_t* from = u + r * padded + b * layout.block;
            const int8_t* codes = w + b * layout.block;
            int32_t acc = 0;
            const int count = layout.count(b);
#pragma omp simd reduction(+ : acc)
            for (int i = 0; i < count; i++) acc += ((int32_t)from[i] - 128) * (int32_t)codes[i];
            sums[r] += (float)acc * block_scale(row, b);
        }
    }
#endif
}

int64_t padded_to(int64_t columns) { return (columns + 63) / 64 * 64 + 64; }

}  // namespace

extern "C" {

// Scratch rows live on the caller's side, so that what is allocated is counted.
void xmem_weights_pack(const void* values, int dtype, int64_t rows, int64_t columns, int bits,
                       int block, uint8_t* packed, float* scratch, double* error) {
    const Layout layout{columns, bits, block};
    const int64_t width = columns + layout.blocks();
    double lost = 0, all = 0;
#pragma omp parallel for schedule(static) reduction(+ : lost, all) if (rows * columns > 65536)
    for (int64_t part = 0; part < 64; part++)
        for (int64_t r = part * rows / 64; r < (part + 1) * rows / 64; r++) {
            float* buffer = scratch + part * width;
            const float* x = (const float*)values + r * columns;
            if (dtype != FLOAT32) {
                const uint16_t* h = (const uint16_t*)values + r * columns;
                for (int64_t i = 0; i < columns; i++) buffer[i] = widen(h[i], dtype);
                x = buffer;
            }
            double found[2] = {0, 0};
            pack_row(x, layout, packed + r * layout.row_bytes(), buffer + columns, found);
            lost += found[0], all += found[1];
        }
    error[0] = lost, error[1] = all;
}

void xmem_weights_unpack(const uint8_t* packed, int64_t rows, int64_t columns, int bits, int block,
                         int dtype, void* values) {
    const Layout layout{columns, bits, block};
#pragma omp parallel for schedule(static) if (rows * columns > 65536)
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t* row = packed + r * layout.row_bytes();
        if (dtype == FLOAT32) {
            unpack_row(row, layout, (float*)values + r * columns);
            continue;
        }
        // Block by block through the stack.
        float buffer[BLOCK];
        uint16_t* to = (uint16_t*)values + r * columns;
        for (int64_t b = 0; b < layout.blocks(); b++) {
            const int count = layout.count(b), half = (count + 1) / 2;
            const uint8_t* codes = row + layout.code(b);
            const float scale = block_scale(row, b);
            for (int i = 0; i < count; i++) {
                int k = bits == 8 ? (int8_t)codes[i]
                        : i < half ? (codes[i] & 15) - 8 : (codes[i - half] >> 4) - 8;
                buffer[i] = (float)k * scale;
            }
            for (int i = 0; i < count; i++) to[b * block + i] = narrow(within(buffer[i], dtype), dtype);
        }
    }
}

// y (batch, rows) = x (batch, columns) times the unpacked, a row at a time; for few rows of x.
void xmem_weights_linear(const float* x, int64_t batch, const uint8_t* packed, int64_t rows,
                         int64_t columns, int bits, int block, float* scratch, float* y) {
    const Layout layout{columns, bits, block};
#pragma omp parallel for schedule(static) if (rows * columns > 65536)
    for (int64_t part = 0; part < 64; part++)
        for (int64_t r = part * rows / 64; r < (part + 1) * rows / 64; r++) {
            float* w = scratch + part * columns;
            unpack_row(packed + r * layout.row_bytes(), layout, w);
            for (int64_t m = 0; m < batch; m++) y[m * rows + r] = dot(x + m * columns, w, columns);
        }
}

int64_t xmem_weights_dynamic_bytes(int64_t batch, int64_t columns) {
    return batch * (padded_to(columns) + 4) + 64 * columns;
}

// The same with each row of x in 8 bits, and products of integers.
void xmem_weights_dynamic(const float* x, int64_t batch, const uint8_t* packed, int64_t rows,
                          int64_t columns, int bits, int block, uint8_t* scratch, float* y) {
    const Layout layout{columns, bits, block};
    const int64_t padded = padded_to(columns);
    float* scales = (float*)scratch;
    uint8_t* u = scratch + 4 * batch;
    int8_t* codes = (int8_t*)(u + batch * padded);
#pragma omp parallel for schedule(static) if (batch * columns > 65536)
    for (int64_t m = 0; m < batch; m++) {
        const float* from = x + m * columns;
        const float largest = largest_of(from, columns);
        const float scale = largest / 127.0f, inverse = scale >= 0x1p-126f ? 1.0f / scale : 0;
        uint8_t* to = u + m * padded;
        scales[m] = largest < __builtin_inff() ? scale : __builtin_nanf("");
#pragma omp simd
        for (int64_t i = 0; i < columns; i++)
            to[i] = (uint8_t)(rounded(from[i], inverse, -127, 127) + 128);
        for (int64_t i = 0; i < columns; i++)
            if (from[i] != from[i]) scales[m] = from[i];  // NaN stays one
        std::memset(to + columns, 128, padded - columns);
    }
#pragma omp parallel for schedule(static) if (batch * rows * columns > 65536)
    for (int64_t part = 0; part < 64; part++)
        for (int64_t r = part * rows / 64; r < (part + 1) * rows / 64; r++) {
            const uint8_t* row = packed + r * layout.row_bytes();
            int8_t* w = codes + part * columns;
            if (bits == 8) w = (int8_t*)(row + layout.codes_at());
            else spread(row, layout, w);
            for (int64_t m = 0; m < batch; m += GROUP) {
                const int group = (int)std::min<int64_t>(GROUP, batch - m);
                float sums[GROUP];
                products(u + m * padded, padded, group, w, row, layout, sums);
                for (int g = 0; g < group; g++) y[(m + g) * rows + r] = sums[g] * scales[m + g];
            }
        }
}
}
