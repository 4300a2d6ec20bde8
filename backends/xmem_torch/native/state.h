// All that the allocator knows, behind one lock; what it writes down when it refuses a request;
// and the walk over all segments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

#include "block.h"
#include "counters.h"
#include "pool.h"

namespace xmem_torch {

constexpr int kLargest = 256;

// As ctypes reads it; all fields are 64 bits wide.
struct Row {
  int64_t segment, address, size, bytes, category, birth;  // category: -1 where it is free
};

struct Refusal {
  int64_t requested, allocated, reserved, limit, largest_free, birth, in_backward, count;
  int64_t by_category[kCategories];
  Row largest[kLargest];
};

struct State {
  std::mutex mutex;
  Counters counters;
  Pool pool{counters};
  int64_t limit = kNoLimit;
  int64_t pending = 0;  // admitted, and not yet there
  Refusal refusal{};
  std::string note;  // what errors say at their end
  int (*graph_task)() = nullptr;  // torch::autograd::get_current_graph_task_id

  bool over_limit(int64_t bytes) const {
    return limit != kNoLimit && bytes > limit - counters.current - pending;  // no overflow
  }

  void refuse(int64_t requested, bool by_limit) {
    ++counters.refused;
    Refusal& r = refusal;
    r.requested = requested;
    r.allocated = counters.current;
    r.reserved = counters.reserved;
    r.limit = by_limit ? limit : kNoLimit;
    r.largest_free = pool.largest_free();
    r.birth = static_cast<int64_t>(counters.serial) + 1;
    r.in_backward = graph_task == nullptr ? -1 : graph_task() >= 0;
    std::memcpy(r.by_category, counters.by_category, sizeof(r.by_category));
    r.count = largest_live(r.largest);
  }

  // Calls visit(first block) for each segment; it must change nothing.
  template <typename Visit>
  void each_segment(Visit visit) {
    for (Block* b = counters.live.next; b != &counters.live; b = b->next)
      if (b->left == nullptr) visit(b);
    for (Kind kind : {kSizeClass, kBfc})
      pool.bins(kind).descend([&](Block* b) {
        if (b->left == nullptr) visit(b);
        return true;
      });
  }

  // An address is the data's: a block's header lies before it, so blocks of a segment, which
  // begins at its first data, still follow each other without a gap.
  static Row row_of(Block* b, Block* first) {
    return {reinterpret_cast<int64_t>(first->data()), reinterpret_cast<int64_t>(b->data()),
            b->size, b->bytes, b->live ? b->category : -1, static_cast<int64_t>(b->serial)};
  }

 private:
  int64_t largest_live(Row* out) {
    const auto larger = [](const Row& a, const Row& b) { return a.bytes > b.bytes; };
    int count = 0;  // out is a heap with the smallest in front
    for (Block* b = counters.live.next; b != &counters.live; b = b->next) {
      if (count == kLargest) {
        if (b->bytes <= out[0].bytes) continue;
        std::pop_heap(out, out + count--, larger);
      }
      out[count++] = row_of(b, b);
      std::push_heap(out, out + count, larger);
    }
    std::sort_heap(out, out + count, larger);
    return count;
  }
};

// Never destroyed: tensors are freed after static destructors have run.
inline State& state() {
  static State* instance = new State();
  return *instance;
}

}  // namespace xmem_torch
