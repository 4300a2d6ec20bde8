// Lets an operation write into the memory of what it reads, where nobody else would notice
// (Jittor 1.3.11).
//
// Jittor's tensors are values: a view, a snapshot or a graph that is kept reads what a parameter was,
// also after its update. So whether an update may happen in place is decided when it runs, and where
// anything else can still read the old value, the new one gets memory of its own.
#include <cstring>

#include "mem/allocator/sfrl_allocator.h"
#include "op.h"
#include "var.h"

using namespace jittor;

namespace {

long long in_place = 0, copied = 0;

// Whether the operation that makes `after` is the last one that can read `before`.
//
// Readers that have not run, graphs that are kept for another backward and handles in Python keep a
// tensor alive, each by one; views that are there share its memory.
bool is_last(Var* before, Var* after) {
    auto* pool = dynamic_cast<SFRLAllocator*>(after->allocator);
    if (!pool || after->mem_ptr != before->mem_ptr) return false;
    if (CachingBlockPool::occupied_id_mapper[after->allocation]->share_times != 1) return false;
    int own = 0;
    for (auto& reader : before->_outputs) own += reader.node == after->input();
    return before->backward_liveness <= own;
}

}  // namespace

extern "C" {

// Called by an operation whose output `after` was made to share the memory of its input `before`,
// before it writes: afterwards `after` holds the value of `before`, in memory that it may write to.
void xmem_jittor_donate(Var* before, Var* after) {
    if (is_last(before, after)) {
        in_place++;
        return;
    }
    if (after->mem_ptr == before->mem_ptr) {
        auto* allocator = after->allocator;
        allocator->free(after->mem_ptr, after->size, after->allocation);
        after->mem_ptr = nullptr;
        after->allocator = nullptr;
        after->allocation = 0;
        after->alloc(allocator);
    }
    std::memcpy(after->mem_ptr, before->mem_ptr, after->size);
    copied++;
}

// How many tensors were updated in place, and how many had to be copied.
void xmem_jittor_donated(long long* found) {
    found[0] = in_place;
    found[1] = copied;
}
}
