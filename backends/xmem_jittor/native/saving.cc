// What a piece of Jittor's lazily built graph leaves for its backward, and where it is kept with the
// fewest bytes (Jittor 1.3.11).
//
// Backward reads tensors that forward made. Those that come from others by elementwise operations
// are computed again by the kernels that read them, as Jittor does anyway; so what has to be kept is
// any set of tensors that lies on all ways to what is read: a minimum cut. What a matmul or a
// convolution reads is made by a kernel of its own before it; where that is elementwise too, it is
// remade from the cut by operations that are built anew (`Recipe`).
#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "op.h"
#include "ops/broadcast_to_op.h"
#include "ops/code_op.h"
#include "ops/op_register.h"
#include "pyjt/py_converter.h"
#include "var.h"
#include "var_holder.h"

using namespace jittor;

namespace {

constexpr long long INFINITE = 1ll << 60;
enum Kind { PACK = 0, EXACT = 1, GIVEN = 2, REMAKE = 3 };

bool is_view(Op* op) {
    const std::string name = op->name();
    return name == "clone" || name == "reshape" || name == "tape" || name == "xmem_move";
}

// The gradients of these depend on which of two values is larger: they need the very same values.
bool compares(Op* op) {
    static const std::unordered_set<std::string> names{
        "binary.less", "binary.less_equal", "binary.greater", "binary.greater_equal",
        "binary.equal", "binary.not_equal", "arg_reduce", "argsort"};
    const std::string name = op->name_ex();
    if (name.rfind("code", 0) == 0)  // a kernel of somebody's, unless it only casts
        return static_cast<CodeOp*>(op)->cpu_src.find("_mm256_cvt") == std::string::npos;
    for (const auto& wanted : names)
        if (name == wanted || name.rfind(wanted + ".", 0) == 0) return true;
    return false;
}

bool is_comparison(Op* op) { return op->outputs().size() == 1 && op->output(0)->dtype() == ns_bool; }

bool is_elementwise(Op* op) {
    const std::string name = op->name();
    return name == "unary" || name == "binary" || name == "ternary";
}

// Whether an operation spreads its input over more elements, which then are in no memory.
bool spreads(Op* op) {
    if (op->type() != OpType::broadcast) return false;
    for (Var* input : op->inputs())
        if (input->num >= op->output(0)->num) return false;
    return true;
}

struct Piece {
    long long first, newest;
    std::unordered_set<Node*> entries;

    bool inside(Node* node) const { return node->id > first && node->id <= newest; }

    // The tensor whose memory this is, as far as it was made in the piece. Null: it comes from
    // outside (a parameter), which is kept anyway.
    Var* base(Var* var) const {
        while (inside(var)) {
            if (entries.count(var) || var->is_finished()) return var;
            Op* op = var->input();
            // Constants are part of the kernels that read them.
            if (op && op->name() == std::string("array")) return nullptr;
            if (!op || !is_view(op)) return var;
            var = op->inputs().front();
        }
        return nullptr;
    }
};

struct Network {
    struct Edge {
        int to;
        long long capacity;
    };
    std::vector<Edge> edges;
    std::vector<std::vector<int>> at;

    int add_node() {
        at.emplace_back();
        return at.size() - 1;
    }
    void connect(int from, int to, long long capacity) {
        at[from].push_back(edges.size());
        edges.push_back({to, capacity});
        at[to].push_back(edges.size());
        edges.push_back({from, 0});
    }
    // Sends what goes from a source to a sink; ways that are found are shortest ones.
    void saturate(int source, int sink) {
        while (true) {
            std::vector<int> by(at.size(), -1);
            std::deque<int> queue{source};
            while (!queue.empty() && by[sink] < 0) {
                int node = queue.front();
                queue.pop_front();
                for (int e : at[node])
                    if (edges[e].capacity > 0 && by[edges[e].to] < 0 && edges[e].to != source) {
                        by[edges[e].to] = e;
                        queue.push_back(edges[e].to);
                    }
            }
            if (by[sink] < 0) return;
            long long least = INFINITE;
            for (int node = sink; node != source; node = edges[by[node] ^ 1].to)
                least = std::min(least, edges[by[node]].capacity);
            for (int node = sink; node != source; node = edges[by[node] ^ 1].to) {
                edges[by[node]].capacity -= least;
                edges[by[node] ^ 1].capacity += least;
            }
        }
    }
    // Says which nodes still lead to a sink.
    std::vector<bool> leading_to(int sink) const {
        std::vector<bool> found(at.size());
        std::deque<int> queue{sink};
        found[sink] = true;
        while (!queue.empty()) {
            int node = queue.front();
            queue.pop_front();
            for (int e : at[node]) {
                int from = edges[e].to;
                if (found[from] || edges[e ^ 1].capacity <= 0) continue;
                found[from] = true;
                queue.push_back(from);
            }
        }
        return found;
    }
};

struct Cut {
    const Piece& piece;
    const std::unordered_set<Node*>& given;  // kept anyway
    const std::unordered_set<Node*>& exact;
    Network network;
    int source, sink;
    std::unordered_map<Var*, int> number;  // of a tensor's first node; the second one follows
    std::vector<Var*> tensors;
    std::unordered_set<Var*> spread;  // by a matmul or a convolution: in memory when that runs
    std::vector<Var*> remade;

