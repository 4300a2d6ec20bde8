// The pool: where a request's block comes from, and what becomes of a freed one. All of it under
// the lock of the State, but for what the system is asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "bins.h"
#include "block.h"
#include "counters.h"
#include "memory.h"

namespace xmem_torch {

constexpr int64_t kNoLimit = -1;
constexpr int64_t kSmallestRest = 4096;  // smaller rests stay with the block that they follow

struct Settings {
  Kind strategy = kPassthrough;
  int64_t segment_bytes = int64_t{2} << 20;   // bfc: what is asked of the system at least
  int64_t reserve_per_mille = 1150;           // bfc: reserved to the most that was live; 0: any
  int64_t min_cached_bytes = 0;               // smaller requests pass through
  int64_t cache_limit_bytes = kNoLimit;
  int64_t divisions = 8;                      // size_class: classes for each power of two
  int64_t slack_per_mille = 250;              // size_class: how much larger a block may be
  bool huge_pages = false;
};

// What to ask the system for.
struct Want {
  int64_t size;
  Kind kind;
  Origin origin;
  bool huge;
};

class Pool {
 public:
  Settings settings;
  bool in_use = true;  // else nobody would take what is kept

  explicit Pool(Counters& counters) : counters_(counters) {}

  int64_t cached() const { return bins_[kSizeClass].bytes() + bins_[kBfc].bytes(); }
  // The largest request that can be met from what is held.
  int64_t largest_free() const {
    if (settings.strategy == kPassthrough) return 0;
    const int64_t bytes = bins_[settings.strategy].largest_size() - kHeader;
    return kind_for(bytes) == kPassthrough ? 0 : std::max<int64_t>(bytes, 0);
  }
  const Bins& bins(Kind kind) const { return bins_[kind]; }

  // Returns a block that was free, or nothing.
  Block* take(int64_t bytes) {
    const Kind kind = kind_for(bytes);
    if (kind == kPassthrough) return nullptr;
    const int64_t size = kind == kBfc ? size_for(bytes) : class_size(bytes);
    Block* block = bins_[kind].smallest(size);
    if (block == nullptr) return nullptr;
    if (kind == kSizeClass && block->size > size + size / 1000 * settings.slack_per_mille)
      return nullptr;
    bins_[kind].remove(block);
    if (kind == kBfc) split(block, size);
    return block;
  }

  // Returns what the system has to give for a request. Where that would reserve more than the
  // limit, or than its share over what was live, cached segments go back first, and the new one is
  // no larger than it must be.
  Want want(int64_t bytes, int64_t limit, bool least, Returned& returned) {
    const Kind kind = kind_for(bytes);
    const int64_t needed = kind == kSizeClass ? class_size(bytes) : size_for(bytes);
    const bool huge = settings.huge_pages && needed >= kHugePage;
    const Origin origin = kind == kPassthrough && !huge ? kHeap : kMapped;
    const int64_t exact = origin == kHeap ? needed : round_up(needed, page_size());
    int64_t size = exact;
    if (kind == kBfc && !least)  // a page more: room for headers, as sizes are powers of two
      size = std::max(size, round_up(settings.segment_bytes, page_size()) + page_size());
    const int64_t most = std::min(limit == kNoLimit ? kAny : limit, share(kind, bytes));
    const int64_t over = counters_.reserved + size - most;
    if (over > 0) {
      shrink(std::max<int64_t>(cached() - over, 0), returned);
      if (counters_.reserved + size > most) size = exact;
    }
    return {size, kind, origin, huge};
  }

  // Takes in a new segment and returns the block that the request gets.
  Block* adopt(Block* segment, int64_t bytes) {
    counters_.reserve(segment->size);
    if (segment->kind == kBfc) split(segment, size_for(bytes));
    return segment;
  }

