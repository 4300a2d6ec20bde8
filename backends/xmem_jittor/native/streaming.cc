// Parameters whose values lie in a depot, and come into the pool and go again under living tensors
// (Jittor 1.3.11).
//
// A tensor that is away is there in full for Jittor: computed, with its shape, and with an address
// where its value can be read, the depot's own memory or its file, mapped. Only it is none of the
// pool's. Operations in the graph bring it into the pool before a layer runs and take it away after.
// Where it is never changes what is computed, whatever order Jittor runs things in.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "letting_go.h"
#include "mem/allocator.h"
#include "op.h"
#include "var.h"
#include "var_holder.h"

#ifdef HAS_CUDA
#include <cuda_runtime.h>
#endif

using namespace jittor;

namespace {

constexpr int kNoRoom = -100;  // beside what `xmem/native/depot.cc` returns

// A depot, as `xmem/native/depot.cc` has it.
struct Store {
    void* depot;
    PyObject* holder;  // kept while a piece is there
    int (*put)(void*, int64, const void*, int64);
    int (*get)(void*, int64, void*, int64);
    void (*drop)(void*, int64);
    void (*will_need)(void*, int64);
    void* (*map)(void*, int64);
    void (*unmap)(void*, int64, void*);
};

// The memory of a tensor and its views. `allocation` of each is the piece's id.
struct Piece {
    Store store;
    int64 number;
    char* away;  // nullptr: it is in no depot
    char* here;  // nullptr: it is not in the pool
    Allocator* pool;
    size_t allocation;  // in the pool
    int64 size;
    int64 shares, shares_here;  // tensors that have it, and those that have it in the pool
};

bool is_in(const char* memory, const char* base, int64 size) {
    return base && memory >= base && memory < base + (size ? size : 1);
}

int64 away_bytes = 0, brought_in = 0, peak_brought_in = 0, read_in_bytes = 0;

struct Streamed final : Allocator {
    std::unordered_map<size_t, Piece> pieces;
    size_t next = 1;

    const char* name() const override { return "xmem_streamed"; }
    // For whoever asks the allocator of an old value for memory for a new one.
    void* alloc(size_t size, size_t& allocation) override {
        Piece piece{};
        piece.pool = get_allocator();
        size_t id = allocation;
        piece.here = (char*)piece.pool->alloc(size, id);
        if (!piece.here) return nullptr;
        piece.allocation = id;
        piece.size = size;
        piece.shares = piece.shares_here = 1;
        pieces[allocation = next++] = piece;
        return piece.here;
    }
    bool share_with(size_t, size_t allocation) override {
        Piece& piece = pieces.at(allocation);
        piece.shares++;
        if (piece.here) piece.shares_here++;
        return true;
    }
    void free(void* memory, size_t, const size_t& allocation) override {
        const size_t id = allocation;
        auto found = pieces.find(id);
        if (found == pieces.end()) return;
        Piece& piece = found->second;
        piece.shares--;
        if (is_in((char*)memory, piece.here, piece.size)) piece.shares_here--;
        if (piece.shares) return;
        Piece last = piece;
        pieces.erase(found);
        if (last.here) {
            last.pool->free(last.here, last.size, last.allocation);
            if (last.away) brought_in -= last.size;
        }
        if (last.away) forget(last);
    }
    static void forget(Piece& piece) {
        away_bytes -= piece.size;
        piece.store.unmap(piece.store.depot, piece.size, piece.away);
        piece.store.drop(piece.store.depot, piece.number);
        let_go_later(piece.store.holder);
    }
};

Streamed& streamed() {
    static auto* one = new Streamed;  // tensors may outlive static objects
    return *one;
}

Piece* piece_of(Var* var) {
    if (!var->mem_ptr || var->allocator != &streamed()) return nullptr;
    auto found = streamed().pieces.find(var->allocation);
    return found == streamed().pieces.end() ? nullptr : &found->second;
}

bool have_one_memory(Var* one, Var* other) {
    return other->mem_ptr && other->is_finished() && other->allocator == one->allocator &&
           other->allocation == one->allocation;
}

// The tensors in the same memory, itself first, that are made of each other in the graph. (Nodes are
// not marked by their tflag, which the executor reads on while it runs.)
std::vector<Var*> sharing(Var* var) {
    std::vector<Var*> found{var};
    auto visit = [&](Node* node) {
        if (!node->is_var() || !have_one_memory(var, node->var())) return;
        if (std::find(found.begin(), found.end(), node->var()) == found.end())
            found.push_back(node->var());
    };
    for (size_t i = 0; i < found.size(); i++) {
        for (auto& reader : found[i]->_outputs)
            for (auto& made : reader.node->_outputs) visit(made.node);
        for (auto& maker : found[i]->_inputs)
            for (auto& source : maker.node->_inputs) visit(source.node);
    }
    return found;
}

// What an operation moves, which no edge leads to.
const std::vector<VarPtr>* kept_by(Node* node);

// All tensors in the memory of pieces, by piece. What has been detached is cut off from what it is a
// view of once it has run, and only its readers, somewhere in the graph, lead to it.
struct Everyone {
    std::unordered_map<size_t, std::vector<Var*>> by_piece;

