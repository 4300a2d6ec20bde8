// What xmem.pool asks of the pool that is in use.
//
// Called through ctypes, so nothing may be thrown out of here.
#pragma once
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "installed.h"

using namespace jittor;

namespace {

int write_rows(const std::vector<BlockRow>& rows, int capacity, long long* out) {
    const int count = rows.size();
    for (int i = 0; i < count && i < capacity; i++) {
        auto& row = rows[i];
        for (int64 value :
             {row.segment, row.address, row.size, row.requested, row.category, row.node})
            *out++ = value;
    }
    return count;
}

// Also the caches of other pools, and of those that were there before ours.
void give_back_all() {
    gc_all();
    for (auto* old : replaced) old->gc();
#ifdef __GLIBC__
    malloc_trim(0);  // small segments come from the heap, which keeps what is freed
#endif
}

}  // namespace

extern "C" {

// allocated, peak, reserved, peak reserved, segments, segments ever, allocations, frees,
// free blocks, largest free, refused, limit
int xmem_jittor_pool_stats(long long* out) {
    Lock lock(guard);
    auto* pool = active();
    if (!pool) return 0;
    auto& segments = pool->segments;
    const int64 free_blocks = pool->small_blocks.blocks.size() + pool->large_blocks.blocks.size();
    for (int64 value :
         {pool->current, pool->peak, segments.reserved, segments.peak_reserved, segments.held,
          segments.obtained, pool->births, pool->frees, free_blocks, largest_free(*pool),
          pool->refused, pool->limit})
        *out++ = value;
    return 1;
}

// How many blocks there are; of at most `capacity` six numbers each: the address of the segment,
// address, size, requested, category (-1: free), node.
int xmem_jittor_segments(int capacity, long long* out) {
    Lock lock(guard);
    auto* pool = active();
    return pool ? write_rows(list_blocks(*pool, pool->records), capacity, out) : 0;
}

// How many points; of at most `capacity` three numbers each: event, allocated, reserved.
int xmem_jittor_history(int capacity, long long* out) {
    Lock lock(guard);
    auto* pool = active();
    if (!pool) return 0;
    auto points = pool->history.read();
    const int count = points.size();
    for (int i = 0; i < count && i < capacity; i++)
        for (int64 value : {points[i].event, points[i].allocated, points[i].reserved})
            *out++ = value;
    return count;
}

// The latest refused request: requested, allocated, reserved, limit (-1: the system's), largest
// free, node, in backward (-1: unknown); bytes by category; rows of at most `capacity` blocks.
// Returns how many blocks were written, or -1 where nothing was refused.
int xmem_jittor_refusal(long long* out, long long* by_category, int categories, int capacity,
                        long long* blocks) {
    Lock lock(guard);
    auto* pool = active();
    if (!pool || !pool->refusal) return -1;
    auto& refusal = *pool->refusal;
    for (int64 value : {refusal.requested, refusal.allocated, refusal.reserved, refusal.limit,
                        refusal.largest_free, refusal.node, refusal.in_backward})
        *out++ = value;
    for (int i = 0; i < categories && i < kCategories; i++)
        by_category[i] = refusal.by_category[i];
    return std::min(write_rows(refusal.blocks, capacity, blocks), capacity);
}

// Gives back what no tensor holds; returns by how much the pool in use shrank.
long long xmem_jittor_trim() {
    Lock lock(guard);
    auto* pool = active();
    const int64 before = pool ? pool->segments.reserved : 0;
    give_back_all();
    return pool ? before - pool->segments.reserved : 0;
}

// Returns what the pool took anew, or -1 where there is no memory for it.
long long xmem_jittor_preallocate(long long bytes) {
    Lock lock(guard);
    auto* pool = active();
    if (!pool) return -1;
    const int64 before = pool->segments.reserved;
    if (largest_free(*pool) >= (int64)pool->align_size(bytes)) return 0;
    if (!pool->preallocate(bytes)) return -1;
    return pool->segments.reserved - before;
}

// The address of the class jt.Var; see orphans.h.
void xmem_jittor_know_holders(long long type) { holder_type = (const void*)type; }

void xmem_jittor_release_orphans() { release_orphans(); }

// Settings of all pools; negative leaves one as it is.
void xmem_jittor_set_pool(double free_ratio, double min_free, long long large_block,
                          int huge_pages) {
    Lock lock(guard);
    for (auto* pool : pools) {
        if (free_ratio >= 0) pool->free_ratio = free_ratio;
        if (min_free >= 0) pool->min_free_size = min_free;
        if (large_block >= 0) pool->large_block = large_block;
        if (huge_pages >= 0) pool->segments.huge_pages = huge_pages;
    }
}

// free ratio, least free size, large block, huge pages
int xmem_jittor_pool_settings(double* out) {
    auto* pool = active();
    if (!pool) return 0;
    out[0] = pool->free_ratio;
    out[1] = pool->min_free_size;
    out[2] = pool->large_block;
    out[3] = pool->segments.huge_pages;
    return 1;
}

// Functions of the library of depots.
void xmem_jittor_late_calls(long long put, long long get, long long drop) {
    late.calls = {(decltype(DepotCalls::put))put, (decltype(DepotCalls::get))get,
                  (decltype(DepotCalls::drop))drop};
}

// Returns the index of a depot; 0: closes the one with an index, which nothing may lie in.
int xmem_jittor_late_depot(long long depot, int index) {
    Lock lock(guard);
    if (!depot) {
        late.depots[index] = nullptr;
        return index;
    }
    late.depots.push_back((void*)depot);
    return late.depots.size() - 1;
}

// Whether anything may be moved from now on; what is away comes back all the same.
void xmem_jittor_late_allow(int may_move) {
    Lock lock(guard);
    late.may_move = may_move;
    late.failure = 0;
}

// How many pieces of memory are noted, and away; bytes that have been stored; errno of a failure.
void xmem_jittor_late_stats(long long* out) {
    Lock lock(guard);
    const int64 values[] = {(int64)late.noted.size(), late.left, late.moved, late.failure};
    memcpy(out, values, sizeof(values));
}

// How often bytes did not come back; of the last time: code, bytes, depot.
void xmem_jittor_late_missed(long long* out) {
    Lock lock(guard);
    memcpy(out, late.missed, sizeof(late.missed));
}

// How many pieces are noted for a depot.
int xmem_jittor_late_users(int depot) {
    Lock lock(guard);
    int count = 0;
    for (auto& [number, noted] : late.noted) count += noted.depot == depot;
    return count;
}

// Called by an operation: forward has read the tensor, whose memory may leave until its ticket is
// given to `xmem_jittor_late_back`.
void xmem_jittor_late_note(Var* ticket, Var* view, int depot) {
    Lock lock(guard);
    if (!late.may_move || !view->mem_ptr || !late.depots[depot]) return;
    auto* pool = pool_of(view->allocator);
    if (!pool || pool->segments.is_cuda() || pool_of(ticket->allocator) != pool) return;
    auto known = late.by_allocation.find(view->allocation);
    int64 number = known == late.by_allocation.end() ? ++late.count : known->second;
    auto ticketed = late.by_ticket.find(ticket->allocation);
    if (ticketed != late.by_ticket.end() && ticketed->second != number) return;
    auto& noted = late.noted[number];
    if (noted.views.empty()) {
        noted.size = 0;
        noted.holds = pool->records[view->allocation].requested;
        noted.depot = depot;
        noted.allocation = view->allocation;
        late.by_allocation[view->allocation] = number;
    }
    if (view->size > noted.size) {
        noted.size = view->size;
        noted.stored = false;
    }
    noted.order = ++late.count;
    noted.views.push_back({ticket->allocation, view});
    late.by_ticket[ticket->allocation] = number;
}

// Called by an operation: backward is about to read the tensors of a ticket.
void xmem_jittor_late_back(Var* ticket) {
    Lock lock(guard);
    auto known = late.by_ticket.find(ticket->allocation);
    if (known == late.by_ticket.end()) return;
    const int64 number = known->second;
    auto& noted = late.noted[number];
    if (noted.away) {
        Var* first = noted.views[0].second;
        auto* pool = pool_of(ticket->allocator);
        size_t allocation = 0;
        void* memory = pool->alloc(noted.size, allocation);
        const int code = late.calls.get(late.depots[noted.depot], number, memory, noted.size);
        if (code) {
            pool->free(memory, noted.size, allocation);
            const int64 values[] = {late.missed[0] + 1, code, noted.size,
                                    (int64)late.depots[noted.depot]};
            memcpy(late.missed, values, sizeof(values));
            throw std::runtime_error("xmem offload: " + std::to_string(noted.size) +
                                     " bytes could not be read back");
        }
        for (auto& [_, view] : noted.views) {
            if (view != first) pool->share_with(view->size, allocation);
            view->mem_ptr = memory;
            view->allocator = pool;
            view->allocation = allocation;
        }
        noted.away = false;
        noted.holds = noted.size;
        noted.allocation = allocation;
        late.left--;
        late.by_allocation[allocation] = number;
    }
    end_ticket(ticket->allocation);
}
}
