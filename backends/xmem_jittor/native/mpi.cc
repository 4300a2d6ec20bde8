// Communication over MPI that names who is missing: messages between pairs of ranks, in
// communicators of our own, and a loop that watches the clock and the roll while it waits.
#include "mpi_pairs.h"
#include "mpi_together.h"

using namespace xmem;

namespace {

// Where the program ends otherwise than together with all ranks, others need not come to
// MPI_Finalize(), which Jittor calls after this and which would wait for them.
void leave_alone(int status, void*) {
    auto& it = state();
    if (!it.failure && !(status && it.world)) return;
    fflush(nullptr);
    _exit(status);
}

void join(double timeout) {
    auto& it = state();
    forget_sendings();
    int is_there = 0;
    MPI_Initialized(&is_there);
    if (!is_there) fail(ENGINE, {}, "MPI has not been started in this process");
    static const int watched = on_exit(leave_alone, nullptr);
    (void)watched;
    it.failure = NOTHING;
    it.interruption = nullptr;
    it.ranks.clear();
    it.timeout = timeout;
    MPI_Comm_rank(MPI_COMM_WORLD, &it.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &it.size);
    const std::string doing = "joining the ranks";
    // Making a communicator waits for all ranks and cannot say for whom.
    std::vector<char> hello(it.size);
    const int HELLO = 32001;
    {
        Requests requests(doing);
        for (int rank = 0; rank < it.size; rank++) {
            if (rank == it.rank) continue;
            requests.receive(&hello[rank], 1, rank, HELLO, MPI_COMM_WORLD);
            requests.send(&hello[it.rank], 1, rank, HELLO, MPI_COMM_WORLD);
        }
        requests.wait();
    }
    for (MPI_Comm* comm : {&it.shared, &it.paired}) {
        MPI_Request request = MPI_REQUEST_NULL;
        check(MPI_Comm_idup(MPI_COMM_WORLD, comm, &request), doing);
        auto done = [&] {
            int is_done = 0;
            check(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), doing);
            return is_done;
        };
        wait_for(doing, done, [] { return std::vector<int>(); });
        MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN);
    }
}

int guarded(void (*run)(double), double value) {
    try {
        run(value);
    } catch (const std::exception&) {
        return state().failure;
    }
    return 0;
}

}  // namespace

extern "C" {

// Joins, as a world with a number; returns 0, or the kind of failure. Afterwards `found` has this
// rank, and how many there are.
int xmem_mpi_start(double timeout, long long world, long long* found) {
    state().world = world;
    int failure = guarded(join, timeout);
    found[0] = state().rank;
    found[1] = state().size;
    return failure;
}

void xmem_mpi_watch(void* roll) { state().roll = (Record*)roll; }

// Seconds in calls of xmem_mpi_run() since this was last asked.
double xmem_mpi_spent() {
    auto& it = state();
    double seconds = it.spent_ns * 1e-9;
    it.spent_ns = 0;
    return seconds;
}

// One call of a kind; throws. `numbers` are those of Call.
void xmem_mpi_run(const long long* numbers, const void* from, void* to) {
    Call call;
    static_assert(sizeof(long long) == 8, "");
    std::memcpy(&call, numbers, sizeof call);
    const std::string doing = told(call);
    const char* in = (const char*)from;
    char* out = (char*)to;
    if (call.world != state().world)
        throw error(doing + " was asked for in a world of ranks that this process has left since");
    Entry entry(doing);
    Stopwatch stopwatch;
    if (call.kind < SEND) {
        const int64_t bytes = call.count * dtype_bytes((int)call.dtype);
        const int64_t along = bytes_along(call, in != nullptr);
        auto agreed = agree(call, doing, in, along);
        if (along || (call.kind == BROADCAST && bytes <= SMALL)) {
            take_along(call, agreed, out);
            return entry.finish();
        }
    }
    switch (call.kind) {
        case ALL_REDUCE: reduce(call, doing, in, out, -1); break;
        case REDUCE: reduce(call, doing, in, out, (int)call.peer); break;
        case BROADCAST:
            if (in && in != out) std::memcpy(out, in, call.count * dtype_bytes((int)call.dtype));
            broadcast(call, doing, out);
            break;
        case ALL_GATHER: all_gather(call, doing, in, out); break;
        case REDUCE_SCATTER: reduce_scatter(call, doing, in, out); break;
        case ALL_TO_ALL: all_to_all(call, doing, in, out); break;
        case SEND: send(call, doing, in); break;
        case WAIT: wait(call, doing); break;
        case RECEIVE: receive(call, doing, out); break;
    }
    entry.finish();
}

// Gives every rank a few bytes of every rank's, `capacity` apart; sizes by rank. Returns 0, or the
// kind of failure.
int xmem_mpi_exchange(
    const char* own, long long size, char* all, long long* sizes, long long capacity) {
    auto& it = state();
    try {
        Call call{EXCHANGE, 0, 0, 0, size, 0, it.world};
        const std::string doing = told(call);
        Entry entry(doing);
        auto agreed = agree(call, doing, own, bytes_along(call, true));
        Requests requests(doing);
        for (int rank = 0; rank < it.size; rank++) {
            sizes[rank] = agreed.calls[rank].count;
            char* place = all + rank * capacity;
            if (rank == it.rank) std::memcpy(place, own, size);
            else if (bytes_along(agreed.calls[rank], true) == sizes[rank])
                std::memcpy(place, agreed.payload(rank), sizes[rank]);
            else requests.receive(place, sizes[rank], rank, PAYLOAD, it.shared);
            if (rank != it.rank && size > SMALL)
                requests.send(own, size, rank, PAYLOAD, it.shared);
        }
        requests.wait();
        entry.finish();
    } catch (const std::exception&) {
        return it.failure ? it.failure : ENGINE;
    }
    return 0;
}

// The failure that ended communication: its kind, the number of ranks that it is about (at most
// `capacity` are written) and its message.
int xmem_mpi_failure(long long* count, long long* ranks, int capacity, char* message, int room) {
    auto& it = state();
    *count = (long long)it.ranks.size();
    for (int i = 0; i < capacity && i < *count; i++) ranks[i] = it.ranks[i];
    if (room) write_text(message, room, it.message);
    return it.failure;
}

// What the handler of the signal raised that interrupted communication, once; then null.
void* xmem_mpi_interruption() {
    auto* raised = state().interruption;
    state().interruption = nullptr;
    return raised;
}

// Frees the communicators after the last call of all ranks.
void xmem_mpi_stop() {
    auto& it = state();
    forget_sendings();
    for (MPI_Comm* comm : {&it.shared, &it.paired})
        if (*comm != MPI_COMM_NULL) MPI_Comm_free(comm);
    std::vector<char>().swap(it.staging);
    it.roll = nullptr;
    it.world = 0;
}

// Ends communication without a word to others.
void xmem_mpi_abort() {
    auto& it = state();
    if (!it.failure) {
        it.failure = ABORTED;
        it.message = "communication was aborted on this rank";
    }
    it.roll = nullptr;
    it.world = 0;
}
}
