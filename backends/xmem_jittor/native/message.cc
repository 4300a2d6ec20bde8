// An operation on Jittor's lazy graph that calls a function, without a kernel of its own to compile
// (Jittor 1.3.11). `jt.code` compiles one for every combination of types and dimensions.
#include <cstring>

#include "mem/allocator/sfrl_allocator.h"
#include "mpi_reduce.h"
#include "op.h"
#include "var.h"
#include "var_holder.h"

namespace jittor {
extern bool no_grad;
}

using namespace jittor;

namespace {

typedef void (*Run)(const long long* numbers, const void* from, void* to);
const int NUMBERS = 7;

// Where a result lies: in new memory; in that of the first input, which has its value; or there if
// nobody else can read that any more when it runs, and else in new memory.
enum Memory { NEW, SHARED, TAKEN };

// What is done with the inputs: nothing; the function gets the first; all are copied one after
// another.
enum Reads { NONE, FIRST, ALL };

struct MessageOp final : Op {
    Run function;
    long long numbers[NUMBERS] = {};
    Reads reads;
    Memory memory;
    bool has_token = false;
    int handles;  // of the first input in Python, which do not count as readers

    MessageOp(Run function, const long long* given, Reads reads, Memory memory, int handles)
        : function(function), reads(reads), memory(memory), handles(handles) {
        if (given) std::memcpy(numbers, given, sizeof numbers);
        // What calls nothing runs anywhere; else Jittor brings a GPU's tensors here and back.
        flags.set(NodeFlags::_cpu, 1);
        flags.set(NodeFlags::_cuda, !function && reads != ALL);
        flags.set(NodeFlags::_manual_set_vnbb);
    }
    const char* name() const override { return "xmem_message"; }
    void run() override {
        if (memory == TAKEN) take();
        auto* found = (char*)output(0)->mem_ptr;
        if (function) function(numbers, reads == FIRST ? input(0)->mem_ptr : nullptr, found);
        for (auto* var : inputs()) {
            if (reads != ALL) break;
            std::memcpy(found, var->mem_ptr, var->size);
            found += var->size;
        }
        if (has_token) *(int*)output(1)->mem_ptr = 0;
    }

   private:
    void take() {
        auto *before = input(0), *after = output(0);
        if (after->mem_ptr != before->mem_ptr || is_last(before, after)) return;
        auto* allocator = after->allocator;
        allocator->free(after->mem_ptr, after->size, after->allocation);
        after->mem_ptr = nullptr;
        after->allocator = nullptr;
        after->allocation = 0;
        after->alloc(allocator);
    }
    // Readers that have not run, graphs that are kept and handles each keep a tensor alive by one;
    // views that are there share its memory.
    bool is_last(Var* before, Var* after) {
        auto* pool = dynamic_cast<SFRLAllocator*>(after->allocator);
        if (!pool) return false;
        if (CachingBlockPool::occupied_id_mapper[after->allocation]->share_times != 1) return false;
        int own = handles;
        for (auto& reader : before->_outputs) own += reader.node == this;
        return before->backward_liveness <= own;
    }
};

// Outputs between their making and their wrapping.
vector<VarPtr>& waiting() {
    static auto* all = new vector<VarPtr>;
    return *all;
}

// Puts an operation into the graph; see xmem_jittor_message().
void append(
    MessageOp* op, const vector<Var*>& inputs, const NanoVector& shape, NanoString dtype,
    long long offset, bool with_token, long long* outputs) {
    auto* result = op->create_output(shape, dtype);
    result->flags.set(NodeFlags::_stop_fuse);
    if (op->memory != NEW) result->share_with(inputs[0], offset);
    op->has_token = with_token;
    if (with_token) op->create_output(NanoVector(1), NanoString("int32"));
    auto made = move(op->outputs_holder);
    for (auto& output : made) output->set_inputs({op});
    op->add_inputs(inputs);
    op->init();
    for (auto& output : made) {
        *outputs++ = (long long)output.ptr;
        waiting().push_back(move(output));
    }
}

}  // namespace

extern "C" {

// Makes the operation, which calls `function` (if any) when its inputs are there.
//
// It waits for all `inputs`, and reads what `reads` says. Its result has a shape and a type; with a
// `memory` that is not NEW it has the bytes of the first input from an offset on. Where `with_token`
// there is a second output, one int32, which is 0. Writes the addresses of the outputs, which live
// until xmem_jittor_message_taken() is called: until then they have to be wrapped.
void xmem_jittor_message(
    void* function, const long long* numbers, const long long* inputs, int count, int reads,
    int memory, int handles, long long offset, const long long* shape, int dimensions,
    const char* dtype, int with_token, long long* outputs) {
    auto* op = new MessageOp((Run)function, numbers, (Reads)reads, (Memory)memory, handles);
    NanoVector sizes;
    for (int i = 0; i < dimensions; i++) sizes.push_back(shape[i]);
    vector<Var*> read;
    for (int i = 0; i < count; i++) read.push_back((Var*)inputs[i]);
    const bool before = no_grad;
    no_grad = true;
    append(op, read, sizes, NanoString(dtype), offset, with_token, outputs);
    no_grad = before;
}

// Writes the addresses of views of `flat`, one after another, in the shapes of others.
void xmem_jittor_split(long long flat, const long long* like, int count, long long* views) {
    const bool before = no_grad;
    no_grad = true;
    long long offset = 0;
    for (int i = 0; i < count; i++) {
        auto* op = new MessageOp(nullptr, nullptr, NONE, SHARED, 0);
        auto* other = (Var*)like[i];
        append(op, {(Var*)flat}, other->shape, ((Var*)flat)->dtype(), offset, false, views + i);
        offset += other->num * ((Var*)flat)->dsize();
    }
    no_grad = before;
}

// For an operation: float32 to bfloat16, to nearest, ties to even; numbers[0] of them. Jittor's own
// cast on a CPU cuts the rest off.
void xmem_jittor_to_bfloat16(const long long* numbers, const void* from, void* to) {
    xmem::narrow((const float*)from, (xmem::Brain*)to, numbers[0]);
}

void xmem_jittor_message_taken() { waiting().clear(); }
}
