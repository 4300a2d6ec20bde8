// Sending from one rank to another, which goes on while the sender computes.
#pragma once

#include <map>

#include "mpi_calls.h"

namespace xmem {

// Sending between two ranks: the header goes first, and the receiver answers it with what it
// expects, so that both fail if that is something else.
struct Sending {
    Requests requests;
    Call header, answer;
    explicit Sending(const std::string& doing) : requests(doing) {}
};

inline std::map<int64_t, Sending*>& sendings() {
    static auto* all = new std::map<int64_t, Sending*>;
    return *all;
}

inline bool fits(const Call& sent, const Call& expected) {
    return sent.dtype == expected.dtype && sent.count == expected.count;
}

[[noreturn]] inline void misfit(int other, const Call& own, const Call& its) {
    fail(MISMATCH, {other}, "two ranks do not fit: rank " + std::to_string(state().rank) +
                                " called " + told(own) + "; rank " + std::to_string(other) +
                                " called " + told(its));
}

inline void send(const Call& call, const std::string& doing, const char* in) {
    auto& it = state();
    const int target = (int)call.peer;
    auto* sending = new Sending(doing);
    sendings()[call.sending] = sending;
    sending->header = call;
    sending->requests.receive(&sending->answer, sizeof(Call), target, ANSWER, it.paired);
    sending->requests.send(&sending->header, sizeof(Call), target, HEADER, it.paired);
    const int64_t bytes = call.count * dtype_bytes((int)call.dtype);
    sending->requests.send(in, bytes, target, PAYLOAD, it.paired);
    sending->requests.test();
}

inline void wait(const Call& call, const std::string& doing) {
    auto found = sendings().find(call.sending);
    if (found == sendings().end())
        fail(ENGINE, {}, doing + ": nothing was sent, or it was waited for before");
    auto* sending = found->second;
    auto& requests = sending->requests;
    // A receiver that expects something else answers, and takes nothing.
    auto answered = [&] { return requests.test(0); };
    wait_for(doing, answered, [&] { return requests.pending(); });
    Call header = sending->header;
    if (!fits(sending->header, sending->answer))
        misfit((int)header.peer, header, sending->answer);
    requests.wait();
    sendings().erase(found);
    delete sending;
}

inline void receive(const Call& call, const std::string& doing, char* out) {
    auto& it = state();
    const int source = (int)call.peer;
    Call header;
    Requests requests(doing);
    requests.receive(&header, sizeof header, source, HEADER, it.paired);
    requests.wait();
    requests.send(&call, sizeof call, source, ANSWER, it.paired);
    if (!fits(header, call)) {
        requests.wait();
        misfit(source, call, header);
    }
    const int64_t bytes = call.count * dtype_bytes((int)call.dtype);
    requests.receive(out, bytes, source, PAYLOAD, it.paired);
    requests.wait();
}

inline void forget_sendings() {
    for (auto& each : sendings()) delete each.second;
    sendings().clear();
}

}  // namespace xmem
