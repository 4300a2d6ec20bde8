// A c10 CPU allocator that counts requested bytes exactly, by category, with a limit and a pool.
//
// Only c10 headers and a C ABI: compiles in about two seconds, loaded by ctypes.
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "block.h"
#include "check.h"
#include "memory.h"
#include "serving.h"
#include "state.h"

using namespace xmem_torch;
using Guard = std::lock_guard<std::mutex>;

namespace {

PoolAllocator* installed = nullptr;
c10::Allocator* previous = nullptr;
constexpr uint8_t kPriority = 100;

}  // namespace

extern "C" {

// Returns 1 if this call installed the allocator, 0 if it is in place, -1 if another one is there
// with a higher priority.
int xmem_torch_install() {
  c10::Allocator* now = c10::GetCPUAllocator();
  if (installed != nullptr && now == installed) return 0;
  if (installed == nullptr) {
    installed = new PoolAllocator();
    state();
    // A fork in one thread (DataLoader workers) must not leave the lock held in the child, nor room
    // under the limit to requests of threads that the child does not have.
    pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                   [] {
                     state().pending = 0;
                     state().mutex.unlock();
                   });
  }
  c10::SetCPUAllocator(installed, kPriority);  // does nothing where a higher priority was set
  if (c10::GetCPUAllocator() != installed) return -1;
  previous = now;
  set_in_use(true);
  return 1;
}

// Whether another allocator has taken the place of ours, which was not taken out.
int xmem_torch_displaced() {
  return state().pool.in_use && c10::GetCPUAllocator() != installed;
}

// Puts the previous allocator back; returns 1 if ours was in place. Live blocks keep its deleter.
int xmem_torch_uninstall() {
  if (installed == nullptr || c10::GetCPUAllocator() != installed) return 0;
  c10::SetCPUAllocator(previous, kPriority);
  set_in_use(false);
  trim();
  return 1;
}

// allocated, its peak, reserved, its peak, allocations, refused, frees, segments, cached, largest
// free, limit, retries
void xmem_torch_counters(int64_t* out) {
  State& s = state();
  Guard guard(s.mutex);
  const Counters& c = s.counters;
  const int64_t values[] = {c.current, c.peak,  c.reserved, c.peak_reserved,   c.allocations,
                            c.refused, c.frees, c.segments, s.pool.cached(), s.pool.largest_free(),
                            s.limit,   c.retries};
  std::memcpy(out, values, sizeof(values));
}

void xmem_torch_reset_peak() {
  State& s = state();
  Guard guard(s.mutex);
  s.counters.reset_peak();
}

void xmem_torch_set_limit(int64_t limit) {
  Returned returned;
  State& s = state();
  Guard guard(s.mutex);
  s.limit = limit;
  if (limit == kNoLimit || s.counters.reserved <= limit) return;
  const int64_t over = s.counters.reserved - limit, cached = s.pool.cached();
  s.pool.shrink(cached > over ? cached - over : 0, returned);
}

// Puts settings in force; what is cached goes back, as it was cut for others.
void xmem_torch_configure(int strategy, int64_t segment, int64_t reserve_per_mille,
                          int64_t min_cached, int64_t cache_limit, int64_t divisions,
                          int64_t slack_per_mille, int huge_pages) {
  Returned returned;
  State& s = state();
  Guard guard(s.mutex);
  s.pool.settings = {static_cast<Kind>(strategy), segment,   reserve_per_mille, min_cached,
                     cache_limit,                 divisions, slack_per_mille,   huge_pages != 0};
  s.pool.shrink(0, returned);
}

int64_t xmem_torch_trim() { return trim(); }

