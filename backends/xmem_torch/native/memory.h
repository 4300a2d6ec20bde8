// Memory from the system: as PyTorch takes it, or mapped pages that go back when they are freed.
#pragma once

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#include "block.h"

namespace xmem_torch {

constexpr int64_t kHugePage = int64_t{2} << 20;

inline int64_t page_size() {
  static const int64_t size = sysconf(_SC_PAGESIZE);
  return size;
}

// Pages and not malloc: glibc raises its threshold with every freed piece, and would then keep
// freed segments in its heap.
inline void* map_pages(int64_t size, bool huge) {
  const int64_t extra = huge ? kHugePage : 0;
  void* mapped = mmap(nullptr, static_cast<size_t>(size + extra), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (!huge) return mapped;
  char* begin = static_cast<char*>(mapped);
  char* aligned = reinterpret_cast<char*>(
      round_up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin)), kHugePage));
  if (aligned > begin) munmap(begin, static_cast<size_t>(aligned - begin));
  const int64_t tail = begin + extra - aligned;
  if (tail > 0) munmap(aligned + size, static_cast<size_t>(tail));
  madvise(aligned, static_cast<size_t>(size), MADV_HUGEPAGE);  // advice: may be refused
  return aligned;
}

// Returns a block over a whole new segment, or nothing where the system has no more.
inline Block* new_segment(int64_t size, Kind kind, Origin origin, bool huge) {
  void* memory = nullptr;
  if (origin == kMapped) {
    memory = map_pages(size, huge);
  } else {
    try {
      memory = c10::alloc_cpu(static_cast<size_t>(size));
    } catch (const c10::Error&) {  // a plain error there; the caller has a better one
    }
  }
  if (memory == nullptr) return nullptr;
  return new (memory)
      Block{0, size, 0, nullptr, nullptr, nullptr, nullptr, 0, kind, origin, false};
}

inline void free_segment(Block* block) {
  if (block->origin == kMapped)
    munmap(block, static_cast<size_t>(block->size));
  else
    c10::free_cpu(block);
}

// Segments on their way back to the system, chained by next: unmapping takes long, and is done
// when the lock has been released.
struct Returned {
  Block* first = nullptr;
  void add(Block* block) {
    block->next = first;
    first = block;
  }
  ~Returned() {
    while (first != nullptr) {
      Block* block = first;
      first = block->next;
      free_segment(block);
    }
  }
};

}  // namespace xmem_torch
