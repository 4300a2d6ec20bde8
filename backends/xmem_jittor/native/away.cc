// What backward will read, kept in a depot until it does (Jittor 1.3.11).
//
// An operation behind the forward stores a tensor, another one reads it back into a new tensor before
// the backward. A piece lives for as long as Python or an operation that is yet to run holds it, so
// that its number is dropped when nobody can ask for it any more, and the depot is kept until then.
// What cannot be stored is held: its memory is shared, and the tensor may be emptied all the same.
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "letting_go.h"
#include "mem/allocator.h"
#include "op.h"
#include "var.h"

#ifdef HAS_CUDA
#include <cuda_runtime.h>
#endif

using namespace jittor;

namespace {

constexpr int kFailedBefore = -1;  // of depot.cc

// A depot, as `xmem/native/depot.cc` has it.
struct Functions {
    void* depot;
    PyObject* holder;
    int (*put)(void*, int64, const void*, int64);
    int (*get)(void*, int64, void*, int64);
    void (*drop)(void*, int64);
    void (*will_need)(void*, int64);
};

// What was raised last: a code of the depot's, the bytes, the depot; and how often anything was.
struct Failure {
    int64 count = 0, code = 0, bytes = 0, depot = 0;
} failure;

[[noreturn]] void fail(void* depot, int code, int64 bytes, const char* what) {
    failure = {failure.count + 1, code, bytes, (int64)depot};
    throw std::runtime_error("xmem offload: " + std::to_string(bytes) + " bytes could not be " + what +
                             (code > 0 ? std::string(": ") + strerror(code)
                                       : " (code " + std::to_string(code) + ")"));
}

struct Piece;
struct Store;

std::map<void*, std::weak_ptr<Store>>& stores() {
    static auto* all = new std::map<void*, std::weak_ptr<Store>>;  // tensors may outlive statics
    return *all;
}

// A depot for as long as pieces may lie there.
struct Store {
    Functions to;
    std::map<int64, Piece*> pieces;

    explicit Store(const Functions& functions) : to(functions) { Py_INCREF(to.holder); }
    ~Store() {
        stores().erase(to.depot);
        let_go_later(to.holder);
    }
};

std::shared_ptr<Store> store_of(const Functions& functions) {
    auto& known = stores()[functions.depot];
    auto found = known.lock();
    if (!found) known = found = std::make_shared<Store>(functions);
    return found;
}

#ifdef HAS_CUDA
// Pinned memory that bytes pass through; grows, and is one, as an operation waits for its copy.
void* bounce(int64 bytes) {
    static void* memory = nullptr;
    static int64 size = 0;
    if (size < bytes) {
        if (memory) cudaFreeHost(memory);
        size = 0;
        if (cudaMallocHost(&memory, bytes) != cudaSuccess) throw std::bad_alloc();
        size = bytes;
    }
    return memory;
}
#endif

struct Piece {
    std::shared_ptr<Store> store;
    int64 number, size, ahead;  // ahead: bytes that are asked for before they are read
    NanoVector shape;
    NanoString dtype;
    bool stored = false, announced = false;
    void* memory = nullptr;  // of what could not be stored
    Allocator* allocator = nullptr;
    size_t allocation = 0;

