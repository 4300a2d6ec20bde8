// Packs tensors for `xmem/codec.py`, and looks for those that need few bits or none of the codec.
#include "codec.h"

using namespace xmem;

namespace {

constexpr int64_t GRAIN = 64;  // blocks for which a thread is worth its while

template <int BITS>
void pack(const void* values, int dtype, int64_t count, int style, uint32_t seed, uint8_t* packed) {
    const int64_t blocks = blocks_of(count);
#pragma omp parallel for schedule(static) if (blocks >= 2 * GRAIN)
    for (int64_t block = 0; block < blocks; block++) {
        float buffer[BLOCK];
        uint8_t codes[BLOCK];
        const int64_t first = block * BLOCK;
        const int here = (int)std::min<int64_t>(BLOCK, count - first);
        uint8_t* target = packed + codes_at(count, block, BITS);
        bool direct = BITS == 8 && here == BLOCK;
        uint32_t header = quantize<BITS>(read(values, dtype, first, here, buffer),
                                         direct ? target : codes, style, (uint32_t)first,
                                         seed_at(first, seed));
        std::memcpy(packed + 4 * block, &header, 4);
        if (!direct) join<BITS>(codes, target, here);
    }
}

template <int BITS>
void unpack(const uint8_t* packed, int64_t count, int dtype, void* values) {
    const int64_t blocks = blocks_of(count);
    const float least = dtype == FLOAT16 ? 0x1p-24f : 0x1p-126f;
    const float largest = float_of(dtype == BFLOAT16 ? 0x7f7f0000u : 0x7f7fffffu);
#pragma omp parallel for schedule(static) if (blocks >= 2 * GRAIN)
    for (int64_t block = 0; block < blocks; block++) {
        float buffer[BLOCK];
        uint8_t codes[BLOCK] = {0};
        const int64_t first = block * BLOCK;
        const int here = (int)std::min<int64_t>(BLOCK, count - first);
        const uint8_t* source = packed + codes_at(count, block, BITS);
        uint32_t header;
        std::memcpy(&header, packed + 4 * block, 4);
        bool whole = here == BLOCK, direct = whole && dtype == FLOAT32;
        if (!(BITS == 8 && whole)) split<BITS>(source, codes, here);
        dequantize<BITS>(header, BITS == 8 && whole ? source : codes,
                         direct ? (float*)values + first : buffer, least, largest);
        if (!direct) write(buffer, values, dtype, first, here);
    }
}

}  // namespace

extern "C" {

void xmem_codec_pack(const void* values, int dtype, int64_t count, int bits, int style,
                     uint32_t seed, uint8_t* packed) {
    if (bits == 8) pack<8>(values, dtype, count, style, seed, packed);
    if (bits == 4) pack<4>(values, dtype, count, style, seed, packed);
    if (bits == 2) pack<2>(values, dtype, count, style, seed, packed);
}

void xmem_codec_unpack(const uint8_t* packed, int64_t count, int bits, int dtype, void* values) {
    if (bits == 8) unpack<8>(packed, count, dtype, values);
    if (bits == 4) unpack<4>(packed, count, dtype, values);
    if (bits == 2) unpack<2>(packed, count, dtype, values);
}
}
