// Exact byte counts for Jittor 1.3.11, and control: a subclass of its pool, put where the pool was.
//
// installed.h puts it there, pool.h is it; control.h sets and tells, log.h is for profiles.
#include <cstring>
#include "control.h"
#include "installed.h"
#include "log.h"

using namespace jittor;

extern "C" {

// Puts the counting pools in place; some_var is the address of any Var.
// Returns 1, or 0 where Jittor's pool is not the one in use (its flags choose another).
int xmem_jittor_install(long long some_var, int activation) {
    if (pools.empty()) {
#ifndef _WIN32
        pthread_atfork(lock_before_fork, unlock_after_fork, renew_in_child);
#endif
        memcpy(&var_vtable, (void*)some_var, sizeof(var_vtable));
        expectations.activation = activation;
        install((Allocator*)&aligned_allocator);
#ifdef HAS_CUDA
        install((Allocator*)&cuda_host_allocator);
        install((Allocator*)&cuda_device_allocator);
        install((Allocator*)&cuda_managed_allocator);
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
        if (!pool && !std::strcmp(var->allocator->name(), "xmem_streamed")) {
            expect(var, category);  // it lies in a depot (streaming.cc) and comes later
            continue;
        }
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
void xmem_jittor_mark_backward() {
    expectations.backward_marks.push_back(total_node);
    expectations.last_mark = total_node;
}

// Tensors that are not computed yet carry the category from their birth on.
void xmem_jittor_expect(const long long* vars, int count, int category) {
    for (int i = 0; i < count; i++)
        if (!((Var*)vars[i])->mem_ptr) expect((Var*)vars[i], category);
}

void xmem_jittor_forget_expectations() {
    expectations.last_mark = -1;
    expectations.backward_marks.clear();
    expectations.category_by_node.clear();
}

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
