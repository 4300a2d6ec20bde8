// What Python holds, and what that keeps alive behind it (Jittor 1.3.11). Runs nothing.
#include <vector>

#include "op.h"
#include "pyjt/py_converter.h"
#include "var.h"
#include "var_holder.h"

using namespace jittor;

extern "C" {

// Writes the addresses of the Python objects that hold Vars. `type` is the Python type jittor.Var;
// holders inside C++ are told from objects by it. Returns how many there are, of which at most
// `capacity` are written.
int xmem_jittor_held_objects(void* type, long long* objects, int capacity) {
    int count = 0;
    for (auto* holder : hold_vars) {
        auto* object = GET_OBJ_FROM_RAW_PTR(holder);
        if ((void*)object->ob_type != type) continue;
        if (count < capacity) objects[count] = (long long)object;
        count++;
    }
    return count;
}

// Writes the numbers of the operations that a Var keeps alive, that which made it first. *is_pending:
// nothing of what leads to it has been computed. (A value inside a fused kernel never counts as
// computed, so the Var alone does not tell.)
int xmem_jittor_behind(long long var, long long* numbers, int capacity, int* is_pending) {
    auto tag = ++tflag_count;
    std::vector<Node*> queue{(Node*)var};
    queue[0]->tflag = tag;
    int count = 0;
    *is_pending = !queue[0]->is_finished();
    for (size_t i = 0; i < queue.size() && count < capacity; i++) {
        auto* node = queue[i];
        if (!node->is_var()) numbers[count++] = node->id;
        if (node->is_var() && node->is_finished() && !node->_inputs.empty()) *is_pending = 0;
        for (auto& input : node->_inputs) {
            if (input.node->tflag == tag) continue;
            input.node->tflag = tag;
            queue.push_back(input.node);
        }
    }
    return count;
}
}
