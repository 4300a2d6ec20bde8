// Takes the memory of a tensor away while a graph runs, and gives it back (Jittor 1.3.11).
//
// The tensor keeps its place in the graph, where backward reads it; between the two calls nothing
// may. Which tensors are views of it must be found while the graph is built (saving.cc): once Jittor
// has run an operation that nobody differentiates any more, it cuts it off.
#include "mem/allocator.h"
#include "var.h"

using namespace jittor;

extern "C" {

// Called by an operation. Others in the same memory (the value that this is a view of) keep it.
void xmem_jittor_empty(Var* var) {
    if (!var->mem_ptr) return;
    var->allocator->free(var->mem_ptr, var->size, var->allocation);
    var->mem_ptr = nullptr;
}

// Called by an operation.
void xmem_jittor_refill(Var* var, Var* source) {
    if (var->mem_ptr) return;
    source->allocator->share_with(var->size, source->allocation);
    var->mem_ptr = source->mem_ptr;
    var->allocator = source->allocator;
    var->allocation = source->allocation;
}
}
