// Exact byte counts for Jittor 1.3.11: a subclass of its pool, put where the pool was.
//
// Jittor keeps its allocators in the exported map jittor::allocators, keyed by the pool's type and
// the allocator below it, and looks there at the start of every execution. Replacing the entry
// replaces the pool; no source of Jittor is changed. Tensors made before stay in the old pool.
//
// Counted are requested bytes, by allocation and not by tensor: views share an allocation, and
// the tensor that is freed last may be a smaller view. Every live allocation knows when it was born
// and its category, so that bytes can still move between categories in the picture of the last
// peak: an allocation that lives now and was born before the peak was there at the peak.
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "graph.h"
#include "mem/allocator/aligned_allocator.h"
#include "mem/allocator/sfrl_allocator.h"
#include "misc/cuda_flags.h"
#include "op.h"
#include "var.h"
#include "var_holder.h"
#ifdef HAS_CUDA
#include "mem/allocator/cuda_device_allocator.h"
#include "mem/allocator/cuda_host_allocator.h"
#endif

namespace jittor {

// As in Jittor's mem/allocator.cc, which exports the map but declares it in no header.
struct pair_hash {
    template <class First, class Second>
    std::size_t operator()(const std::pair<First, Second>& key) const {
        return std::hash<First>()(key.first) ^ std::hash<Second>()(key.second);
    }
};
extern std::unordered_map<pair<string, Allocator*>, unique_ptr<Allocator>, pair_hash> allocators;

namespace {

constexpr int kCategories = 16;
constexpr int kTemporary = 0;

struct Record {
    int64 requested = 0;
    int64 birth = 0;
    int category = kTemporary;
    bool live = false;
};

// What tensors are allocated for, beside their bytes; shared by all pools.
struct Expectations {
    std::unordered_map<int64, int> category_by_node;  // gradients that have not been computed yet
    std::deque<int64> backward_marks;                 // the last node of each forward
    int activation = kTemporary;                      // the code of the category "activation"
} expectations;

void* var_vtable = nullptr;

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
constexpr size_t kAllocationOffset = offsetof(Var, allocation);
#pragma GCC diagnostic pop

// The Var that an allocation is for, or nullptr.
//
// Var::alloc calls `allocator->alloc(size, this->allocation)`, so the address of the second
// argument gives the Var. Other callers (arrays from NumPy, migrations, workspaces) pass other
// places, so what would be the Var is believed only if it has the vtable of a Var and the state
// that Var::alloc calls in. For those callers this reads up to sizeof(Var) bytes before their
// variable, which are their own object or the stack.
Var* var_behind(size_t& allocation, size_t size) {
    auto* candidate = reinterpret_cast<char*>(&allocation) - kAllocationOffset;
    void* vtable;
    memcpy(&vtable, candidate, sizeof(vtable));
    if (!var_vtable || vtable != var_vtable) return nullptr;
    auto* var = reinterpret_cast<Var*>(candidate);
    bool waits = var->is_var() && !var->mem_ptr && !var->allocator && var->size == (int64)size &&
                 var->id > 0 && var->id <= total_node;
    return waits ? var : nullptr;
}

// Between the pool and the system: counts what the pool really holds.
struct Segments final : Allocator {
    Allocator* below;
    int64 reserved = 0, peak_reserved = 0;

    explicit Segments(Allocator* below) : below(below) {}
    uint64 flags() const override { return below->flags(); }
    const char* name() const override { return "xmem_segments"; }
    void* alloc(size_t size, size_t& allocation) override {
        void* memory = below->alloc(size, allocation);
        // Jittor does not look at what aligned_alloc returns and would die of a segfault.
        if (!memory)
            throw std::runtime_error("out of memory: the system has no " + std::to_string(size) +
                                     " bytes for Jittor's pool, which holds " +
                                     std::to_string(reserved));
        reserved += size;
        peak_reserved = std::max(peak_reserved, reserved);
        return memory;
    }
    void free(void* memory, size_t size, const size_t& allocation) override {
        reserved -= size;
        below->free(memory, size, allocation);
    }
};

struct Pool final : SFRLAllocator {
    Segments segments;
    std::mutex mutex;
    std::vector<Record> records;  // by allocation id
    int64 now[kCategories] = {0}, at_peak[kCategories] = {0};
    int64 current = 0, peak = 0, limit = -1;
    int64 entry_peak = 0;  // since the last entry of the log
    int64 births = 0, peak_birth = 0, reset_birth = 0, refused = 0;

    explicit Pool(Allocator* below) : segments(below) { setup(&segments); }

    void* alloc(size_t size, size_t& allocation) override {
        Var* var = var_behind(allocation, size);
        if (limit >= 0 && current + (int64)size > limit) {
            refused++;
            throw std::runtime_error("out of memory: " + std::to_string(size) +
                                     " bytes requested, " + std::to_string(current) +
                                     " allocated, limit " + std::to_string(limit));
        }
        void* memory = nullptr;
        try {
            memory = SFRLAllocator::alloc(size, allocation);
        } catch (...) {
            refused++;
            throw;
        }
        std::lock_guard<std::mutex> lock(mutex);
        if (var) pass_marks(var);
        remember(size, allocation, var);
        return memory;
    }