    Cut(const Piece& piece, const std::unordered_set<Node*>& given,
        const std::unordered_set<Node*>& exact)
        : piece(piece), given(given), exact(exact) {
        source = network.add_node();
        sink = network.add_node();
    }

    long long cost(Var* var) const {
        if (given.count(var) || exact.count(var)) return 0;
        Op* op = var->input();
        if (op && spreads(op) && !piece.entries.count(var)) return INFINITE / 4;
        if (var->dtype() == ns_bool) return var->num / 8 + 1;
        return var->is_float() ? var->num + 1 : (long long)var->size + 1;
    }

    int node(Var* var, std::vector<Var*>& queue) {
        auto found = number.find(var);
        if (found != number.end()) return found->second;
        int at = network.add_node();
        network.add_node();
        number[var] = at;
        tensors.push_back(var);
        network.connect(at, at + 1, cost(var));
        queue.push_back(var);
        return at;
    }

    void build(const std::vector<Var*>& read) {
        std::vector<Var*> queue;
        for (Var* var : read) network.connect(node(var, queue) + 1, sink, INFINITE);
        std::unordered_set<Var*> sources;
        for (size_t i = 0; i < queue.size(); i++) {
            Var* var = queue[i];
            int at = number[var];
            Op* op = var->input();
            bool passes = op && !piece.entries.count(var) && !var->is_finished() &&
                          (is_elementwise(op) || spreads(op)) &&
                          !is_comparison(op) && !exact.count(var) && !given.count(var) &&
                          !var->flags.get(NodeFlags::_stop_fuse);
            if (!passes) {
                if (sources.insert(var).second) network.connect(source, at, INFINITE);
                continue;
            }
            for (Var* input : op->inputs()) {
                Var* parent = piece.base(input);
                if (!parent) continue;
                int from = node(parent, queue);
                network.connect(from + 1, at, INFINITE);
                if (op->type() == OpType::broadcast) spread.insert(parent);
            }
        }
    }

    std::vector<Var*> solve() {
        network.saturate(source, sink);
        auto leading = network.leading_to(sink);
        std::vector<Var*> found;
        for (Var* var : tensors) {
            int at = number[var];
            if (leading[at + 1] && !leading[at]) found.push_back(var);
            if (leading[at] && spread.count(var)) remade.push_back(var);
        }
        auto older = [](Var* a, Var* b) { return a->id < b->id; };
        std::sort(found.begin(), found.end(), older);
        std::sort(remade.begin(), remade.end(), older);
        return found;
    }
};

auto make_unary = get_op_info("unary").get_constructor<VarPtr, Var*, NanoString>();
auto make_binary = get_op_info("binary").get_constructor<VarPtr, Var*, Var*, NanoString>();
auto make_ternary = get_op_info("ternary").get_constructor<VarPtr, Var*, Var*, Var*>();
auto make_reshape = get_op_info("reshape").get_constructor<VarPtr, Var*, NanoVector>();
auto make_broadcast =
    get_op_info("broadcast_to").get_constructor<VarPtr, Var*, NanoVector, uint, uint>();

VarPtr followed;  // what a recipe has made last, until somebody holds it

// Elementwise operations, written down.
struct Recipe {
    enum What { UNARY, BINARY, TERNARY, RESHAPE, BROADCAST };
    struct Step {
        What what;
        NanoString kind;
        int operands[3];
        NanoVector shape;
        uint spread, kept;
    };
    static constexpr int MOST = 64;
    std::unordered_map<Var*, int> number;  // of what has been written down
    std::vector<Var*> leaves;
    std::vector<Step> steps;
    std::vector<int> made;  // by each step; all values are numbered
    int inputs = 0, values = 0, result = -1;
    long long first = 0, large = 0;

