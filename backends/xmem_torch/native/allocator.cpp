// A c10 CPU allocator that counts requested bytes exactly, by category, with a limit.
//
// Only c10 headers and a C ABI: compiles in about a second, loaded by ctypes. Each block carries a
// header with its size, the serial of its birth and its category, and is linked into the list of
// live blocks. The counters by category at the last peak can be corrected afterwards: a block that
// is alive now and was born before the peak was alive at the peak, so giving it a category moves
// its bytes in the peak's breakdown too.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

constexpr int kCategories = 8;   // xmem.protocols.CATEGORIES, in its order; 0 is "temporary"
constexpr uint64_t kHeader = 64; // keeps the data on a cache line

struct Block {
  int64_t bytes;
  int64_t reserved;
  uint64_t serial;
  Block* previous;
  Block* next;
  uint8_t category;
};
static_assert(sizeof(Block) <= kHeader, "the header must fit before the data");

struct State {
  std::mutex mutex;
  Block live{};  // head of the ring of live blocks
  int64_t current = 0, peak = 0, reserved = 0, peak_reserved = 0;
  int64_t pending = 0;  // admitted, and not yet there
  int64_t allocations = 0, refused = 0, limit = -1;
  uint64_t serial = 0, peak_serial = 0, reset_serial = 0;
  int64_t by_category[kCategories] = {}, peak_by_category[kCategories] = {};
  State() { live.previous = live.next = &live; }
};

// Never destroyed: tensors are freed after static destructors have run.
State& state() {
  static State* instance = new State();
  return *instance;
}

void note_peak(State& s) {
  s.peak = s.current;
  s.peak_serial = s.serial;
  std::memcpy(s.peak_by_category, s.by_category, sizeof(s.by_category));
}

void set_category(State& s, Block* block, uint8_t category) {
  s.by_category[block->category] -= block->bytes;
  s.by_category[category] += block->bytes;
  if (block->serial <= s.peak_serial) {
    s.peak_by_category[block->category] -= block->bytes;
    s.peak_by_category[category] += block->bytes;
  }
  block->category = category;
}

void release(void* data) {
  if (data == nullptr) return;
  auto* block = reinterpret_cast<Block*>(static_cast<char*>(data) - kHeader);
  {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.mutex);
    block->previous->next = block->next;
    block->next->previous = block->previous;
    s.current -= block->bytes;
    s.reserved -= block->reserved;
    s.by_category[block->category] -= block->bytes;
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(block);
}

// Lets a request in, or refuses it. What is let in counts against the limit at once, so that two
// threads cannot pass it together, and towards the bytes allocated when the block is there.
bool admit(State& s, int64_t bytes, int64_t* in_use, int64_t* limit) {
  std::lock_guard<std::mutex> guard(s.mutex);
  *in_use = s.current;
  *limit = s.limit;
  if (s.limit >= 0 && s.current + s.pending + bytes > s.limit) {
    ++s.refused;
    return false;
  }
  s.pending += bytes;
  return true;
}

void enlist(State& s, Block* block) {
  std::lock_guard<std::mutex> guard(s.mutex);
  block->serial = ++s.serial;
  block->next = s.live.next;
  block->previous = &s.live;
  s.live.next->previous = block;
  s.live.next = block;
  ++s.allocations;
  s.pending -= block->bytes;
  s.current += block->bytes;
  s.reserved += block->reserved;
  s.by_category[0] += block->bytes;
  if (s.reserved > s.peak_reserved) s.peak_reserved = s.reserved;
  if (s.current > s.peak) note_peak(s);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::kCPU);
    if (size == 0) return {nullptr, nullptr, &release, device};
    State& s = state();
    const auto bytes = static_cast<int64_t>(size);
    const auto reserved = static_cast<int64_t>((size + 63) / 64 * 64 + kHeader);
    int64_t in_use = 0, limit = 0;
    TORCH_CHECK_WITH(
        OutOfMemoryError, admit(s, bytes, &in_use, &limit),
        "CPU out of memory. Tried to allocate ", size, " bytes; ", in_use,
        " bytes are allocated and the limit is ", limit, " bytes.");
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(reserved)) != 0) {
      {
        std::lock_guard<std::mutex> guard(s.mutex);
        s.pending -= bytes;
        ++s.refused;
      }
      c10::profiledCPUMemoryReporter().OutOfMemory(size);
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CPU out of memory. The system has no ", size,
          " bytes left; ", in_use, " bytes are allocated.");
    }
    auto* block = new (memory) Block{bytes, reserved, 0, nullptr, nullptr, 0};
    enlist(s, block);
    void* data = static_cast<char*>(memory) + kHeader;
    c10::profiledCPUMemoryReporter().New(data, size);
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};

CountingAllocator* installed = nullptr;
constexpr uint8_t kPriority = 100;

}  // namespace

extern "C" {

// Returns 1 if this call installed the allocator. It stays: live blocks keep its deleter.
int xmem_torch_install() {
  if (installed != nullptr && c10::GetCPUAllocator() == installed) return 0;
  if (installed == nullptr) {
    installed = new CountingAllocator();
    state();
    // A fork in one thread (DataLoader workers) must not leave the lock held in the child.
    pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                   [] { state().mutex.unlock(); });
  }
  c10::SetCPUAllocator(installed, kPriority);
  return 1;
}

void xmem_torch_counters(int64_t* out) {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  out[0] = s.current;
  out[1] = s.peak;
  out[2] = s.reserved;
  out[3] = s.peak_reserved;
  out[4] = s.allocations;
  out[5] = s.refused;
}

void xmem_torch_reset_peak() {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  note_peak(s);
  s.reset_serial = s.serial;
  s.peak_reserved = s.reserved;
}

void xmem_torch_set_limit(int64_t limit) {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.limit = limit;
}

// Tags the live blocks that start at the given addresses. found[i] becomes 1 for those of ours;
// a repeated address counts once. Returns the bytes tagged.
int64_t xmem_torch_tag(const uint64_t* addresses, int64_t count, int category, uint8_t* found) {
  std::unordered_map<uint64_t, int64_t> wanted;
  for (int64_t i = 0; i < count; ++i) wanted.emplace(addresses[i], i);
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  int64_t bytes = 0;
  for (Block* b = s.live.next; b != &s.live; b = b->next) {
    auto it = wanted.find(reinterpret_cast<uint64_t>(b) + kHeader);
    if (it == wanted.end()) continue;
    set_category(s, b, static_cast<uint8_t>(category));
    found[it->second] = 1;
    bytes += b->bytes;
  }
  return bytes;
}

// Tags every live block that nobody has claimed; with since_reset only those born in the block
// that is being measured.
void xmem_torch_tag_untagged(int category, int since_reset) {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  for (Block* b = s.live.next; b != &s.live; b = b->next)
    if (b->category == 0 && (!since_reset || b->serial > s.reset_serial))
      set_category(s, b, static_cast<uint8_t>(category));
}

void xmem_torch_peak_by_category(int64_t* out) {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  std::memcpy(out, s.peak_by_category, sizeof(s.peak_by_category));
}

}  // extern "C"
