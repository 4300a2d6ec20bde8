// Calls of all ranks: messages between pairs of them, in pieces.
//
// MPI's own collective operations know neither a deadline nor who is late, take temporary memory of
// the tensor's size, and round halves at every step. Here each rank gets its part of a piece from
// all others, combines in the order of ranks, and hands the result out. That sends what a ring
// sends, and is the same to the last bit on all ranks and in every run.
#pragma once

#include <utility>

#include "mpi_calls.h"

namespace xmem {

// Ends a call whose tensor went along.
inline void take_along(const Call& call, const Agreed& agreed, char* out) {
    auto& it = state();
    const int64_t bytes = call.count * dtype_bytes((int)call.dtype);
    if (!bytes) return;
    if (call.kind == BROADCAST) {
        std::memcpy(out, agreed.payload((int)call.peer), bytes);
        return;
    }
    std::vector<const void*> sources;
    for (int rank = 0; rank < it.size; rank++) {
        sources.push_back(agreed.payload(rank));
        if (call.kind == ALL_GATHER) std::memcpy(out + rank * bytes, sources[rank], bytes);
    }
    if (call.kind == ALL_REDUCE)
        combine_any((int)call.dtype, (int)call.op, it.size, sources.data(), out, call.count);
}

inline char* staging(int64_t bytes) {
    auto& kept = state().staging;
    if ((int64_t)kept.size() < bytes) {
        std::vector<char>().swap(kept);
        kept.resize(bytes);
    }
    return kept.data();
}

// Receives a block from every rank and sends one to each; `mine` is not sent.
template <class From, class To>
inline void swap_blocks(const std::string& doing, int tag, int64_t bytes_in, From from, To to) {
    auto& it = state();
    Requests requests(doing);
    for (int step = 1; step < it.size; step++) {
        int source = (it.rank + step) % it.size;
        if (bytes_in) requests.receive(from(source), bytes_in, source, tag, it.shared);
    }
    for (int step = 1; step < it.size; step++) {
        int target = (it.rank + it.size - step) % it.size;
        auto [data, bytes] = to(target);
        if (bytes) requests.send(data, bytes, target, tag, it.shared);
    }
    requests.wait();
}

typedef std::pair<const void*, int64_t> Block;

// Combines the same elements of all ranks: `in(rank)` is what this rank sends to another one.
template <class In>
inline void combine_from_all(
    const Call& call, const std::string& doing, int64_t count, In in, void* target) {
    auto& it = state();
    int64_t bytes = count * dtype_bytes((int)call.dtype);
    char* room = staging(bytes * it.size);
    std::vector<const void*> sources(it.size);
    for (int rank = 0; rank < it.size; rank++) sources[rank] = room + rank * bytes;
    swap_blocks(doing, PAYLOAD, bytes, [&](int rank) { return (void*)sources[rank]; }, in);
    sources[it.rank] = in(it.rank).first;
    if (count) combine_any((int)call.dtype, (int)call.op, it.size, sources.data(), target, count);
}

// The part of `length` elements that a rank combines.
struct Part {
    int64_t first, count;
    Part(int64_t length, int rank) {
        int64_t each = (length + state().size - 1) / state().size;
        first = std::min(length, each * rank);
        count = std::min(length, first + each) - first;
    }
};

// owner < 0: the result goes to everyone.
inline void reduce(
    const Call& call, const std::string& doing, const char* in, char* out, int owner) {
    auto& it = state();
    const int64_t unit = dtype_bytes((int)call.dtype), most = std::max<int64_t>(1, PIECE / unit);
    std::vector<char> own_part;
    for (int64_t at = 0; at < call.count; at += most) {
        const int64_t length = std::min(most, call.count - at);
        const char* piece = in + at * unit;
        auto part_of = [&](int rank) {
            Part part(length, rank);
            return Block(piece + part.first * unit, part.count * unit);
        };
        const Part mine(length, it.rank);
        char* found;
        if (owner < 0 || owner == it.rank) {
            found = out + (at + mine.first) * unit;
        } else {
            own_part.resize(mine.count * unit);
            found = own_part.data();
        }
        combine_from_all(call, doing, mine.count, part_of, found);
        Requests requests(doing);
        for (int rank = 0; rank < it.size; rank++) {
            if (rank == it.rank) continue;
            Part part(length, rank);
            if (owner < 0 || owner == it.rank)
                requests.receive(
                    out + (at + part.first) * unit, part.count * unit, rank, RESULT, it.shared);
            if (owner < 0 || owner == rank)
                requests.send(found, mine.count * unit, rank, RESULT, it.shared);
        }
        requests.wait();
    }
}

inline void reduce_scatter(const Call& call, const std::string& doing, const char* in, char* out) {
    auto& it = state();
    const int64_t unit = dtype_bytes((int)call.dtype), each = call.count / it.size;
    const int64_t most = std::max<int64_t>(1, PIECE / unit / it.size);
    for (int64_t at = 0; at < each; at += most) {
        const int64_t length = std::min(most, each - at);
        auto part_of = [&](int rank) {
            return Block(in + (rank * each + at) * unit, length * unit);
        };
        combine_from_all(call, doing, length, part_of, out + at * unit);
    }
}

// The source sends each rank its part, and the ranks hand theirs on: nobody sends it all twice.
inline void broadcast(const Call& call, const std::string& doing, char* data) {
    auto& it = state();
    const int64_t bytes = call.count * dtype_bytes((int)call.dtype);
    const int source = (int)call.peer;
    const bool is_source = source == it.rank;
    if (bytes <= 16 * SMALL || it.size == 2) {
        Requests requests(doing);
        for (int step = 1; step < it.size; step++) {
            int rank = (it.rank + step) % it.size;
            if (is_source) requests.send(data, bytes, rank, PAYLOAD, it.shared);
            else if (rank == source) requests.receive(data, bytes, rank, PAYLOAD, it.shared);
        }
        return requests.wait();
    }
    const Part mine(bytes, it.rank);
    {
        Requests first(doing);
        for (int rank = 0; is_source && rank < it.size; rank++) {
            Part part(bytes, rank);
            if (rank != source)
                first.send(data + part.first, part.count, rank, PAYLOAD, it.shared);
        }
        if (!is_source)
            first.receive(data + mine.first, mine.count, source, PAYLOAD, it.shared);
        first.wait();
    }
    Requests second(doing);
    for (int step = 1; step < it.size; step++) {
        int rank = (it.rank + step) % it.size;
        Part part(bytes, rank);
        if (!is_source) second.receive(data + part.first, part.count, rank, RESULT, it.shared);
        if (rank != source) second.send(data + mine.first, mine.count, rank, RESULT, it.shared);
    }
    second.wait();
}

inline void all_gather(const Call& call, const std::string& doing, const char* in, char* out) {
    auto& it = state();
    const int64_t bytes = call.count * dtype_bytes((int)call.dtype);
    if (bytes) std::memcpy(out + it.rank * bytes, in, bytes);
    swap_blocks(doing, PAYLOAD, bytes, [&](int rank) { return (void*)(out + rank * bytes); },
                [&](int) { return Block(in, bytes); });
}

inline void all_to_all(const Call& call, const std::string& doing, const char* in, char* out) {
    auto& it = state();
    const int64_t bytes = call.count / it.size * dtype_bytes((int)call.dtype);
    if (bytes) std::memcpy(out + it.rank * bytes, in + it.rank * bytes, bytes);
    swap_blocks(doing, PAYLOAD, bytes, [&](int rank) { return (void*)(out + rank * bytes); },
                [&](int rank) { return Block(in + rank * bytes, bytes); });
}

}  // namespace xmem
