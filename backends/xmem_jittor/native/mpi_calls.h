// What ranks call, how the roll shows it, and how they make sure that they call the same.
#pragma once

#include "mpi_state.h"

namespace xmem {

enum Kind {
    EXCHANGE, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, WAIT,
    RECEIVE
};

struct Call {
    int64_t kind, dtype, op, peer, count, sending, world;
};

const int SIGNATURE = 1, PAYLOAD = 2, RESULT = 3, HEADER = 4, ANSWER = 5;
const int64_t PIECE = 4 << 20;  // bytes that are combined at a time
const int64_t SMALL = 4096;     // bytes that go to everyone along with the call

inline std::string told(const Call& call) {
    static const char* names[] = {"exchange", "all_reduce", "reduce", "broadcast", "all_gather",
                                  "reduce_scatter", "all_to_all", "send", "wait", "receive"};
    static const char* ops[] = {" (sum)", " (mean)", " (max)"};
    std::string text = names[call.kind];
    if (call.kind == EXCHANGE) return text;
    if (call.kind == ALL_REDUCE || call.kind == REDUCE_SCATTER) text += ops[call.op];
    text += " of " + std::to_string(call.count) + " " + dtype_name((int)call.dtype);
    auto peer = " rank " + std::to_string(call.peer);
    if (call.kind == REDUCE || call.kind == SEND) text += " to" + peer;
    if (call.kind == BROADCAST || call.kind == RECEIVE) text += " from" + peer;
    if (call.kind == WAIT) text = "waiting for the sending" + text.substr(4) + " to" + peer;
    return text;
}

// A communication, as the roll shows it.
struct Entry {
    explicit Entry(const std::string& doing) {
        auto& it = state();
        if (it.failure)
            throw error(doing + " is refused, communication has failed before: " + it.message);
        if (!it.roll) return;
        auto& own = it.roll[it.rank];
        write_text(own.doing, sizeof own.doing, doing);
        own.sign_of_life = monotonic_ns();
        own.entered++;
    }
    void finish() {
        auto& it = state();
        if (!it.roll) return;
        auto& own = it.roll[it.rank];
        own.sign_of_life = monotonic_ns();
        own.finished++;
    }
};

// Counts the time until it goes, also where a call throws.
struct Stopwatch {
    const int64_t begun = monotonic_ns();
    ~Stopwatch() { state().spent_ns += monotonic_ns() - begun; }
};

// What each rank calls, with its tensor if that is small.
struct Agreed {
    std::vector<Call> calls;
    std::vector<char> room;
    const char* payload(int rank) const {
        return room.data() + rank * (sizeof(Call) + SMALL) + sizeof(Call);
    }
};

// Gives every rank every rank's call and fails, on all of them, if they differ. At most SMALL bytes
// go with it: for a short message, being there is what takes time.
inline Agreed agree(const Call& own, const std::string& doing, const void* data, int64_t bytes) {
    auto& it = state();
    const int64_t each = sizeof(Call) + SMALL;
    Agreed found;
    found.room.resize(it.size * each);
    char* mine = found.room.data() + it.rank * each;
    std::memcpy(mine, &own, sizeof own);
    if (bytes) std::memcpy(mine + sizeof own, data, bytes);
    Requests requests(doing);
    for (int rank = 0; rank < it.size; rank++)
        if (rank != it.rank)
            requests.receive(found.room.data() + rank * each, each, rank, SIGNATURE, it.shared);
    for (int rank = 0; rank < it.size; rank++)
        if (rank != it.rank)
            requests.send(mine, sizeof(Call) + bytes, rank, SIGNATURE, it.shared);
    requests.wait();
    std::vector<int> others;
    for (int rank = 0; rank < it.size; rank++) {
        Call call;
        std::memcpy(&call, found.room.data() + rank * each, sizeof call);
        found.calls.push_back(call);
        bool same = call.kind == own.kind && call.dtype == own.dtype && call.op == own.op &&
                    call.peer == own.peer && (call.count == own.count || own.kind == EXCHANGE);
        if (!same) others.push_back(rank);
    }
    if (others.empty()) return found;
    std::string text = "the ranks called different things: ";
    for (int rank = 0; rank < it.size; rank++)
        text += (rank ? "; rank " : "rank ") + std::to_string(rank) + " called " +
                told(found.calls[rank]);
    fail(MISMATCH, others, text);
}

// The bytes that go with the call itself.
inline int64_t bytes_along(const Call& call, bool is_source) {
    int64_t bytes = call.count * (call.kind == EXCHANGE ? 1 : dtype_bytes((int)call.dtype));
    if (bytes > SMALL || (call.kind == BROADCAST && !is_source)) return 0;
    bool goes = call.kind == EXCHANGE || call.kind == ALL_REDUCE || call.kind == ALL_GATHER ||
                call.kind == BROADCAST;
    return goes ? bytes : 0;
}

}  // namespace xmem
