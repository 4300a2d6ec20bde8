// Who we are among the ranks, what has failed, and how to wait for others with a deadline.
#pragma once

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "mpi_reduce.h"
#include "mpi_roll.h"

// Python's, without its headers; we hold the interpreter's lock.
extern "C" {
int PyErr_CheckSignals(void);
void PyErr_Fetch(void** type, void** value, void** traceback);
void PyErr_NormalizeException(void** type, void** value, void** traceback);
}

namespace xmem {

enum Failure { NOTHING, TIMEOUT, LOST, MISMATCH, ENGINE, ABORTED, INTERRUPTED };

struct State {
    MPI_Comm shared = MPI_COMM_NULL;  // collective calls
    MPI_Comm paired = MPI_COMM_NULL;  // sending and receiving
    int rank = 0, size = 1;
    int64_t world = 0;  // which one of those that this process has joined; 0: none
    double timeout = 600;
    int64_t spent_ns = 0;  // in calls, since somebody has asked
    Record* roll = nullptr;
    std::vector<char> staging;
    int failure = NOTHING;
    void* interruption = nullptr;  // what a signal's handler raised
    std::vector<int> ranks;
    std::string message;
};

inline State& state() {
    static State* it = new State;  // outlives static destructors of others
    return *it;
}

inline std::string listed(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); i++)
        text += (i ? ", " : "") + std::to_string(ranks[i]);
    return text;
}

// The line ends with what we say: Jittor colours its log, and ends the colour behind the text.
inline std::runtime_error error(const std::string& message) {
    return std::runtime_error("xmem.distributed: " + message + "\n");
}

[[noreturn]] inline void fail(int failure, std::vector<int> ranks, const std::string& message) {
    auto& it = state();
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    it.failure = failure;
    it.ranks = ranks;
    it.message = message;
    throw error(message);
}

inline void check(int code, const std::string& doing) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int size = 0;
    MPI_Error_string(code, text, &size);
    fail(ENGINE, {}, "MPI failed in " + doing + ": " + std::string(text, size));
}

// Requests, each with the rank that it waits for.
struct Requests {
    std::vector<MPI_Request> all;
    std::vector<int> ranks;
    std::vector<char> receives;
    std::string doing;

    explicit Requests(std::string doing) : doing(std::move(doing)) {}
    Requests(const Requests&) = delete;
    // After a failure nothing may arrive in memory that goes back to others now.
    ~Requests() {
        for (size_t i = 0; i < all.size(); i++) {
            if (all[i] == MPI_REQUEST_NULL) continue;
            if (receives[i]) MPI_Cancel(&all[i]);
            MPI_Request_free(&all[i]);
        }
    }
    // MPI counts in int: larger messages go in parts, the same ones on both sides.
    static constexpr int64_t LARGEST = 1 << 28;

    void send(const void* data, int64_t bytes, int rank, int tag, MPI_Comm comm) {
        for (int64_t at = 0; at < bytes; at += LARGEST) {
            add(rank, 0);
            int part = (int)std::min(LARGEST, bytes - at);
            check(MPI_Isend((const char*)data + at, part, MPI_BYTE, rank, tag, comm, &all.back()),
                  doing);
        }
    }
    void receive(void* data, int64_t bytes, int rank, int tag, MPI_Comm comm) {
        for (int64_t at = 0; at < bytes; at += LARGEST) {
            add(rank, 1);
            int part = (int)std::min(LARGEST, bytes - at);
            check(MPI_Irecv((char*)data + at, part, MPI_BYTE, rank, tag, comm, &all.back()), doing);
        }
    }
    bool test() {
        int done = 0;
        if (all.empty()) return true;
        check(MPI_Testall((int)all.size(), all.data(), &done, MPI_STATUSES_IGNORE), doing);
        return done;
    }
    bool test(size_t which) {
        int done = 0;
        check(MPI_Test(&all[which], &done, MPI_STATUS_IGNORE), doing);
        return done;
    }
    std::vector<int> pending() {
        std::vector<int> found;
        for (size_t i = 0; i < all.size(); i++) {
            int done = 1;
            if (all[i] != MPI_REQUEST_NULL)
                MPI_Request_get_status(all[i], &done, MPI_STATUS_IGNORE);
            if (!done) found.push_back(ranks[i]);
        }
        std::sort(found.begin(), found.end());
        found.erase(std::unique(found.begin(), found.end()), found.end());
        return found;
    }
    void wait();

   private:
    void add(int rank, char is_receive) {
        all.push_back(MPI_REQUEST_NULL);
        ranks.push_back(rank);
        receives.push_back(is_receive);
    }
};

