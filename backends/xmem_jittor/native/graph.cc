// What a piece of Jittor's lazily built graph reads, without executing it (Jittor 1.3.11).
#include <unordered_map>
#include <vector>

#include "graph.h"
#include "op.h"
#include "pyjt/py_converter.h"
#include "var.h"
#include "var_holder.h"

using namespace jittor;

namespace {

std::vector<Node*> start(const long long* outputs, int count, int64 tag) {
    std::vector<Node*> queue;
    for (int i = 0; i < count; i++) {
        auto* node = (Node*)outputs[i];
        if (node->tflag == tag) continue;
        node->tflag = tag;
        queue.push_back(node);
    }
    return queue;
}

}  // namespace

extern "C" {

// The number of nodes made so far; ids grow with creation.
long long xmem_jittor_total_node() { return total_node; }

// Collects the Vars with id <= newest that the nodes made after it read, on the way back from
// `outputs`; `stops` and what lies behind them are left out. A Var made after `newest` that has
// been executed already may have lost its inputs: then *executed is 1 and the answer incomplete.
// Returns how many there are, of which at most `capacity` are written.
int xmem_jittor_read_by(const long long* outputs, int output_count, long long newest,
                        const long long* stops, int stop_count, long long* found, int capacity,
                        int* executed) {
    auto tag = ++tflag_count;
    for (int i = 0; i < stop_count; i++) ((Node*)stops[i])->tflag = tag;
    auto queue = start(outputs, output_count, tag);
    int count = 0;
    *executed = 0;
    for (size_t i = 0; i < queue.size(); i++) {
        Node* node = queue[i];
        if (node->is_var() && node->id <= newest) {
            if (count < capacity) found[count] = (long long)node;
            count++;
            continue;
        }
        if (node->is_var() && node->is_finished()) *executed = 1;
        for (auto& input : node->_inputs) {
            if (input.node->tflag == tag) continue;
            input.node->tflag = tag;
            queue.push_back(input.node);
        }
    }
    return count;
}

// Says for each candidate whether gradients flow from `outputs` back to it.
void xmem_jittor_reached_by_gradient(const long long* outputs, int output_count,
                                     const long long* candidates, int candidate_count,
                                     int* reached) {
    auto tag = ++tflag_count;
    auto queue = start(outputs, output_count, tag);
    for (size_t i = 0; i < queue.size(); i++) {
        if (queue[i]->is_stop_grad()) continue;
        for (auto& input : queue[i]->_inputs) {
            if (input.node->tflag == tag || input.node->is_stop_grad()) continue;
            input.node->tflag = tag;
            queue.push_back(input.node);
        }
    }
    for (int i = 0; i < candidate_count; i++) reached[i] = ((Node*)candidates[i])->tflag == tag;
}

// Finds the Python objects that hold Vars: object k holds vars[owners[k]]. `type` is the Python
// type jittor.Var; holders that live inside C++ are told from objects by it.
int xmem_jittor_handles(const long long* vars, int var_count, void* type, int* owners,
                        long long* objects, int capacity) {
    std::unordered_map<Var*, int> wanted;
    for (int i = 0; i < var_count; i++) wanted[(Var*)vars[i]] = i;
    int count = 0;
    for (auto* holder : hold_vars) {
        auto found = wanted.find(holder->var);
        if (found == wanted.end()) continue;
        auto* object = GET_OBJ_FROM_RAW_PTR(holder);
        if ((void*)object->ob_type != type) continue;
        if (count < capacity) {
            owners[count] = found->second;
            objects[count] = (long long)object;
        }
        count++;
    }
    return count;
}
}