    explicit Everyone(Node* from) {
        std::unordered_set<Node*> seen;
        std::vector<Node*> queue;
        auto visit = [&](Node* node) {
            if (seen.insert(node).second) queue.push_back(node);
        };
        visit(from);
        for (auto* holder : hold_vars) visit(holder->var);
        for (size_t i = 0; i < queue.size(); i++) {
            Node* node = queue[i];
            for (auto& input : node->_inputs) visit(input.node);
            for (auto& output : node->_outputs) visit(output.node);
            if (const auto* kept = kept_by(node))
                for (auto& var : *kept) visit(var.ptr);
            if (!node->is_var() || !node->is_finished()) continue;
            auto* var = node->var();
            if (var->mem_ptr && var->allocator == &streamed())
                by_piece[var->allocation].push_back(var);
        }
    }
};

// Finds the tensors in a piece's memory, at a cost only where it must.
struct Finder {
    Node* from;
    std::unique_ptr<Everyone> everyone;

    std::vector<Var*> all(Var* var, const Piece& piece) {
        auto found = sharing(var);
        if ((int64)found.size() == piece.shares || !from) return found;
        if (!everyone) everyone.reset(new Everyone(from));
        return everyone->by_piece[var->allocation];
    }
};

void copy(void* to, const void* from, int64 size, Allocator* pool) {
#ifdef HAS_CUDA
    if (pool->is_cuda()) {
        cudaMemcpy(to, from, size, cudaMemcpyDefault);
        return;
    }
#endif
    std::memcpy(to, from, size);
}

int read_in(Piece& piece) {
    if (piece.pool->is_cuda()) {
        copy(piece.here, piece.away, piece.size, piece.pool);
        return 0;
    }
    return piece.store.get(piece.store.depot, piece.number, piece.here, piece.size);
}

// Takes memory of the pool for a tensor, so that the pool knows for which.
void take_room(Var* var, Piece& piece) {
    auto* memory = var->mem_ptr;
    const size_t id = var->allocation;
    piece.pool = get_allocator();
    var->mem_ptr = nullptr;
    var->allocator = nullptr;
    auto put_back = [&] {
        var->mem_ptr = memory;
        var->allocator = &streamed();
        var->allocation = id;
    };
    try {
        piece.here = (char*)piece.pool->alloc(piece.size, var->allocation);
        piece.allocation = var->allocation;
    } catch (...) {
        put_back();
        throw;
    }
    put_back();
    if (!piece.here) throw std::runtime_error("out of memory: a parameter does not fit");
}

// The last failure to read, for Python to say what it was.
struct Failure {
    int64 count, code, bytes, depot;
} failure;

void come(Var* var, Finder& finder) {
    Piece* piece = piece_of(var);
    if (!piece || !piece->away || piece->here || !piece->size) return;
    take_room(var, *piece);
    if (const int error = read_in(*piece)) {
        piece->pool->free(piece->here, piece->size, piece->allocation);
        piece->here = nullptr;
        failure = {failure.count + 1, error, piece->size, (int64)piece->store.depot};
        throw std::runtime_error("xmem offload: a parameter of " + std::to_string(piece->size) +
                                 " bytes could not be read back");
    }
    brought_in += piece->size;
    if (brought_in > peak_brought_in) peak_brought_in = brought_in;
    read_in_bytes += piece->size;
    for (auto* other : finder.all(var, *piece)) {
        if (!is_in((char*)other->mem_ptr, piece->away, piece->size)) continue;
        other->mem_ptr = piece->here + ((char*)other->mem_ptr - piece->away);
        piece->shares_here++;
    }
}

void go(Var* var, Finder& finder) {
    Piece* piece = piece_of(var);
    if (!piece || !piece->away || !piece->here) return;
    std::vector<Var*> found;
    for (auto* other : finder.all(var, *piece))
        if (is_in((char*)other->mem_ptr, piece->here, piece->size)) found.push_back(other);
    if ((int64)found.size() != piece->shares_here) return;  // a view that is not seen reads it
    for (auto* other : found) other->mem_ptr = piece->away + ((char*)other->mem_ptr - piece->here);
    piece->pool->free(piece->here, piece->size, piece->allocation);
    piece->here = nullptr;
    piece->shares_here = 0;
    brought_in -= piece->size;
}

void will_need(Var* var) {
    Piece* piece = piece_of(var);
    if (piece && piece->away) piece->store.will_need(piece->store.depot, piece->number);
}

// Outputs between their making and their wrapping.
std::vector<VarPtr>& waiting() {
    static auto* all = new std::vector<VarPtr>;
    return *all;
}

// Returns its input, without a copy; when it is reached, tensors come or go. In backward it is the
// other way round, where the gradient passes. The tensors are none of its inputs, or gradients with
// respect to them would be looked for here.
struct MoveOp final : Op {
    bool comes, back;
    std::vector<VarPtr> moved, ahead;  // ahead: what will be read next, here or in backward