// What became of a rank that can never come; empty for one that may.
inline std::string loss(const Record& record, bool is_needed) {
    auto error = read_text(record.error, sizeof record.error);
    if (record.state == FAILED) return " failed" + (error.empty() ? "" : " (" + error + ")");
    if (record.state == LEFT) return is_needed ? " has left" : "";
    if (is_gone(record)) return " has died (process " + std::to_string(record.process) + ")";
    return "";
}

// The ranks that can never come, with what became of them; `waited_for` are those that we need now.
// Ranks that failed because they lost others are left out where there are others.
inline std::string losses(const std::vector<int>& waited_for, std::vector<int>& lost) {
    auto& it = state();
    std::string causes, victims;
    std::vector<int> victim_ranks;
    for (int rank = 0; it.roll && rank < it.size; rank++) {
        const Record& record = it.roll[rank];
        if (rank == it.rank || !record.process) continue;
        bool needed = std::find(waited_for.begin(), waited_for.end(), rank) != waited_for.end();
        auto why = loss(record, needed);
        if (why.empty()) continue;
        bool is_victim = record.state == FAILED &&
                         (!strncmp(record.error, "RankLostError", 13) ||
                          !strncmp(record.error, "CollectiveTimeoutError", 22));
        (is_victim ? victim_ranks : lost).push_back(rank);
        auto& text = is_victim ? victims : causes;
        text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + why;
    }
    if (!lost.empty()) return causes;
    lost = victim_ranks;
    return victims;
}

// What other ranks do, as far as the roll knows.
inline std::string whereabouts(const std::vector<int>& ranks) {
    auto& it = state();
    std::string text;
    for (int rank : ranks) {
        if (!it.roll || !it.roll[rank].process) continue;
        const Record& record = it.roll[rank];
        auto doing = read_text(record.doing, sizeof record.doing);
        text += "; rank " + std::to_string(rank) + " has finished " +
                std::to_string(record.finished) + " communications and ";
        text += record.entered > record.finished && !doing.empty()
                    ? "waits in " + doing
                    : std::string("is not in one");
    }
    return text;
}

// Waits at most until a deadline. It gives the processor away between tries and sleeps soon: there
// may be more ranks than processors, and who has spun is woken last (16 processes on 2 processors:
// 650 messages in 4 to 8 s, and in 40 to 150 s where it spun for a millisecond). Every millisecond
// it signs the roll, every 20 it looks for the lost.
template <class Done, class Pending>
void wait_for(const std::string& doing, Done done, Pending pending) {
    auto& it = state();
    const int64_t begun = monotonic_ns(), grace = 500000000;
    int64_t signed_at = begun, looked_at = begun, lost_at = 0;
    for (;;) {
        for (int tries = 0; tries < 8; tries++)
            if (done()) return;
        int64_t now = monotonic_ns();
        if (it.roll && now - signed_at > 1000000) {
            signed_at = now;
            it.roll[it.rank].sign_of_life = now;
        }
        if (now - looked_at > 20000000) {
            looked_at = now;
            if (PyErr_CheckSignals()) {
                void *type, *traceback;
                PyErr_Fetch(&type, &it.interruption, &traceback);
                PyErr_NormalizeException(&type, &it.interruption, &traceback);
                fail(INTERRUPTED, {}, doing + " was interrupted by a signal");
            }
            std::vector<int> lost;
            auto waited_for = pending();
            auto text = losses(waited_for, lost);
            // What they sent before may still arrive: the reason why all of us fail, perhaps.
            if (lost.empty()) lost_at = 0;
            else if (!lost_at) lost_at = now;
            else if (now - lost_at > grace)
                fail(LOST, lost, doing + " cannot finish: " + text);
        }
        if ((now - begun) * 1e-9 > it.timeout) {
            auto missing = pending();
            char seconds[32];
            snprintf(seconds, sizeof seconds, "%g", it.timeout);
            auto others = missing.empty() ? std::string("other ranks") : listed(missing);
            fail(TIMEOUT, missing, doing + " waited " + seconds + " s, the timeout, for " + others +
                                       whereabouts(missing));
        }
        if (now - begun < 100000) {
            sched_yield();
        } else {
            timespec pause{0, now - begun < 20000000 ? 50000 : 500000};
            nanosleep(&pause, nullptr);
        }
    }
}

inline void Requests::wait() {
    wait_for(doing, [this] { return test(); }, [this] { return pending(); });
    all.clear();
    ranks.clear();
    receives.clear();
}

}  // namespace xmem