    void free(void* memory, size_t size, const size_t& allocation) override {
        const size_t id = allocation;
        const int64 before = used_memory;
        SFRLAllocator::free(memory, size, id);
        if (used_memory == before) return;  // only one of several references went away
        std::lock_guard<std::mutex> lock(mutex);
        auto& record = records[id];
        record.live = false;
        current -= record.requested;
        now[record.category] -= record.requested;
    }

    void remember(size_t size, size_t id, Var* var) {
        if (id >= records.size()) records.resize(2 * id + 1024);
        int category = kTemporary;
        if (var && !expectations.category_by_node.empty()) {
            auto found = expectations.category_by_node.find(var->id);
            if (found != expectations.category_by_node.end()) {
                category = found->second;
                expectations.category_by_node.erase(found);
            }
        }
        records[id] = Record{(int64)size, ++births, category, true};
        current += size;
        now[category] += size;
        entry_peak = std::max(entry_peak, current);
        if (current > peak) take_picture();
    }

    void take_picture() {
        peak = current;
        peak_birth = births;
        memcpy(at_peak, now, sizeof(now));
    }

    void reset_peak() {
        take_picture();
        reset_birth = births;
        segments.peak_reserved = segments.reserved;
    }

    void move(Record& record, int category) {
        now[record.category] -= record.requested;
        now[category] += record.requested;
        if (record.birth <= peak_birth) {
            at_peak[record.category] -= record.requested;
            at_peak[category] += record.requested;
        }
        record.category = category;
    }

    void move_unclaimed(int category, int64 born_after) {
        for (auto& record : records)
            if (record.live && record.category == kTemporary && record.birth > born_after)
                move(record, category);
    }

    // The first tensor of backward is about to be born: what forward left is activations.
    void pass_marks(Var* var) {
        auto& marks = expectations.backward_marks;
        if (marks.empty() || var->id <= marks.front()) return;
        // Optimizers ask for an early place in the order of execution, so parts of an update that
        // need no gradient (a learning rate's correction) run before forward.
        if (var->flags.get(NodeFlags::_node_order_low, 2)) return;
        while (!marks.empty() && var->id > marks.front()) marks.pop_front();
        move_unclaimed(expectations.activation, reset_birth);
    }
};

std::vector<Pool*> pools;
std::vector<Allocator*> replaced;  // never freed: older tensors still point to them

Pool* install(Allocator* below) {
    pair<string, Allocator*> key{typeid(SFRLAllocator).name(), below};
    auto found = allocators.find(key);
    if (found != allocators.end()) replaced.push_back(found->second.release());
    auto* pool = new Pool(below);
    allocators[key] = unique_ptr<Allocator>(pool);
    pools.push_back(pool);
    return pool;
}

Pool* pool_of(Allocator* allocator) {
    for (auto* pool : pools)
        if (pool == allocator) return pool;
    return nullptr;
}

// The pool that the next execution allocates from, or nullptr if Jittor's flags choose another.
Pool* active() { return pool_of(get_allocator()); }

bool is_view(Op* op) {
    const std::string name = op->name();
    return name == "clone" || name == "reshape" || name == "tape";
}

// A view allocates nothing; the tensor behind it will.
void expect(Var* var, int category) {
    while (true) {
        expectations.category_by_node[var->id] = category;
        Op* op = var->input();
        if (!op || !is_view(op) || op->inputs().size() == 0) return;
        var = op->inputs().front();
        if (var->mem_ptr) return;
    }
}

}  // namespace
}  // namespace jittor

using namespace jittor;