  // Gives back what must go, or everything, before a free segment comes; says whether that may be
  // cached at all.
  bool make_room(int64_t size, bool everything, Returned& returned) {
    const int64_t bound = settings.cache_limit_bytes;
    if (bound != kNoLimit && size > bound) return false;
    if (everything || bound != kNoLimit) shrink(everything ? 0 : bound - size, returned);
    return true;
  }

  // Takes in a new segment that is free.
  void adopt_free(Block* segment, Returned& returned) {
    counters_.reserve(segment->size);
    bins_[segment->kind].insert(segment);
    keep_to_bound(returned);
  }

  void give_back(Block* block, Returned& returned) {
    if (block->kind == kPassthrough) {
      counters_.unreserve(block->size);
      returned.add(block);
      return;
    }
    if (block->right != nullptr && !block->right->live) {
      bins_[kBfc].remove(block->right);
      swallow_right(block);
    }
    if (block->left != nullptr && !block->left->live) {
      block = block->left;
      bins_[kBfc].remove(block);
      swallow_right(block);
    }
    bins_[block->kind].insert(block);
    if (block->kind != settings.strategy || !in_use)
      drop_if_whole(block, returned);
    else
      keep_to_bound(returned);
  }

  // Gives whole free segments back to the system, largest first, until no more than `keep` bytes
  // are cached. Returns their bytes.
  int64_t shrink(int64_t keep, Returned& returned) {
    const int64_t before = counters_.reserved;
    for (Kind kind : {kSizeClass, kBfc})
      bins_[kind].descend([&](Block* block) {
        if (cached() <= keep || bins_[kind].whole_bytes() == 0) return false;
        drop_if_whole(block, returned);
        return true;
      });
    return before - counters_.reserved;
  }

  // What a request takes of a size class: so many whole pages behind a power of two. A class is its
  // own class, or what is freed would not fit again.
  int64_t class_size(int64_t bytes) const {
    const int64_t size = size_for(bytes);
    if (size <= page_size()) return page_size();
    const int64_t power = int64_t{1} << (63 - __builtin_clzll(static_cast<uint64_t>(size)));
    const int64_t step = round_up(power / settings.divisions, page_size());
    return std::min(power + round_up(size - power, step), 2 * power);
  }

 private:
  static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

  // Returns what may be reserved in view of the most that was ever live. Two segments more are
  // always allowed: the first ones could not be cut up otherwise.
  int64_t share(Kind kind, int64_t bytes) const {
    if (kind != kBfc || settings.reserve_per_mille == 0) return kAny;
    const int64_t highest = std::max(counters_.highest, counters_.current + bytes);
    return std::max(highest / 1000 * settings.reserve_per_mille,
                    highest + 2 * settings.segment_bytes);
  }

  Kind kind_for(int64_t bytes) const {
    return bytes < settings.min_cached_bytes ? kPassthrough : settings.strategy;
  }

  void keep_to_bound(Returned& returned) {
    if (settings.cache_limit_bytes != kNoLimit) shrink(settings.cache_limit_bytes, returned);
  }

  void split(Block* block, int64_t size) {
    const int64_t rest = block->size - size;
    if (rest < kSmallestRest) return;
    auto* tail = new (reinterpret_cast<char*>(block) + size) Block{
        0, rest, 0, nullptr, nullptr, block, block->right, 0, kBfc, block->origin, false};
    if (tail->right != nullptr) tail->right->left = tail;
    block->right = tail;
    block->size = size;
    bins_[kBfc].insert(tail);
  }

  // Joins a block with its right neighbour; neither is in a bin.
  void swallow_right(Block* block) {
    Block* right = block->right;
    block->size += right->size;
    block->right = right->right;
    if (block->right != nullptr) block->right->left = block;
  }

  void drop_if_whole(Block* block, Returned& returned) {
    if (!block->whole()) return;
    bins_[block->kind].remove(block);
    counters_.unreserve(block->size);
    returned.add(block);
  }

  Counters& counters_;
  Bins bins_[kKinds];
};

}  // namespace xmem_torch
