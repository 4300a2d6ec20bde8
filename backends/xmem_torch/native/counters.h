// The counters, and the categories of what is alive. The counters by category at the last peak can
// be corrected afterwards: a block that is alive now and was born before the peak was alive at the
// peak, so giving it a category moves its bytes in the peak's breakdown too.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.h"
#include "history.h"

namespace xmem_torch {

struct Counters {
  Block live{};  // head of the ring of live blocks
  int64_t current = 0, peak = 0;
  int64_t highest = 0;  // of current, since use or the last trim
  // Segments as they came from the system, headers and what is free in them included.
  int64_t reserved = 0, peak_reserved = 0, segments = 0;
  int64_t allocations = 0, frees = 0, refused = 0, retries = 0;
  uint64_t serial = 0, peak_serial = 0, reset_serial = 0;
  int64_t by_category[kCategories] = {}, peak_by_category[kCategories] = {};
  History history;

  Counters() {
    live.previous = live.next = &live;
    history.restart({0, 0, 0});
  }

  Point now() const { return {allocations + frees, current, reserved}; }

  void enlist(Block* block, int64_t bytes) {
    block->bytes = bytes;
    block->serial = ++serial;
    block->category = 0;
    block->live = true;
    block->next = live.next;
    block->previous = &live;
    live.next->previous = block;
    live.next = block;
    ++allocations;
    current += bytes;
    by_category[0] += bytes;
    if (current > peak) note_peak();
    if (current > highest) highest = current;
    history.add(now());
  }

  void unlist(Block* block) {
    block->previous->next = block->next;
    block->next->previous = block->previous;
    current -= block->bytes;
    by_category[block->category] -= block->bytes;
    ++frees;
    block->bytes = 0;
    block->serial = 0;
    block->live = false;
    history.add(now());
  }

  void reserve(int64_t size) {
    ++segments;
    reserved += size;
    if (reserved > peak_reserved) peak_reserved = reserved;
  }

  void unreserve(int64_t size) {
    --segments;
    reserved -= size;
  }

  void note_peak() {
    peak = current;
    peak_serial = serial;
    std::memcpy(peak_by_category, by_category, sizeof(by_category));
  }

  void reset_peak() {
    note_peak();
    reset_serial = serial;
    peak_reserved = reserved;
    history.restart(now());
  }

  void set_category(Block* block, uint8_t category) {
    by_category[block->category] -= block->bytes;
    by_category[category] += block->bytes;
    if (block->serial <= peak_serial) {
      peak_by_category[block->category] -= block->bytes;
      peak_by_category[category] += block->bytes;
    }
    block->category = category;
  }
};

}  // namespace xmem_torch
