// Between the pool and the system: counts what the pool really holds, and how it asks for it.
#pragma once
#include <stdexcept>
#include <string>
#ifdef __linux__
#include <malloc.h>
#include <sys/mman.h>
#endif

#include "mem/allocator/aligned_allocator.h"

namespace jittor {
namespace {

constexpr size_t kHugePage = 2 << 20;

struct Segments final : Allocator {
    Allocator* below;
    int64 reserved = 0, peak_reserved = 0;
    int64 held = 0, obtained = 0;  // segments now; ever
    bool huge_pages = false;

    explicit Segments(Allocator* below) : below(below) {}
    uint64 flags() const override { return below->flags(); }
    const char* name() const override { return "xmem_segments"; }
    void* alloc(size_t size, size_t& allocation) override {
        void* memory = take(size, allocation);
        // Jittor does not look at what aligned_alloc returns and would die of a segfault.
        if (!memory)
            throw std::runtime_error("out of memory: the system has no " + std::to_string(size) +
                                     " bytes for Jittor's pool, which holds " +
                                     std::to_string(reserved));
        reserved += size;
        peak_reserved = std::max(peak_reserved, reserved);
        held++;
        obtained++;
        return memory;
    }
    void free(void* memory, size_t size, const size_t& allocation) override {
        reserved -= size;
        held--;
        below->free(memory, size, allocation);
    }

   private:
    void* take(size_t size, size_t& allocation) {
#ifdef __linux__
        if (huge_pages && size >= kHugePage && below == (Allocator*)&aligned_allocator) {
            // Jittor's allocator frees with ::free, which takes this as well.
            void* memory = ::aligned_alloc(kHugePage, size);
            if (memory) madvise(memory, size / kHugePage * kHugePage, MADV_HUGEPAGE);
            return memory;
        }
#endif
        return below->alloc(size, allocation);
    }
};

}  // namespace
}  // namespace jittor