// Returns the bytes that are new, -1 where the system has no more, or -2 where the segment would be
// more than may be cached.
int64_t xmem_torch_preallocate(int64_t bytes) {
  if (bytes >= kAbsurd) return -1;
  State& s = state();
  Want want{};
  Block* segment = nullptr;
  for (bool everything : {false, true}) {
    {
      Returned returned;
      Guard guard(s.mutex);
      if (s.pool.largest_free() >= bytes) return 0;
      want = s.pool.want(bytes, s.limit, true, returned);
      if (!s.pool.make_room(want.size, everything, returned)) return -2;
    }
    segment = new_segment(want.size, want.kind, want.origin, want.huge);
    if (segment != nullptr) break;
  }
  if (segment == nullptr) return -1;
  Returned returned;
  Guard guard(s.mutex);
  if (want.kind == kPassthrough || want.kind != s.pool.settings.strategy) {
    returned.add(segment);  // the strategy has changed meanwhile
    return 0;
  }
  s.pool.adopt_free(segment, returned);
  return want.size;
}

// Writes at most `capacity` rows, a segment's one after the other; returns how many there are.
int64_t xmem_torch_blocks(Row* out, int64_t capacity) {
  State& s = state();
  Guard guard(s.mutex);
  int64_t count = 0;
  s.each_segment([&](Block* first) {
    for (Block* b = first; b != nullptr; b = b->right, ++count)
      if (count < capacity) out[count] = State::row_of(b, first);
  });
  return count;
}

// Writes at most History::kCapacity points; returns how many.
int xmem_torch_history(Point* out) {
  State& s = state();
  Guard guard(s.mutex);
  return s.counters.history.read(out);
}

// Copies the latest refusal; returns how many there have been.
int64_t xmem_torch_refusal(Refusal* out) {
  State& s = state();
  Guard guard(s.mutex);
  *out = s.refusal;
  return s.counters.refused;
}

// The serial of the latest allocation.
int64_t xmem_torch_serial() {
  State& s = state();
  Guard guard(s.mutex);
  return static_cast<int64_t>(s.counters.serial);
}

// Sets whom to ask before a request is refused; null for nobody.
void xmem_torch_set_on_oom(OnOom callback) { on_oom.store(callback); }

// What errors say at their end.
void xmem_torch_set_note(const char* text) {
  State& s = state();
  Guard guard(s.mutex);
  s.note = text;
}

// Tells how to see whether a thread runs backward.
void xmem_torch_set_graph_task(int (*function)()) {
  State& s = state();
  Guard guard(s.mutex);
  s.graph_task = function;
}

int xmem_torch_check() {
  State& s = state();
  Guard guard(s.mutex);
  return check(s);
}

// Tags the live blocks that start at the given addresses. found[i] becomes 1 for those of ours;
// a repeated address counts once. Returns the bytes tagged.
int64_t xmem_torch_tag(const uint64_t* addresses, int64_t count, int category, uint8_t* found) {
  std::unordered_map<uint64_t, int64_t> wanted;
  for (int64_t i = 0; i < count; ++i) wanted.emplace(addresses[i], i);
  State& s = state();
  Guard guard(s.mutex);
  Counters& c = s.counters;
  int64_t bytes = 0;
  for (Block* b = c.live.next; b != &c.live; b = b->next) {
    auto it = wanted.find(reinterpret_cast<uint64_t>(b->data()));
    if (it == wanted.end()) continue;
    c.set_category(b, static_cast<uint8_t>(category));
    found[it->second] = 1;
    bytes += b->bytes;
  }
  return bytes;
}

// Tags every live block that nobody has claimed; with since_reset only those born in the block
// that is being measured.
void xmem_torch_tag_untagged(int category, int since_reset) {
  State& s = state();
  Guard guard(s.mutex);
  Counters& c = s.counters;
  for (Block* b = c.live.next; b != &c.live; b = b->next)
    if (b->category == 0 && (!since_reset || b->serial > c.reset_serial))
      c.set_category(b, static_cast<uint8_t>(category));
}

void xmem_torch_peak_by_category(int64_t* out) {
  State& s = state();
  Guard guard(s.mutex);
  std::memcpy(out, s.counters.peak_by_category, sizeof(s.counters.peak_by_category));
}

}  // extern "C"
