// What our pools note of each allocation, and for which tensor it is (Jittor 1.3.11).
//
// Every live allocation knows when it was born and its category, so that bytes can still move
// between categories in the picture of the last peak: an allocation that lives now and was born
// before the peak was there at the peak.
#pragma once
#include <cstddef>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "op.h"
#include "var.h"

namespace jittor {
namespace {

constexpr int kCategories = 16;
constexpr int kTemporary = 0;

struct Record {
    int64 requested = 0;
    int64 birth = 0;  // counts allocations
    int64 node = 0;   // the tensor it was made for, or the newest node then
    int category = kTemporary;
    bool live = false;
};

// What tensors are allocated for, beside their bytes; shared by all pools.
struct Expectations {
    std::unordered_map<int64, int> category_by_node;  // gradients that have not been computed yet
    std::deque<int64> backward_marks;                 // the last node of each forward
    int64 last_mark = -1;                             // of the latest one; -1: nobody marks
    int activation = kTemporary;                      // the code of the category "activation"
} expectations;

void* var_vtable = nullptr;

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
constexpr size_t kAllocationOffset = offsetof(Var, allocation);
#pragma GCC diagnostic pop

// The Var that an allocation is for, or nullptr.
//
// Var::alloc calls `allocator->alloc(size, this->allocation)`, so the address of the second
// argument gives the Var. Other callers (arrays from NumPy, migrations, workspaces) pass other
// places, so what would be the Var is believed only if it has the vtable of a Var and the state
// that Var::alloc calls in. For those callers this reads up to sizeof(Var) bytes before their
// variable, which are their own object or the stack.
Var* var_behind(size_t& allocation, size_t size) {
    auto* candidate = reinterpret_cast<char*>(&allocation) - kAllocationOffset;
    void* vtable;
    memcpy(&vtable, candidate, sizeof(vtable));
    if (!var_vtable || vtable != var_vtable) return nullptr;
    auto* var = reinterpret_cast<Var*>(candidate);
    bool waits = var->is_var() && !var->mem_ptr && !var->allocator && var->size == (int64)size &&
                 var->id > 0 && var->id <= total_node;
    return waits ? var : nullptr;
}

bool is_view(Op* op) {
    const std::string name = op->name();
    return name == "clone" || name == "reshape" || name == "tape" || name == "xmem_move";
}

// A view allocates nothing; the tensor behind it will.
void expect(Var* var, int category) {
    while (true) {
        expectations.category_by_node[var->id] = category;
        Op* op = var->input();
        if (!op || !is_view(op) || op->inputs().size() == 0) return;
        var = op->inputs().front();
        if (var->mem_ptr) return;
    }
}

}  // namespace
}  // namespace jittor