    int write(Var* var) {
        auto found = number.find(var);
        if (found != number.end()) return found->second;
        Op* op = var->input();
        int value = -1;
        if (var->id > first && (var->num > large || follows_input(var))) {
            if (!op || steps.size() >= MOST || var->is_finished()) return -1;
            const std::string name = op->name();
            if (name == "clone" || name == "tape" || name == "xmem_move") {
                value = write(op->inputs().front());
            } else {
                Step step{};
                if (!describe(op, var, name, step)) return -1;
                value = values++;
                steps.push_back(step);
                made.push_back(value);
            }
        } else {
            value = values++;
            leaves.push_back(var);
            leaf_values.push_back(value);
        }
        number[var] = value;
        return value;
    }
    // Whether a tensor is a view of an input, and so no leaf however small: both lose their memory.
    bool follows_input(Var* var) const {
        while (true) {
            Op* op = var->input();
            if (!op || !is_view(op)) return false;
            var = op->inputs().front();
            auto found = number.find(var);
            if (found != number.end() && found->second < inputs) return true;
        }
    }
    static int operands(const Step& step) {
        return step.what == TERNARY ? 3 : step.what == BINARY ? 2 : 1;
    }
    bool describe(Op* op, Var* var, const std::string& name, Step& step) {
        step.kind = op->ns;
        step.shape = var->shape;
        if (name == "unary") step.what = UNARY;
        else if (name == "binary") step.what = BINARY;
        else if (name == "ternary") step.what = TERNARY;
        else if (name == "reshape") step.what = RESHAPE;
        else if (name == "broadcast_to") step.what = BROADCAST;
        else return false;
        if (step.what == BROADCAST) {
            auto* spread = static_cast<BroadcastToOp*>(op);
            step.spread = spread->bcast_mask;
            step.kept = spread->keepdims_mask;
        }
        int i = 0, count = operands(step);
        for (Var* input : op->inputs()) {
            if (i == count) break;
            step.operands[i] = write(input);
            if (step.operands[i++] < 0) return false;
        }
        return i == count;
    }
    void forget() {
        number.clear();
        leaves.clear();
    }
    Var* follow(const long long* given, const long long* leaf) {
        std::vector<Var*> at(values);
        for (int i = 0; i < inputs; i++) at[i] = (Var*)given[i];
        for (size_t i = 0; i < leaf_values.size(); i++) at[leaf_values[i]] = (Var*)leaf[i];
        std::vector<VarPtr> kept;
        for (size_t i = 0; i < steps.size(); i++) {
            const Step& step = steps[i];
            Var* a = at[step.operands[0]];
            VarPtr value;
            switch (step.what) {
                case UNARY: value = make_unary(a, step.kind); break;
                case BINARY: value = make_binary(a, at[step.operands[1]], step.kind); break;
                case TERNARY:
                    value = make_ternary(a, at[step.operands[1]], at[step.operands[2]]);
                    break;
                case RESHAPE: value = make_reshape(a, step.shape); break;
                case BROADCAST:
                    value = make_broadcast(a, step.shape, step.spread, step.kept);
                    break;
            }
            at[made[i]] = value.ptr;
            kept.push_back(std::move(value));
        }
        if (!kept.empty()) followed = std::move(kept.back());
        return at[result];
    }

    std::vector<int> leaf_values;
};

// The nodes of an unexecuted backward, what they read of the piece, and what of that they compare.
struct Trial {
    const Piece& piece;
    std::vector<Node*> nodes;
    std::unordered_set<Node*> known, depending;
    std::vector<Var*> read;
    std::unordered_set<Node*> exact;

