// What a piece of Jittor's lazily built graph reads, without executing it (Jittor 1.3.11).
#include <list>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "graph.h"
#include "init.h"
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

void follow(Node* node, std::vector<Node*>& queue, int64 tag) {
    for (auto& input : node->_inputs) {
        if (input.node->tflag == tag) continue;
        input.node->tflag = tag;
        queue.push_back(input.node);
    }
}

long long seedings = 0;
void count_seeding(int) { seedings++; }

// Stands between gradients and what they depend on, and raises when it is differentiated. Like
// Jittor's Tapes, which however forgets its callback when that raises.
struct Refusal final : Op {
    PyObject* raise;

    explicit Refusal(PyObject* raise) : raise(raise) {
        flags.set(NodeFlags::_cpu);
        flags.set(NodeFlags::_cuda);
        flags.set(NodeFlags::_grads);
        flags.set(NodeFlags::_manual_set_vnbb);
    }
    const char* name() const override { return "xmem_refusal"; }
    void grads(Var**, VarPtr*) override {
        Py_XDECREF(PyObject_CallNoArgs(raise));
        throw std::runtime_error("second derivatives are refused");
    }
};

bool is_refusal(Node* node) {
    return !node->is_var() && std::string(node->op()->name()) == "xmem_refusal";
}

// Goes back along gradients and finds the tensors that somebody may differentiate with respect to:
// those that Python holds and that do not depend on another such tensor.
struct Walk {
    int64 held = 0, seen = 0;
    std::unordered_set<Node*> dependent;  // on a source
    std::vector<Node*> sources;
    std::vector<Node*> refusals;  // results of earlier refusals, which are not passed

    Walk() {
        held = ++tflag_count;
        for (auto* holder : hold_vars) holder->var->tflag = held;
        seen = ++tflag_count;
    }

    void go(Node* start, bool pass_refusals, bool start_is_source) {
        struct Step {
            Node* node;
            bool held, entered;
        };
        std::vector<Step> stack{{start, false, false}};
        while (!stack.empty()) {
            auto& step = stack.back();
            Node* node = step.node;
            if (!step.entered) {
                if (node->tflag == seen || node->is_stop_grad()) {
                    stack.pop_back();
                    continue;
                }
                step.entered = true;
                step.held = node->tflag == held && (start_is_source || node != start);
                node->tflag = seen;
                bool refused = node->is_var() && !node->_inputs.empty() &&
                               is_refusal(node->_inputs.front().node);
                if (refused && !pass_refusals) {
                    refusals.push_back(node);
                    dependent.insert(node);
                    stack.pop_back();
                    continue;
                }
                for (auto& input : node->_inputs) stack.push_back({input.node, false, false});
                continue;
            }
            bool depends = false;
            for (auto& input : node->_inputs) depends |= dependent.count(input.node) > 0;
            if (!depends && step.held && node->is_var() && node->var()->is_float()) {
                sources.push_back(node);
                depends = true;
            }
            if (depends) dependent.insert(node);
            stack.pop_back();
        }
    }
};

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
        follow(node, queue, tag);
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

// The Var without memory through which gradients of a taped output come to its operation, or 0.
long long xmem_jittor_tape_of(long long var) {
    Op* op = ((Var*)var)->input();
    if (!op || std::string(op->name()) != "tape" || op->_inputs.size() < 2) return 0;
    return (long long)op->_inputs.back().node;
}

// The operation that makes a Var, or 0.
long long xmem_jittor_maker_of(long long var) { return (long long)((Var*)var)->input(); }

// Lets an operation depend on what a taped Var stands for on the tape instead of on the Var, so that
// the Var's memory is not kept for it. An operation that has run already is left as it is: Jittor
// refuses to change its inputs, and a hook that waits for a block's output is all that comes here.
void xmem_jittor_let_go(long long operation, long long taped) {
    auto* op = (Node*)operation;
    if (op->is_finished()) return;
    auto* var = (Node*)taped;
    std::list<Node*> inputs;
    bool found = false;
    for (auto& input : op->_inputs) {
        auto* node = input.node;
        if (node == var) {
            found = true;
            auto* place = (Node*)xmem_jittor_tape_of(taped);
            if (!place) return;
            node = place;
        }
        inputs.push_back(node);
    }
    if (!found) return;
    SetupFreeBuffer setup_free_buffer;
    // set_inputs lets go of the old inputs before it takes the new ones; whatever only this
    // operation keeps, and the operation itself, would be freed in between.
    std::vector<Node*> kept(inputs.begin(), inputs.end());
    kept.push_back(op);
    for (auto* node : kept) node->own_both_liveness();
    op->set_inputs(inputs);
    for (auto* node : kept) node->release_both_liveness();
}

