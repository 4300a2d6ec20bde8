// A subclass of Jittor's SFRL pool that counts exactly, refuses beyond a limit, and tells.
//
// Counted are requested bytes, by allocation and not by tensor: views share an allocation, and
// the tensor that is freed last may be a smaller view.
#pragma once
#include <memory>
#include <mutex>

#include "beneath.h"
#include "blocks.h"
#include "history.h"
#include "late.h"
#include "orphans.h"
#include "records.h"

namespace jittor {
namespace {

// One for all pools: a pool that finds no memory collects the caches of the others. Recursive,
// since that comes back to itself. Held over a fork, so that a child never inherits it locked.
std::recursive_mutex guard;
using Lock = std::lock_guard<std::recursive_mutex>;

constexpr size_t kRefusalBlocks = 256;
// One part in so many of the limit leaves beyond what is missing (xmem.offload.adaptive.MARGIN).
constexpr int64 kLateMargin = 64;
// Jittor's own block size of a CPU (sfrl_allocator.cc), which is compiled in there.
constexpr int64 kLargeBlock = 5242880;

// A refused request, as everything was at that instant.
struct Refusal {
    int64 requested = 0, allocated = 0, reserved = 0, limit = -1, largest_free = 0, node = 0;
    int64 in_backward = -1;  // -1: nobody marks where backward begins
    int64 by_category[kCategories] = {0};
    std::vector<BlockRow> blocks;
};

struct Pool final : SFRLAllocator {
    Segments segments;
    std::vector<Record> records;  // by allocation id
    int64 now[kCategories] = {0}, at_peak[kCategories] = {0};
    int64 current = 0, peak = 0, limit = -1;
    int64 entry_peak = 0;  // since the last entry of the log
    int64 births = 0, frees = 0, peak_birth = 0, reset_birth = 0, refused = 0;
    int64 large_block = kLargeBlock;
    std::unique_ptr<Refusal> refusal;
    History history;

    explicit Pool(Allocator* below) : segments(below) { setup(&segments); }

    void* alloc(size_t size, size_t& allocation) override {
        Lock lock(guard);
        Var* var = var_behind(allocation, size);
        const int64 node = var ? var->id : total_node;
        if (limit >= 0 && current + (int64)size > limit)
            late_make_room(current + (int64)size - limit + limit / kLateMargin);
        if (limit >= 0 && current + (int64)size > limit) {
            refuse(size, node, limit);
            throw std::runtime_error("out of memory: " + std::to_string(size) +
                                     " bytes requested, " + std::to_string(current) +
                                     " allocated, limit " + std::to_string(limit) +
                                     late_words());
        }
        if (!segments.is_cuda()) widen(size);
        void* memory = nullptr;
        while (!memory) {
            try {
                memory = SFRLAllocator::alloc(size, allocation);
            } catch (...) {
                if (late_make_room(size) > 0) continue;
                refuse(size, node, -1);
                throw;
            }
        }
        if (var) pass_marks(var);
        remember(size, allocation, node, var != nullptr);
        return memory;
    }

    void free(void* memory, size_t size, const size_t& allocation) override {
        Lock lock(guard);
        const size_t id = allocation;
        SFRLAllocator::free(memory, size, id);
        if (behind(id)) return;  // only one of several references went away
        if (!late.noted.empty()) late_freed(id);
        auto& record = records[id];
        record.live = false;
        frees++;
        current -= record.requested;
        now[record.category] -= record.requested;
        history.add(point());
    }

    void gc() override {
        Lock lock(guard);
        SFRLAllocator::gc();
    }

    Point point() const { return {births + frees, current, segments.reserved}; }

    void remember(size_t size, size_t id, int64 node, bool is_known) {
        if (id >= records.size()) records.resize(2 * id + 1024);
        int category = kTemporary;
        if (is_known && !expectations.category_by_node.empty()) {
            auto found = expectations.category_by_node.find(node);
            if (found != expectations.category_by_node.end()) {
                category = found->second;
                expectations.category_by_node.erase(found);
            }
        }
        records[id] = Record{(int64)size, ++births, node, category, true};
        current += size;
        now[category] += size;
        entry_peak = std::max(entry_peak, current);
        if (current > peak) take_picture();
        history.add(point());
    }

    void refuse(int64 size, int64 node, int64 passed) {
        refused++;
        refusal.reset(new Refusal);
        refusal->requested = size;
        refusal->allocated = current;
        refusal->reserved = segments.reserved;
        refusal->limit = passed;
        refusal->largest_free = largest_free(*this);
        refusal->node = node;
        if (expectations.last_mark >= 0) refusal->in_backward = node > expectations.last_mark;
        memcpy(refusal->by_category, now, sizeof(now));
        refusal->blocks = largest_live(records, kRefusalBlocks);
        unlink_orphan();
    }

    // Has what follows cut from a piece of the size that was set, where it needs a new one.
    void widen(size_t size) {
        if (large_block <= kLargeBlock) return;
        size = align_size(size);
        if (size <= SMALL_BLOCK_SIZE || (int64)size > large_block) return;
        if (largest_free(*this) < (int64)size) preallocate(large_block);
    }

    // A free piece of this size, taken and given back; false where there is no memory for it.
    bool preallocate(size_t size) {
        size_t id = 0;
        try {
            void* memory = SFRLAllocator::alloc(size, id);
            SFRLAllocator::free(memory, size, id);
        } catch (const std::exception&) {
            return false;
        }
        return true;
    }

    void take_picture() {
        peak = current;
        peak_birth = births;
        memcpy(at_peak, now, sizeof(now));
    }

    void reset_peak() {
        Lock lock(guard);
        take_picture();
        reset_birth = births;
        segments.peak_reserved = segments.reserved;
        history.restart(point());
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

}  // namespace
}  // namespace jittor
