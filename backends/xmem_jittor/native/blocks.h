// What Jittor's SFRL pool holds: its segments, each a chain of blocks, live or free.
#pragma once
#include <algorithm>
#include <unordered_set>
#include <vector>

#include "mem/allocator/sfrl_allocator.h"
#include "records.h"

namespace jittor {
namespace {

constexpr int kFree = -1;

struct BlockRow {
    int64 segment, address, size, requested, category, node;
};

template <class Visit>
void for_each_free(SFRLAllocator& pool, Visit visit) {
    for (auto* blocks : {&pool.small_blocks, &pool.large_blocks})
        for (auto& item : blocks->blocks) visit(item.second);
}

// The largest request that can be met without new memory.
int64 largest_free(SFRLAllocator& pool) {
    for (auto* blocks : {&pool.large_blocks, &pool.small_blocks})
        if (!blocks->blocks.empty()) return blocks->blocks.rbegin()->second->size;
    return 0;
}

CachingBlock* behind(size_t id) { return CachingBlockPool::occupied_id_mapper[id]; }

BlockRow row_of(CachingBlock* block, const Record* record) {
    BlockRow row{0, (int64)block->memory_ptr, (int64)block->size, 0, kFree, 0};
    if (record) {
        row.requested = record->requested;
        row.category = record->category;
        row.node = record->node;
    }
    return row;
}

// Every block, by address, with the address of its segment.
std::vector<BlockRow> list_blocks(SFRLAllocator& pool, const std::vector<Record>& records) {
    std::vector<BlockRow> rows;
    auto add = [&](CachingBlock* block, const Record* record) {
        auto row = row_of(block, record);
        while (block->prev) block = block->prev;
        row.segment = (int64)block->memory_ptr;
        rows.push_back(row);
    };
    for (size_t id = 0; id < records.size(); id++)
        if (records[id].live) add(behind(id), &records[id]);
    for_each_free(pool, [&](CachingBlock* block) { add(block, nullptr); });
    // An empty tensor's block has no bytes, and the address of the block behind it.
    std::sort(rows.begin(), rows.end(), [](const BlockRow& a, const BlockRow& b) {
        return a.address != b.address ? a.address < b.address : a.size < b.size;
    });
    return rows;
}

// The largest live blocks, largest first.
std::vector<BlockRow> largest_live(const std::vector<Record>& records, size_t most) {
    std::vector<size_t> ids;
    for (size_t id = 0; id < records.size(); id++)
        if (records[id].live) ids.push_back(id);
    const size_t count = std::min(most, ids.size());
    std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](size_t a, size_t b) {
        auto &first = records[a], &second = records[b];
        if (first.requested != second.requested) return first.requested > second.requested;
        return first.birth < second.birth;
    });
    std::vector<BlockRow> rows;
    for (size_t i = 0; i < count; i++) rows.push_back(row_of(behind(ids[i]), &records[ids[i]]));
    return rows;
}

}  // namespace
}  // namespace jittor