    Trial(const Piece& piece, const long long* results, int count) : piece(piece) {
        std::unordered_set<Var*> seen;
        for (int i = 0; i < count; i++) add((Node*)results[i]);
        for (size_t i = 0; i < nodes.size(); i++)
            for (auto& input : nodes[i]->_inputs) {
                if (input.node->id > piece.newest) {
                    add(input.node);
                    continue;
                }
                Var* base = input.node->is_var() ? piece.base(input.node->var()) : nullptr;
                if (base && base->size > 0 && seen.insert(base).second) read.push_back(base);
            }
    }
    void add(Node* node) {
        if (node->id > piece.newest && known.insert(node).second) nodes.push_back(node);
    }
    void find_exact(const long long* fed, int count) {
        std::vector<Node*> queue;
        for (int i = 0; i < count; i++)
            if (depending.insert((Node*)fed[i]).second) queue.push_back((Node*)fed[i]);
        for (size_t i = 0; i < queue.size(); i++)
            for (auto& output : queue[i]->_outputs)
                if (depending.insert(output.node).second) queue.push_back(output.node);
        std::unordered_set<Node*> seen;
        queue.clear();
        for (Node* node : nodes)
            if (!node->is_var() && compares(node->op()))
                for (auto& input : node->_inputs) queue.push_back(input.node);
        for (size_t i = 0; i < queue.size(); i++) {
            Node* node = queue[i];
            if (depending.count(node) || !seen.insert(node).second) continue;
            if (node->id <= piece.newest) {
                mark(node);
                continue;
            }
            for (auto& input : node->_inputs) queue.push_back(input.node);
        }
    }
    void mark(Node* node) {
        Var* base = node->is_var() ? piece.base(node->var()) : nullptr;
        if (!base) return;
        Op* op = base->input();
        if (op && spreads(op) && !piece.entries.count(base)) {
            for (Var* input : op->inputs()) mark(input);
            return;
        }
        exact.insert(base);
    }
};

}  // namespace

