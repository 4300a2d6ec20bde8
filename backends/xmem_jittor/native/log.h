// Notes that operations make while a graph runs: bytes and times in the order of execution.
#pragma once
#include <chrono>

#include "installed.h"

using namespace jittor;

extern "C" {

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
}