extern "C" {

// Puts the counting pools in place; some_var is the address of any Var.
// Returns 1, or 0 where Jittor's pool is not the one in use (its flags choose another).
int xmem_jittor_install(long long some_var, int activation) {
    if (pools.empty()) {
        memcpy(&var_vtable, (void*)some_var, sizeof(var_vtable));
        expectations.activation = activation;
        install((Allocator*)&aligned_allocator);
#ifdef HAS_CUDA
        install((Allocator*)&cuda_host_allocator);
        install((Allocator*)&cuda_device_allocator);
#endif
#ifdef HAS_CUDA
        auto use_cuda_before = use_cuda;
        use_cuda = 0;
        cpu_allocator = get_allocator();
        use_cuda = use_cuda_before;
#else
        cpu_allocator = get_allocator();
#endif
    }
    return active() != nullptr;
}

// current, peak, reserved, peak reserved, allocations, refused
int xmem_jittor_counters(long long* out) {
    auto* pool = active();
    if (!pool) return 0;
    out[0] = pool->current;
    out[1] = pool->peak;
    out[2] = pool->segments.reserved;
    out[3] = pool->segments.peak_reserved;
    out[4] = pool->births;
    out[5] = pool->refused;
    return 1;
}

void xmem_jittor_reset_peak() {
    for (auto* pool : pools) pool->reset_peak();
}

// Negative: no limit.
void xmem_jittor_set_limit(long long bytes) {
    for (auto* pool : pools) pool->limit = -1;
    if (auto* pool = active()) pool->limit = bytes;
}

// out: distinct allocations that now carry the category, their bytes, bytes of other allocators
void xmem_jittor_tag(const long long* vars, int count, int category, long long* out) {
    out[0] = out[1] = out[2] = 0;
    std::unordered_set<void*> foreign;
    std::unordered_set<size_t> ours;
    for (int i = 0; i < count; i++) {
        auto* var = (Var*)vars[i];
        if (!var->mem_ptr) {
            expect(var, category);
            continue;
        }
        auto* pool = pool_of(var->allocator);
        if (!pool) {
            if (foreign.insert(var->mem_ptr).second) out[2] += var->size;
            continue;
        }
        if (!ours.insert(var->allocation).second) continue;  // ids are unique among pools
        auto& record = pool->records[var->allocation];
        pool->move(record, category);
        out[0]++;
        out[1] += record.requested;
    }
}

void xmem_jittor_tag_unclaimed(int category) {
    for (auto* pool : pools) pool->move_unclaimed(category, 0);
}

void xmem_jittor_peak_by_category(long long* out, int count) {
    auto* pool = active();
    for (int i = 0; i < count && i < kCategories; i++) out[i] = pool ? pool->at_peak[i] : 0;
}

// All nodes made so far are forward; the next tensor that is younger begins backward.
void xmem_jittor_mark_backward() { expectations.backward_marks.push_back(total_node); }

// Tensors that are not computed yet carry the category from their birth on.
void xmem_jittor_expect(const long long* vars, int count, int category) {
    for (int i = 0; i < count; i++)
        if (!((Var*)vars[i])->mem_ptr) expect((Var*)vars[i], category);
}

void xmem_jittor_forget_expectations() {
    expectations.backward_marks.clear();
    expectations.category_by_node.clear();
}

namespace {
struct Note {
    int64 bytes = 0;
    double seconds = 0;
} notes[2];
}  // namespace

// Called by an operation while a graph runs: notes what is allocated, and the time.
void xmem_jittor_note(long long which) {
    auto* pool = active();
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    notes[which & 1] = {pool ? pool->current : 0, std::chrono::duration<double>(now).count()};
}

// The bytes at the second note, and the seconds between the two.
long long xmem_jittor_noted(double* seconds) {
    *seconds = notes[1].seconds - notes[0].seconds;
    return notes[1].bytes;
}

namespace {
struct Entry {
    int64 which, bytes, peak;
    double seconds;
};
std::vector<Entry> entries;
}  // namespace

// Called by an operation while a graph runs: enters into the log what is allocated, the most since
// the entry before, and the time.
void xmem_jittor_enter(long long which) {
    auto* pool = active();
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    double seconds = std::chrono::duration<double>(now).count();
    entries.push_back({which, pool ? pool->current : 0, pool ? pool->entry_peak : 0, seconds});
    if (pool) pool->entry_peak = pool->current;
}

// How many entries there are; of those from `first` on at most `capacity` are written, three
// numbers (which, bytes, peak) and the seconds of each.
int xmem_jittor_entries(int first, int capacity, long long* numbers, double* seconds) {
    const int count = entries.size();
    for (int i = first; i < count && i < first + capacity; i++) {
        auto& entry = entries[i];
        *numbers++ = entry.which;
        *numbers++ = entry.bytes;
        *numbers++ = entry.peak;
        *seconds++ = entry.seconds;
    }
    return count;
}

void xmem_jittor_forget_entries() { entries.clear(); }

// Bytes of the distinct allocations behind Vars.
long long xmem_jittor_bytes_of(const long long* vars, int count) {
    std::unordered_set<size_t> seen;
    int64 total = 0;
    for (int i = 0; i < count; i++) {
        auto* var = (Var*)vars[i];
        auto* pool = var->mem_ptr ? pool_of(var->allocator) : nullptr;
        if (pool && seen.insert(var->allocation).second)
            total += pool->records[var->allocation].requested;
    }
    return total;
}

// The sum over everything that Python's handles reach, counted by allocation: for tests.
long long xmem_jittor_reachable_bytes() {
    vector<Node*> nodes;
    auto tag = ++tflag_count;
    for (auto& holder : hold_vars)
        if (holder->var->tflag != tag) {
            holder->var->tflag = tag;
            nodes.push_back(holder->var);
        }
    bfs_both(nodes, [](Node*) { return true; });
    std::unordered_set<size_t> seen;
    int64 total = 0;
    for (auto* node : nodes) {
        if (!node->is_var()) continue;
        auto* var = (Var*)node;
        if (!var->mem_ptr) continue;
        auto* pool = pool_of(var->allocator);
        if (pool && seen.insert(var->allocation).second)
            total += pool->records[var->allocation].requested;
    }
    return total;
}
}