    MoveOp(bool comes, bool back) : comes(comes), back(back) {
        flags.set(NodeFlags::_cpu, 1);
        flags.set(NodeFlags::_cuda, 1);
        flags.set(NodeFlags::_manual_set_vnbb);
    }
    const char* name() const override { return "xmem_move"; }
    void run() override {
        Finder finder{this, nullptr};
        for (auto& var : moved) comes ? come(var.ptr, finder) : go(var.ptr, finder);
        if (!comes) return;
        for (auto& var : ahead) will_need(var.ptr);
    }
    VarPtr grad(Var*, Var* gradient, Var*, int) override {
        auto* op = new MoveOp(!comes, false);
        if (back) op->keep(moved, ahead);
        return op->after(gradient);
    }
    void keep(const std::vector<VarPtr>& also_moved, const std::vector<VarPtr>& also_ahead) {
        for (auto& var : also_moved) moved.emplace_back(var.ptr);
        for (auto& var : also_ahead) ahead.emplace_back(var.ptr);
    }
    // Puts it into the graph.
    VarPtr after(Var* gate) {
        auto* result = create_output(gate->shape, gate->dtype());
        result->flags.set(NodeFlags::_stop_fuse);
        if (gate->is_stop_grad()) result->set_stop_grad();
        result->share_with(gate);
        auto made = move(outputs_holder);
        made[0]->set_inputs({this});
        add_inputs(vector<Var*>{gate});
        init();
        return move(made[0]);
    }
};

const std::vector<VarPtr>* kept_by(Node* node) {
    const bool moves = !node->is_var() && std::string(node->op()->name()) == "xmem_move";
    return moves ? &((MoveOp*)node)->moved : nullptr;
}

}  // namespace

