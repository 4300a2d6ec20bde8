// A block: the 64 bytes before the data of every tensor that this allocator made.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xmem_torch {

constexpr int kCategories = 8;   // xmem.records.CATEGORIES, in its order; 0 is "temporary"
constexpr int64_t kHeader = 64;  // keeps the data on a cache line
constexpr int64_t kAbsurd = int64_t{1} << 60;  // no machine has it, and sums cannot overflow

enum Kind : uint8_t { kPassthrough, kSizeClass, kBfc, kKinds };
enum Origin : uint8_t { kHeap, kMapped };

// A segment is what came from the system in one piece; the blocks that it is cut into follow each
// other without a gap and are chained by left and right. A block never changes its kind, so it
// finds its way back whatever the strategy is by then.
struct Block {
  int64_t bytes;     // requested; 0 while free
  int64_t size;      // what it takes in its segment, this header included
  uint64_t serial;   // of its birth
  Block* previous;   // in the ring of live blocks, or in the list of a bin
  Block* next;
  Block* left;       // neighbours in the segment
  Block* right;
  uint8_t category;
  Kind kind;
  Origin origin;
  bool live;

  char* data() { return reinterpret_cast<char*>(this) + kHeader; }
  bool whole() const { return left == nullptr && right == nullptr; }
};
static_assert(sizeof(Block) <= kHeader, "the header must fit before the data");

inline Block* block_of(void* data) {
  return reinterpret_cast<Block*>(static_cast<char*>(data) - kHeader);
}

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// What a request takes at least.
inline int64_t size_for(int64_t bytes) { return round_up(bytes, 64) + kHeader; }

}  // namespace xmem_torch
