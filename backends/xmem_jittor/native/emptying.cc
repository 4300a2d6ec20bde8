// Takes the memory of a tensor away while a graph runs, and gives it back (Jittor 1.3.11).
//
// The tensor keeps its place in the graph, where backward reads it; between the two calls nothing
// may. Which tensors are views of it must be found while the graph is built: once Jittor has run an
// operation that nobody differentiates any more, it cuts it off.
#include <string>
#include <vector>

#include "mem/allocator.h"
#include "op.h"
#include "var.h"

using namespace jittor;

namespace {

bool is_view(Op* op) {
    const std::string name = op->name();
    return name == "clone" || name == "reshape" || name == "tape" || name == "xmem_move";
}

}  // namespace

extern "C" {

// Collects a Var and the views that are made of it, without `end` and what is made of that. Returns
// how many there are, of which at most `capacity` are written.
int xmem_jittor_views(long long var, long long end, long long* found, int capacity) {
    auto tag = ++tflag_count;
    ((Var*)end)->tflag = tag;
    ((Var*)var)->tflag = tag;
    std::vector<Var*> views{(Var*)var};
    for (size_t i = 0; i < views.size(); i++) {
        if ((int)i < capacity) found[i] = (long long)views[i];
        for (Op* op : views[i]->outputs()) {
            if (!is_view(op)) continue;
            for (Var* view : op->outputs()) {
                if (view->tflag == tag) continue;
                view->tflag = tag;
                views.push_back(view);
            }
        }
    }
    return views.size();
}

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