extern "C" {

// 0: the tensor, which is computed, lies in the depot under the number, and the pool has its memory
// back. Else what the depot says, and it stays where it is.
int xmem_jittor_send(long long address, const Store* store, long long number) {
    auto* var = (Var*)address;
    if (piece_of(var) && piece_of(var)->away) return 0;
    auto* memory = (char*)var->mem_ptr;
    std::vector<char> aside;
    if (var->allocator->is_cuda()) {
        aside.resize(var->size);
        copy(aside.data(), memory, var->size, var->allocator);
    }
    const void* from = aside.empty() ? memory : aside.data();
    if (const int error = store->put(store->depot, number, from, var->size)) return error;
    auto* away = (char*)store->map(store->depot, number);
    if (!away) {
        store->drop(store->depot, number);
        return errno ? errno : ENOMEM;
    }
    Py_INCREF(store->holder);
    Piece piece{*store, number, away, nullptr, nullptr, 0, var->size, 0, 0};
    auto found = sharing(var);
    const size_t id = streamed().next++;
    for (auto* other : found) {
        auto* place = (char*)other->mem_ptr;
        if (!is_in(place, memory, var->size) || place + other->size > memory + var->size) continue;
        other->allocator->free(place, other->size, other->allocation);
        other->mem_ptr = away + (place - memory);
        other->allocator = &streamed();
        other->allocation = id;
        piece.shares++;
    }
    away_bytes += var->size;
    streamed().pieces[id] = piece;
    return 0;
}

// Gives a tensor and its views memory of the pool for good. 0, or what the depot says, or kNoRoom: the
// pool has none.
int xmem_jittor_bring_back(long long address) {
    auto* var = (Var*)address;
    Piece* piece = piece_of(var);
    if (!piece || !piece->away) return 0;
    auto* pool = get_allocator();
    size_t allocation = 0;
    char* memory = nullptr;
    try {
        memory = (char*)pool->alloc(var->size, allocation);
    } catch (const std::exception&) {  // beyond the limit, or the system has no more
    }
    if (!memory) return kNoRoom;
    if (piece->here || pool->is_cuda()) {
        copy(memory, piece->here ? piece->here : piece->away, var->size, pool);
    } else if (const int error =
                   piece->store.get(piece->store.depot, piece->number, memory, piece->size)) {
        pool->free(memory, var->size, allocation);
        return error;
    }
    bool first = true;
    for (auto* other : Finder{var, nullptr}.all(var, *piece)) {
        auto* place = (char*)other->mem_ptr;
        auto* base = is_in(place, piece->here, piece->size) ? piece->here : piece->away;
        const size_t id = other->allocation;
        if (!first) pool->share_with(other->size, allocation);
        first = false;
        const int64 offset = place - base;
        streamed().free(place, other->size, id);
        other->mem_ptr = memory + offset;
        other->allocator = pool;
        other->allocation = allocation;
    }
    return 0;
}

// 0: in the pool like any other. 1: away. 2: away, and brought in.
int xmem_jittor_where(long long address) {
    Piece* piece = piece_of((Var*)address);
    if (!piece || !piece->away) return 0;
    return piece->here ? 2 : 1;
}

// Makes an operation that returns `gate` (see MoveOp) and the address of its output, which lives
// until xmem_jittor_move_taken() is called: until then it has to be wrapped.
long long xmem_jittor_move(long long gate, const long long* vars, int count, const long long* ahead,
                           int ahead_count, int comes, int back) {
    auto* op = new MoveOp(comes, back);
    for (int i = 0; i < count; i++) op->moved.emplace_back((Var*)vars[i]);
    for (int i = 0; i < ahead_count; i++) op->ahead.emplace_back((Var*)ahead[i]);
    waiting().push_back(op->after((Var*)gate));
    return (long long)waiting().back().ptr;
}

// How many times a parameter could not be read; of the last: code, bytes, address of the depot.
void xmem_jittor_move_failure(long long* found) { std::memcpy(found, &failure, sizeof failure); }

void xmem_jittor_move_taken() { waiting().clear(); }

// Bytes away, of these in the pool now and at most since the last call, read in so far; pieces.
void xmem_jittor_streamed(long long* found) {
    const long long values[] = {away_bytes, brought_in, peak_brought_in, read_in_bytes,
                                (long long)streamed().pieces.size()};
    std::memcpy(found, values, sizeof values);
    peak_brought_in = brought_in;
}
}