extern "C" {

// Finds the Python objects that hold tensors with first < id <= newest.
int xmem_jittor_held(long long first, long long newest, void* type, long long* objects,
                     int capacity) {
    int count = 0;
    for (auto* holder : hold_vars) {
        if (holder->var->id <= first || holder->var->id > newest) continue;
        auto* object = GET_OBJ_FROM_RAW_PTR(holder);
        if ((void*)object->ob_type != type) continue;
        if (count < capacity) objects[count] = (long long)object;
        count++;
    }
    return count;
}

// Collects what is to be kept of the nodes with first < id <= newest for `results`, a backward that
// was built after them and not run, with the kind of each. `entries` are the piece's inputs, `fed`
// what stands for the gradients that come in, `given` tensors that somebody keeps anyway. Returns
// how many there are, of which at most `capacity` are written.
int xmem_jittor_cut(const long long* results, int result_count, const long long* fed,
                    int fed_count, const long long* entries, int entry_count,
                    const long long* given, int given_count, long long first, long long newest,
                    long long* found, int* kinds, int capacity) {
    Piece piece{first, newest, {}};
    for (int i = 0; i < entry_count; i++) piece.entries.insert((Node*)entries[i]);
    std::unordered_set<Node*> held;
    for (int i = 0; i < given_count; i++)
        if (Var* base = piece.base((Var*)given[i])) held.insert(base);
    Trial trial(piece, results, result_count);
    trial.find_exact(fed, fed_count);
    Cut cut(piece, held, trial.exact);
    auto read = trial.read;
    for (Node* node : trial.exact) read.push_back(node->var());
    cut.build(read);
    int count = 0;
    for (Var* var : cut.solve()) {
        if (count < capacity) {
            found[count] = (long long)var;
            kinds[count] = trial.exact.count(var) ? EXACT : held.count(var) ? GIVEN : PACK;
        }
        count++;
    }
    for (Var* var : cut.remade) {
        if (count < capacity) found[count] = (long long)var, kinds[count] = REMAKE;
        count++;
    }
    return count;
}

// Writes down how a tensor comes from given ones by elementwise operations. Returns the recipe, or
// 0 if it does not; `entries` are not to be read, unless they are given. Small tensors and those from
// outside (id <= first) that it needs, too, are written to `leaves`, their count to `*leaf_count`;
// to `used`, which of the given it needs.
long long xmem_jittor_recipe(long long target, const long long* inputs, int input_count,
                             const long long* entries, int entry_count, long long first,
                             long long* leaves, int capacity, int* leaf_count, int* used) {
    auto* recipe = new Recipe;
    for (int i = 0; i < entry_count; i++) recipe->number[(Var*)entries[i]] = -1;
    for (int i = 0; i < input_count; i++) recipe->number[(Var*)inputs[i]] = i;
    recipe->values = recipe->inputs = input_count;
    recipe->first = first;
    recipe->large = std::max<long long>(((Var*)target)->num / 16, 16);
    recipe->result = recipe->write((Var*)target);
    *leaf_count = recipe->leaves.size();
    if (recipe->steps.empty() || recipe->result < input_count || (int)recipe->leaves.size() > capacity) {
        delete recipe;
        return 0;
    }
    for (size_t i = 0; i < recipe->leaves.size(); i++) leaves[i] = (long long)recipe->leaves[i];
    for (int i = 0; i < input_count; i++) used[i] = 0;
    for (const auto& step : recipe->steps)
        for (int i = 0; i < recipe->operands(step); i++)
            if (step.operands[i] < input_count) used[step.operands[i]] = 1;
    recipe->forget();
    return (long long)recipe;
}

// Builds the operations of a recipe on other inputs and the leaves; returns the result's address,
// which is valid until `xmem_jittor_followed` is called.
long long xmem_jittor_follow(long long recipe, const long long* inputs, const long long* leaves) {
    return (long long)((Recipe*)recipe)->follow(inputs, leaves);
}

void xmem_jittor_followed() { followed = VarPtr(); }

void xmem_jittor_forget_recipe(long long recipe) { delete (Recipe*)recipe; }

// The number of the tensor whose memory a tensor shares, as far back as its graph goes.
long long xmem_jittor_origin(long long address) {
    auto* var = (Var*)address;
    while (Op* op = var->input()) {
        if (!is_view(op)) break;
        var = op->inputs().front();
    }
    return var->id;
}

// Whether a tensor has been computed.
int xmem_jittor_is_there(long long address) { return ((Var*)address)->is_finished(); }

// The number of the operation with first < id <= newest that reads a tensor or a view of it first,
// or 0.
long long xmem_jittor_reader(long long address, long long first, long long newest) {
    long long least = INFINITE;
    std::vector<Var*> views{(Var*)address};
    std::unordered_set<Var*> seen{views[0]};
    for (size_t i = 0; i < views.size(); i++)
        for (Op* op : views[i]->outputs()) {
            if (op->id <= first || op->id > newest) continue;
            if (!is_view(op)) {
                least = std::min<long long>(least, op->id);
                continue;
            }
            for (Var* view : op->outputs())
                if (seen.insert(view).second) views.push_back(view);
        }
    return least == INFINITE ? 0 : least;
}

// Collects a tensor and the views that are made of it, without `ends` and what is made of those.
int xmem_jittor_views_before(long long address, const long long* ends, int end_count,
                             long long* found, int capacity) {
    std::unordered_set<Var*> seen;
    for (int i = 0; i < end_count; i++) seen.insert((Var*)ends[i]);
    std::vector<Var*> views{(Var*)address};
    seen.insert(views[0]);
    for (size_t i = 0; i < views.size(); i++) {
        if ((int)i < capacity) found[i] = (long long)views[i];
        for (Op* op : views[i]->outputs()) {
            if (!is_view(op)) continue;
            for (Var* view : op->outputs())
                if (seen.insert(view).second) views.push_back(view);
        }
    }
    return views.size();
}

// Called by an operation: whether each element is 0, eight to a byte.
void xmem_jittor_pack_bits(const uint8_t* __restrict values, long long count,
                           uint8_t* __restrict packed) {
    const long long whole = count / 8;
#pragma omp parallel for if (count > 100000)
    for (long long k = 0; k < whole; k++) {
        uint8_t byte = 0;
        for (int bit = 0; bit < 8; bit++) byte |= (uint8_t)(values[8 * k + bit] != 0) << bit;
        packed[k] = byte;
    }
    if (count % 8) {
        uint8_t byte = 0;
        for (int bit = 0; bit < count % 8; bit++)
            byte |= (uint8_t)(values[8 * whole + bit] != 0) << bit;
        packed[whole] = byte;
    }
}

// Called by an operation.
void xmem_jittor_unpack_bits(const uint8_t* __restrict packed, long long count,
                             uint8_t* __restrict values) {
#pragma omp parallel for if (count > 100000)
    for (long long i = 0; i < count; i++) values[i] = packed[i / 8] >> (i % 8) & 1;
}
}
