// Checks everything that must hold between the counters, the segments and the bins.
#pragma once

#include <cstdint>

#include "state.h"

namespace xmem_torch {

// Returns 0, or the number of the first rule that is broken.
inline int check(State& s) {
  const Counters& c = s.counters;
  int64_t current = 0, by_category[kCategories] = {};
  for (Block* b = c.live.next; b != &c.live; b = b->next) {
    if (!b->live || b->next->previous != b) return 1;
    current += b->bytes;
    by_category[b->category] += b->bytes;
  }
  if (current != c.current) return 2;
  for (int i = 0; i < kCategories; ++i)
    if (by_category[i] != c.by_category[i]) return 3;

  int broken = 0;
  int64_t binned[kKinds] = {}, whole[kKinds] = {};
  for (Kind kind : {kSizeClass, kBfc}) {
    s.pool.bins(kind).descend([&](Block* b) {
      if (b->live || b->kind != kind || b->bytes != 0) broken = 4;
      binned[kind] += b->size;
      if (b->whole()) whole[kind] += b->size;
      return broken == 0;
    });
    if (broken != 0) return broken;
    if (binned[kind] != s.pool.bins(kind).bytes()) return 5;
    if (whole[kind] != s.pool.bins(kind).whole_bytes()) return 6;
  }

  int64_t reserved = 0, segments = 0, in_segments = 0, free_bytes = 0;
  s.each_segment([&](Block* first) {
    ++segments;
    for (Block* b = first; b != nullptr; b = b->right) {
      reserved += b->size;
      if (b->live) {
        in_segments += b->bytes;
        if (b->bytes + kHeader > b->size) broken = 7;
      } else {
        free_bytes += b->size;
        if (b->right != nullptr && !b->right->live) broken = 8;  // not coalesced
      }
      if (b->right == nullptr) continue;
      if (b->right->left != b || b->right->kind != b->kind) broken = 9;
      if (reinterpret_cast<char*>(b) + b->size != reinterpret_cast<char*>(b->right)) broken = 10;
    }
  });
  if (broken != 0) return broken;
  if (segments != c.segments) return 11;
  if (reserved != c.reserved) return 12;
  if (in_segments != c.current) return 13;
  if (free_bytes != s.pool.cached()) return 14;
  const int64_t bound = s.pool.settings.cache_limit_bytes;
  if (bound != kNoLimit && s.pool.cached() > bound && whole[kSizeClass] + whole[kBfc] > 0) return 15;
  return 0;
}

}  // namespace xmem_torch
