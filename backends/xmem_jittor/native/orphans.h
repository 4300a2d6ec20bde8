// Holders that an error left in Jittor's list while they were being made (Jittor 1.3.11).
//
// In eager mode, and with 100000 operations pending, the constructor of a holder runs the graph
// after it has entered itself into `hold_vars`. If that throws, the holder's memory is freed and the
// entry stays: the next `sync_all` reads freed memory. Goes when Jittor's VarHolder takes itself
// out of the list. Only holders in no Python object can be in their constructor.
#pragma once
#include <cstring>
#include <vector>

#include "graph.h"
#include "op.h"
#include "var_holder.h"

namespace jittor {

DECLARE_FLAG(int, lazy_execution);
EXTERN_LIB list<VarHolder*>::iterator sync_ptr;

namespace {

constexpr int64 kOperations = 100000;  // as in add_hold_vars

const void* holder_type = nullptr;  // jt.Var; a holder lies behind the head of its Python object
std::vector<Var*> orphans;

bool is_in_python(VarHolder* holder) {
    const void* type;
    memcpy(&type, (char*)holder - sizeof(void*), sizeof(type));
    return type == holder_type;
}

// Called when a request is refused, before the error is thrown.
void unlink_orphan() {
    if (!holder_type || hold_vars.empty()) return;
    if (lazy_execution && Op::number_of_lived_ops < kOperations) return;
    auto newest = hold_vars.begin();
    if (is_in_python(*newest)) return;
    orphans.push_back((*newest)->var);
    if (sync_ptr == newest) sync_ptr = std::next(sync_ptr);
    hold_vars.erase(newest);
}

// Not while a graph runs.
void release_orphans() {
    SetupFreeBuffer buffer;
    for (auto* var : orphans) {
        var->holder = nullptr;
        var->release_both_liveness();
    }
    orphans.clear();
}

}  // namespace
}  // namespace jittor