// Says whether a Var, made without gradients, may come from an older one that asks for some.
// Detaching marks an operation; no_grad marks Vars only.
int xmem_jittor_may_depend(long long var, long long newest) {
    auto queue = start(&var, 1, ++tflag_count);
    auto tag = tflag_count;
    for (size_t i = 0; i < queue.size(); i++) {
        Node* node = queue[i];
        bool old = node->is_var() && node->id <= newest;
        if (old && node->var()->is_float() && !node->is_stop_grad()) return 1;
        if (old || (!node->is_var() && node->is_stop_grad())) continue;
        if (node->is_var() && node->is_finished()) return 1;  // it may have lost its inputs
        follow(node, queue, tag);
    }
    return 0;
}

// Says whether an operation of one of the names, with its kind, was built after a node.
static int built_of(const long long* outputs, int output_count, long long newest,
                    const std::vector<std::string>& names) {
    auto queue = start(outputs, output_count, ++tflag_count);
    auto tag = tflag_count;
    for (size_t i = 0; i < queue.size(); i++) {
        Node* node = queue[i];
        if (node->id <= newest) continue;
        if (!node->is_var()) {
            const std::string name = node->op()->name_ex();
            for (const auto& wanted : names)
                if (name == wanted || name.rfind(wanted + ".", 0) == 0) return 1;
        }
        follow(node, queue, tag);
    }
    return 0;
}

// Says whether the nodes made after `newest` draw random numbers of Jittor's own stream.
int xmem_jittor_draws(const long long* outputs, int output_count, long long newest) {
    return built_of(outputs, output_count, newest, {"random", "curand_random"});
}

// Says whether what was built after a node may find its gradient by comparing its input with its
// output: pooling and other kernels in code, and reductions to an extreme.
int xmem_jittor_compares(const long long* outputs, int output_count, long long newest) {
    return built_of(outputs, output_count, newest, {"code", "reduce.maximum", "reduce.minimum"});
}

// Lets `raise` be called, which sets a Python error, when somebody differentiates the results
// (outputs of `tape`) with respect to a tensor that the operation behind `taped` (an output of it)
// or one of the gradients depends on.
//
// Only tensors that Python holds and that nothing held leads to (parameters, inputs) are tied to the
// results. A tensor in between would be kept alive by the tie; those live as long as they are held.
// What an earlier refusal is tied to is reached through that one, so that the number of ties stays
// in proportion to the model.
void xmem_jittor_refuse(long long taped, const long long* gradients, int gradient_count,
                        const long long* results, int result_count, PyObject* raise) {
    Walk walk;
    for (int i = 0; i < gradient_count; i++) walk.go((Node*)gradients[i], false, false);
    auto sources = walk.refusals;
    sources.insert(sources.end(), walk.sources.begin(), walk.sources.end());
    for (auto* refusal : walk.refusals) {
        for (auto& input : refusal->_inputs) walk.go(input.node, true, false);
    }
    const auto covered = walk.sources.size();
    walk.go((Node*)taped, true, false);
    sources.insert(sources.end(), walk.sources.begin() + covered, walk.sources.end());
    if (sources.empty()) return;
    auto* refusal = new Refusal(raise);
    for (int i = 0; i < result_count; i++) {
        auto* result = (Var*)results[i];
        VarPtr out(0, result->dtype());
        out->add_inputs(std::vector<Node*>{refusal});
        result->input()->add_inputs(std::vector<Node*>{out.ptr});
    }
    refusal->add_inputs(sources);
    for (int i = 0; i < result_count; i++) ((Var*)results[i])->input()->input(0)->set_stop_grad();
}

// How often Jittor has been seeded; counted from the first call.
long long xmem_jittor_seedings() {
    static bool counting = false;
    if (!counting) {
        counting = true;
        add_set_seed_callback(count_seeding);
    }
    return seedings;
}
}
