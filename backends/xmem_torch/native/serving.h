// Serving requests: admitted under the lock, met from the pool or by the system, or refused.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "block.h"
#include "memory.h"
#include "state.h"

namespace xmem_torch {

constexpr int64_t kAbsurd = int64_t{1} << 62;  // no machine has it, and sums cannot overflow

// Python's answer to a request that cannot be met: collects garbage. Called without the lock.
using OnOom = void (*)(int64_t bytes);
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

// Asks the system, without the lock. What is let in counts against the limit at once (`pending`),
// so that two threads cannot pass it together, and as allocated when the block is there.
inline Block* ask_system(State& s, std::unique_lock<std::mutex>& lock, int64_t bytes) {
  Block* segment = nullptr;
  for (bool least : {false, true}) {
    Want want{};
    {
      Returned returned;
      if (least) {
        lock.lock();
        ++s.counters.retries;
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

inline Block* obtain(int64_t bytes, bool last, Failure& failure) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  Block* block = nullptr;
  failure = Failure::kNone;
  if (s.over_limit(bytes)) {
    failure = Failure::kLimit;
  } else {
    if (bytes < kAbsurd) {
      block = s.pool.take(bytes);
      if (block == nullptr) block = ask_system(s, lock, bytes);
    }
    if (block == nullptr) failure = Failure::kSystem;
  }
  if (block != nullptr)
    s.counters.enlist(block, bytes);
  else if (last)
    s.refuse(bytes, failure == Failure::kLimit);
  return block;
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

// Lets Python collect garbage, and gives the cache back.
inline void answer(OnOom callback, int64_t bytes) {
  answering = true;  // what the answer itself asks for is not answered again
  callback(bytes);
  answering = false;
  Returned returned;
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  ++s.counters.retries;
  s.pool.shrink(0, returned);
}

[[noreturn]] inline void fail(size_t size, Failure failure) {
  c10::profiledCPUMemoryReporter().OutOfMemory(size);
  State& s = state();
  int64_t in_use = 0, limit = 0;
  {
    std::lock_guard<std::mutex> guard(s.mutex);
    in_use = s.refusal.allocated;
    limit = s.refusal.limit;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, failure == Failure::kSystem,
                   "CPU out of memory. Tried to allocate ", size, " bytes; ", in_use,
                   " bytes are allocated and the limit is ", limit, " bytes.");
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU out of memory. The system has no ", size,
                   " bytes left; ", in_use, " bytes are allocated.");
  __builtin_unreachable();
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::kCPU);
    if (size == 0) return {nullptr, nullptr, &release, device};
    const int64_t bytes = size < static_cast<size_t>(kAbsurd) ? static_cast<int64_t>(size) : kAbsurd;
    Failure failure;
    const OnOom callback = answering ? nullptr : on_oom.load();
    Block* block = obtain(bytes, callback == nullptr, failure);
    if (block == nullptr && callback != nullptr) {
      answer(callback, bytes);
      block = obtain(bytes, true, failure);
    }
    if (block == nullptr) fail(size, failure);
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
