// What a lazily built piece of Jittor's graph reads, without executing it (Jittor 1.3.11).
#include <vector>

#include "graph.h"
#include "op.h"
#include "var.h"
#include "var_holder.h"

using namespace jittor;

extern "C" {

// The number of nodes made so far; ids grow with creation.
long long xmem_jittor_total_node() { return total_node; }

// Collects the differentiable Vars with id <= newest that the nodes made after it read, on the way
// from `outputs` back; `stops` and what lies behind them are left out. Returns how many there are,
// of which at most `capacity` are written.
int xmem_jittor_external(const long long* outputs, int output_count, long long newest,
                         const long long* stops, int stop_count, long long* found, int capacity) {
    std::vector<Node*> queue;
    auto tag = ++tflag_count;
    for (int i = 0; i < stop_count; i++) ((Node*)stops[i])->tflag = tag;
    for (int i = 0; i < output_count; i++) {
        auto* node = (Node*)outputs[i];
        if (node->tflag == tag) continue;
        node->tflag = tag;
        queue.push_back(node);
    }
    int count = 0;
    for (size_t i = 0; i < queue.size(); i++) {
        Node* node = queue[i];
        if (node->is_stop_grad()) continue;
        if (node->is_var() && node->id <= newest) {
            if (!((Var*)node)->is_float()) continue;
            if (count < capacity) found[count] = (long long)node;
            count++;
            continue;
        }
        for (auto& input : node->_inputs) {
            if (input.node->tflag == tag) continue;
            input.node->tflag = tag;
            queue.push_back(input.node);
        }
    }
    return count;
}
}
