// Serving requests: admitted under the lock, met from the pool or by the system, or refused.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>

#include "block.h"
#include "memory.h"
#include "state.h"

namespace xmem_torch {

// Python's answer to a request that cannot be met: collects garbage, or moves tensors. Returns what
// it has freed where asking again may free more, else 0. Called without the lock.
using OnOom = int64_t (*)(int64_t bytes);
inline std::atomic<OnOom> on_oom{nullptr};
inline thread_local bool answering = false;

inline void release(void* data) {
  if (data == nullptr) return;
  // Before the block can be handed out again, or its next report would come first.
  c10::profiledCPUMemoryReporter().Delete(data);
  Returned returned;
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  Block* block = block_of(data);
  s.counters.unlist(block);
  s.pool.give_back(block, returned);
}

enum class Failure { kNone, kLimit, kSystem };

// How a request goes: whether it has been tried again, and what was there when it failed.
struct Course {
  Failure failure = Failure::kNone;
  bool retried = false;
  int64_t allocated = 0, limit = kNoLimit;

  void retry(State& s) {
    if (!retried) ++s.counters.retries;
    retried = true;
  }
};

// Asks the system, without the lock. What is let in counts against the limit at once (`pending`),
// so that two threads cannot pass it together, and as allocated when the block is there.
inline Block* ask_system(State& s, std::unique_lock<std::mutex>& lock, int64_t bytes,
                         Course& course) {
  Block* segment = nullptr;
  for (bool least : {false, true}) {
    Want want{};
    {
      Returned returned;
      if (least) {
        lock.lock();
        course.retry(s);
        s.pool.shrink(0, returned);
      }
      want = s.pool.want(bytes, s.limit, least, returned);
      if (!least) s.pending += bytes;
      lock.unlock();
    }
    segment = new_segment(want.size, want.kind, want.origin, want.huge);
    if (segment != nullptr) break;
  }
  lock.lock();
  s.pending -= bytes;
  return segment == nullptr ? nullptr : s.pool.adopt(segment, bytes);
}

inline Block* obtain(int64_t bytes, bool last, Course& course) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  Block* block = nullptr;
  if (s.over_limit(bytes)) {
    course.failure = Failure::kLimit;
  } else {
    if (bytes < kAbsurd) {
      block = s.pool.take(bytes);
      if (block == nullptr) block = ask_system(s, lock, bytes, course);
    }
    if (block == nullptr) course.failure = Failure::kSystem;
  }
  if (block != nullptr) {
    s.counters.enlist(block, bytes);
    return block;
  }
  course.allocated = s.counters.current;
  course.limit = s.limit;
  if (last) s.refuse(bytes, course.failure == Failure::kLimit);
  return nullptr;
}

inline int64_t trim() {
  Returned returned;
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.counters.highest = s.counters.current;
  return s.pool.shrink(0, returned);
}

inline void set_in_use(bool value) {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.pool.in_use = value;
}

// Lets Python make room, and gives the cache back. Says whether there may be more room to make.
inline bool answer(OnOom callback, int64_t bytes, Course& course) {
  answering = true;  // what the answer itself asks for is not answered again
  const bool has_more = callback(bytes) > 0;
  answering = false;
  Returned returned;
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  course.retry(s);
  s.pool.shrink(0, returned);
  return has_more;
}

[[noreturn]] inline void fail(size_t size, const Course& course) {
  c10::profiledCPUMemoryReporter().OutOfMemory(size);
  std::string note;
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    note = state().note;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, course.failure == Failure::kSystem,
                   "CPU out of memory. Tried to allocate ", size, " bytes; ", course.allocated,
                   " bytes are allocated and the limit is ", course.limit, " bytes.", note);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU out of memory. The system has no ", size,
                   " bytes left; ", course.allocated, " bytes are allocated.", note);
  __builtin_unreachable();
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::kCPU);
    if (size == 0) return {nullptr, nullptr, &release, device};
    constexpr size_t most = std::numeric_limits<int64_t>::max();
    const auto bytes = static_cast<int64_t>(std::min(size, most));
    Course course;
    const OnOom callback = answering ? nullptr : on_oom.load();
    Block* block = obtain(bytes, callback == nullptr, course);
    for (bool has_more = callback != nullptr; block == nullptr && has_more;) {
      has_more = answer(callback, bytes, course);
      block = obtain(bytes, !has_more, course);
    }
    if (block == nullptr) fail(size, course);
    void* data = block->data();
    c10::profiledCPUMemoryReporter().New(data, size);
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};

}  // namespace xmem_torch