    Piece(std::shared_ptr<Store> store, int64 number, int64 ahead, Var* var)
        : store(store), number(number), size(var->size), ahead(ahead), shape(var->shape),
          dtype(var->dtype()) {
        store->pieces[number] = this;
    }
    ~Piece() {
        store->pieces.erase(number);
        if (stored) store->to.drop(store->to.depot, number);
        if (memory) allocator->free(memory, size, allocation);
    }
    void keep(Var* var) {
        if (stored || memory || !size) return;
        const void* from = var->mem_ptr;
#ifdef HAS_CUDA
        if (var->allocator->is_cuda()) {
            void* aside = bounce(size);
            cudaMemcpy(aside, from, size, cudaMemcpyDeviceToHost);
            from = aside;
        }
#endif
        const int code = store->to.put(store->to.depot, number, from, size);
        stored = code == 0;
        if (stored) return;
        var->allocator->share_with(size, var->allocation);
        memory = var->mem_ptr;
        allocator = var->allocator;
        allocation = var->allocation;
        if (code != kFailedBefore) fail(store->to.depot, code, size, "stored");
    }
    void bring(Var* var) {
        if (!size) return;
        if (memory) {
            var->allocator->free(var->mem_ptr, var->size, var->allocation);
            allocator->share_with(size, allocation);
            var->mem_ptr = memory;
            var->allocator = allocator;
            var->allocation = allocation;
            return;
        }
        void* to = var->mem_ptr;
#ifdef HAS_CUDA
        const bool on_device = var->allocator->is_cuda();
        if (on_device) to = bounce(size);
#endif
        if (const int code = store->to.get(store->to.depot, number, to, size))
            fail(store->to.depot, code, size, "read back");
#ifdef HAS_CUDA
        if (on_device) cudaMemcpy(var->mem_ptr, to, size, cudaMemcpyHostToDevice);
#endif
        announce();
    }
    // What was stored before this one is read next.
    void announce() {
        int64 bytes = 0;
        auto next = store->pieces.find(number);
        while (next != store->pieces.begin() && bytes < ahead) {
            Piece& piece = *(--next)->second;
            bytes += piece.size;
            if (!piece.stored || piece.announced) continue;
            store->to.will_need(store->to.depot, piece.number);
            piece.announced = true;
        }
    }
};

using Held = std::shared_ptr<Piece>;

// Outputs between their making and their wrapping.
std::vector<VarPtr>& waiting() {
    static auto* all = new std::vector<VarPtr>;
    return *all;
}

struct AwayOp : Op {
    Held piece;

    explicit AwayOp(const Held& piece) : piece(piece) {
        flags.set(NodeFlags::_cpu, 1);
        flags.set(NodeFlags::_cuda, 1);
        flags.set(NodeFlags::_manual_set_vnbb);
    }
    VarPtr grad(Var*, Var*, Var*, int) override { return nullptr; }
    // Puts it into the graph, behind a tensor; returns the address of what it makes.
    int64 after(Var* input, const NanoVector& shape, NanoString dtype) {
        auto* result = create_output(shape, dtype);
        result->flags.set(NodeFlags::_stop_fuse);
        result->set_stop_grad();
        auto made = move(outputs_holder);
        made[0]->set_inputs({this});
        add_inputs(vector<Var*>{input});
        init();
        waiting().push_back(move(made[0]));
        return (int64)waiting().back().ptr;
    }
};

// Makes a number, there when the tensor has been stored.
struct StoreOp final : AwayOp {
    using AwayOp::AwayOp;
    const char* name() const override { return "xmem_store"; }
    void run() override { piece->keep(input(0)); }
};

// Makes the tensor again.
struct LoadOp final : AwayOp {
    using AwayOp::AwayOp;
    const char* name() const override { return "xmem_load"; }
    void run() override { piece->bring(output(0)); }
};

}  // namespace

extern "C" {

// Stores a tensor under a number when the graph gets here. Returns what holds the piece; `done` is a
// tensor that is there then.
void* xmem_jittor_away_store(long long var, const Functions* to, long long number, long long ahead,
                             long long* done) {
    auto piece = std::make_shared<Piece>(store_of(*to), number, ahead, (Var*)var);
    *done = (new StoreOp(piece))->after((Var*)var, NanoVector(1), ns_int32);
    return new Held(piece);
}

// Returns a tensor with what is stored, after the one that says that it is.
long long xmem_jittor_away_load(const Held* held, long long done) {
    return (new LoadOp(*held))->after((Var*)done, (*held)->shape, (*held)->dtype);
}

// What was made last has been wrapped.
void xmem_jittor_away_taken() { waiting().clear(); }

void xmem_jittor_away_let_go(Held* held) { delete held; }

void xmem_jittor_away_failure(long long* found) { memcpy(found, &failure, sizeof failure); }

// Pieces that anybody holds.
long long xmem_jittor_away_pieces() {
    long long count = 0;
    for (auto& [depot, known] : stores())
        if (auto store = known.lock()) count += store->pieces.size();
    return count;
}
}
