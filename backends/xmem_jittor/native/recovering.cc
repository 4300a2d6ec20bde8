// After an execution that failed: what its tensors were before, and what would fail again
// (Jittor 1.3.11).
//
// A failed execution leaves its graph behind: what ran is finished, the rest is pending and runs
// when something asks for it. A parameter whose update is pending can still be put back, since what
// it was is an input of that graph.
#include <algorithm>
#include <unordered_set>
#include <vector>

#include "graph.h"
#include "op.h"
#include "var.h"
#include "var_holder.h"

using namespace jittor;

namespace jittor {
EXTERN_LIB list<VarPtr> fetcher;  // from fetch_op.cc
}

namespace {

// What is dropped is freed at the end, not one inside the other.
int drop_pending_fetches() {
    SetupFreeBuffer buffer;
    const int before = jittor::fetcher.size();
    jittor::fetcher.remove_if([](const VarPtr& var) { return !var.ptr->is_finished(); });
    return before - (int)jittor::fetcher.size();
}

}  // namespace

extern "C" {

int xmem_jittor_is_pending(long long var) { return !((Var*)var)->is_finished(); }

// found: for each id (they are sorted) the address of the tensor with that node id, where it is there
// and something pending will be computed from it, else 0.
void xmem_jittor_values_before(const long long* pending, int count, const long long* ids, int many,
                               long long* found) {
    std::vector<Node*> queue;
    const auto tag = ++tflag_count;
    auto visit = [&](Node* node) {
        if (node->tflag == tag) return;
        node->tflag = tag;
        if (!node->is_finished()) {
            queue.push_back(node);
            return;
        }
        if (!node->is_var() || !node->var()->mem_ptr) return;
        auto* place = std::lower_bound(ids, ids + many, (long long)node->id);
        if (place != ids + many && *place == node->id) found[place - ids] = (long long)node;
    };
    std::fill(found, found + many, 0);
    for (int i = 0; i < count; i++) visit((Node*)pending[i]);
    for (size_t i = 0; i < queue.size(); i++)
        for (auto& input : queue[i]->_inputs) visit(input.node);
}

// Where each of these tensors lies; 0 where it has no memory.
void xmem_jittor_memory_of(const long long* vars, int count, long long* memory) {
    for (int i = 0; i < count; i++) memory[i] = (long long)((Var*)vars[i])->mem_ptr;
}

// How many tensors that Python holds are not computed.
int xmem_jittor_pending() {
    int count = 0;
    for (auto* holder : hold_vars) count += !holder->var->is_finished();
    return count;
}

// Forgets callbacks (jt.fetch) that wait for what failed; returns how many.
int xmem_jittor_drop_fetches() { return drop_pending_fetches(); }
}
