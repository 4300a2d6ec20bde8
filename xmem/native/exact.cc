// Lossless packing for `xmem/exact.py`, which defines the formats.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int BLOCK = 256;
constexpr int64_t GRAIN = 1 << 15;  // elements for which threads are worth their while
constexpr int64_t CHUNK = 1 << 13;  // a multiple of 8: no byte of bits belongs to two

template <typename T>
bool holds_others(const T* x, int64_t count, T value) {
    uint32_t others = 0;
#pragma omp simd reduction(| : others)
    for (int64_t i = 0; i < count; i++) others |= (x[i] != 0) & (x[i] != value);
    return others != 0;
}

// Whether all elements are 0 or one other pattern. Most tensors say no in their first few elements.
template <typename T>
int two_valued(const T* x, int64_t count, uint32_t* second) {
    int64_t first = 0;
    while (first < count && x[first] == 0) first++;
    const T value = first < count ? x[first] : 0;
    *second = value;
    if (holds_others(x, std::min<int64_t>(count, 1024), value)) return 0;
    std::atomic<bool> found{false};
#pragma omp parallel for schedule(static) if (count >= GRAIN)
    for (int64_t at = first; at < count; at += CHUNK)
        if (!found.load(std::memory_order_relaxed) &&
            holds_others(x + at, std::min(CHUNK, count - at), value))
            found.store(true, std::memory_order_relaxed);
    return !found.load();
}

template <typename T>
void pack_bits(const T* x, int64_t count, uint8_t* packed) {
    const int64_t whole = count / 8;
#pragma omp parallel for schedule(static) if (count >= GRAIN)
    for (int64_t i = 0; i < whole; i++) {
        uint32_t byte = 0;
        for (int bit = 0; bit < 8; bit++) byte |= (uint32_t)(x[8 * i + bit] != 0) << bit;
        packed[i] = (uint8_t)byte;
    }
    if (count % 8) {
        uint32_t byte = 0;
        for (int bit = 0; bit < count % 8; bit++) byte |= (uint32_t)(x[8 * whole + bit] != 0) << bit;
        packed[whole] = (uint8_t)byte;
    }
}

template <typename T>
void unpack_bits(const uint8_t* packed, int64_t count, T value, T* x) {
    const int64_t whole = count / 8;
#pragma omp parallel for schedule(static) if (count >= GRAIN)
    for (int64_t i = 0; i < whole; i++)
        for (int bit = 0; bit < 8; bit++) x[8 * i + bit] = (packed[i] >> bit) & 1 ? value : (T)0;
    for (int64_t i = 8 * whole; i < count; i++) x[i] = (packed[whole] >> (i % 8)) & 1 ? value : (T)0;
}

template <typename T>
uint64_t widest(const T* x, int64_t count) {
    uint64_t largest = 0;
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) reduction(max : largest) if (count >= GRAIN)
    for (int64_t block = 0; block < blocks; block++) {
        const T* from = x + block * BLOCK;
        const int here = (int)std::min<int64_t>(BLOCK, count - block * BLOCK);
        T low = from[0], high = from[0];
        for (int i = 1; i < here; i++) {
            low = std::min(low, from[i]);
            high = std::max(high, from[i]);
        }
        largest = std::max(largest, (uint64_t)high - (uint64_t)low);
    }
    return largest;
}

template <typename T, typename W>
void pack_offsets(const T* x, int64_t count, uint8_t* packed) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
    int64_t* least = (int64_t*)packed;
    W* offsets = (W*)(packed + 8 * blocks);
#pragma omp parallel for schedule(static) if (count >= GRAIN)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK;
        const int here = (int)std::min<int64_t>(BLOCK, count - first);
        T low = x[first];
        for (int i = 1; i < here; i++) low = std::min(low, x[first + i]);
        least[block] = low;
        for (int i = 0; i < here; i++)
            offsets[first + i] = (W)((uint64_t)x[first + i] - (uint64_t)low);
    }
}

template <typename T, typename W>
void unpack_offsets(const uint8_t* packed, int64_t count, T* x) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
    const int64_t* least = (const int64_t*)packed;
    const W* offsets = (const W*)(packed + 8 * blocks);
#pragma omp parallel for schedule(static) if (count >= GRAIN)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * BLOCK;
        const int here = (int)std::min<int64_t>(BLOCK, count - first);
        const T low = (T)least[block];
        for (int i = 0; i < here; i++)
            x[first + i] = (T)((uint64_t)low + (uint64_t)offsets[first + i]);
    }
}

template <typename T>
void pack_offsets(const void* x, int64_t count, int width, uint8_t* packed) {
    if (width == 1) pack_offsets<T, uint8_t>((const T*)x, count, packed);
    if (width == 2) pack_offsets<T, uint16_t>((const T*)x, count, packed);
    if (width == 4) pack_offsets<T, uint32_t>((const T*)x, count, packed);
}

template <typename T>
void unpack_offsets(const uint8_t* packed, int64_t count, int width, void* x) {
    if (width == 1) unpack_offsets<T, uint8_t>(packed, count, (T*)x);
    if (width == 2) unpack_offsets<T, uint16_t>(packed, count, (T*)x);
    if (width == 4) unpack_offsets<T, uint32_t>(packed, count, (T*)x);
}

}  // namespace

extern "C" {

int xmem_exact_two_valued(const void* x, int itemsize, int64_t count, uint32_t* second) {
    if (itemsize == 4) return two_valued((const uint32_t*)x, count, second);
    return two_valued((const uint16_t*)x, count, second);
}

void xmem_exact_pack_bits(const void* x, int itemsize, int64_t count, uint8_t* packed) {
    if (itemsize == 4) pack_bits((const uint32_t*)x, count, packed);
    if (itemsize == 2) pack_bits((const uint16_t*)x, count, packed);
    if (itemsize == 1) pack_bits((const uint8_t*)x, count, packed);
}

void xmem_exact_unpack_bits(const uint8_t* packed, int64_t count, int itemsize, uint32_t value,
                            void* x) {
    if (itemsize == 4) unpack_bits(packed, count, value, (uint32_t*)x);
    if (itemsize == 2) unpack_bits(packed, count, (uint16_t)value, (uint16_t*)x);
    if (itemsize == 1) unpack_bits(packed, count, (uint8_t)value, (uint8_t*)x);
}

uint64_t xmem_exact_widest(const void* x, int itemsize, int64_t count) {
    if (itemsize == 8) return widest((const int64_t*)x, count);
    if (itemsize == 4) return widest((const int32_t*)x, count);
    return widest((const int16_t*)x, count);
}

void xmem_exact_pack_offsets(const void* x, int itemsize, int64_t count, int width,
                             uint8_t* packed) {
    if (itemsize == 8) pack_offsets<int64_t>(x, count, width, packed);
    if (itemsize == 4) pack_offsets<int32_t>(x, count, width, packed);
    if (itemsize == 2) pack_offsets<int16_t>(x, count, width, packed);
}

void xmem_exact_unpack_offsets(const uint8_t* packed, int64_t count, int itemsize, int width,
                               void* x) {
    if (itemsize == 8) unpack_offsets<int64_t>(packed, count, width, x);
    if (itemsize == 4) unpack_offsets<int32_t>(packed, count, width, x);
    if (itemsize == 2) unpack_offsets<int16_t>(packed, count, width, x);
}
}
