// The planner's solver in C++, as functions for xmem/planner/kernel.py.
//
// planner_{problem,bands,fronts}.h are xmem/planner/{problem,bands,fronts}.py once more: the
// algorithm is documented there and in docs/planner.md, and names are those. Both return the same
// fronts: times are whole ticks in doubles, so sums are exact, and what is not whole is computed in
// the same order (-ffp-contract=off).
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "planner_fronts.h"

using planner::Solver;

extern "C" {

// The options of stage i are those from starts[i] up to starts[i + 1]. nullptr: no memory.
void* xmem_planner_open(int n, int64_t cap, int keeps, const int64_t* a, const int64_t* tng,
                        const double* fng, const int32_t* starts, const int64_t* abar,
                        const int64_t* tf, const int64_t* tb, const double* f,
                        const double* excess, const int64_t* before_loss,
                        const int64_t* after_loss) try {
    auto solver = std::make_unique<Solver>();
    auto& p = solver->p;
    p.n = n, p.cap = cap, p.keeps = keeps;
    p.a.assign(a, a + n + 1), p.tng.assign(tng, tng + n), p.fng.assign(fng, fng + n);
    p.before_loss.assign(before_loss, before_loss + n + 1);
    p.after_loss.assign(after_loss, after_loss + n + 1);
    p.options.resize(n);
    for (int i = 0; i < n; i++)
        for (int k = starts[i]; k < starts[i + 1]; k++)
            p.options[i].push_back({abar[k], tf[k], tb[k], f[k], excess[k]});
    p.prepare();
    solver->bands.emplace(p);
    return solver.release();
} catch (const std::bad_alloc&) {
    return nullptr;
}

void xmem_planner_close(void* solver) { delete static_cast<Solver*>(solver); }

double xmem_planner_least_excess(void* solver) {
    return static_cast<Solver*>(solver)->bands->least_excess();
}

// -1: there was no memory.
int64_t xmem_planner_least_bytes(void* solver) try {
    return static_cast<Solver*>(solver)->p.least_bytes();
} catch (const std::bad_alloc&) {
    return -1;
}

// The least excess, or infinity; -1: there was no memory.
double xmem_planner_solve(void* solver, double most, double thinning, int64_t whole,
                          int32_t* thinned) try {
    auto s = static_cast<Solver*>(solver);
    double least = s->solve(most, thinning, size_t(whole));
    *thinned = s->thinned;
    return least;
} catch (const std::bad_alloc&) {
    return -1;
}

int64_t xmem_planner_front(void* solver, int64_t* sizes, double* excess) {
    auto& front = static_cast<Solver*>(solver)->front();
    for (size_t i = 0; sizes && i < front.count; i++)
        sizes[i] = front.points[i].size, excess[i] = front.points[i].x;
    return int64_t(front.count);
}

// Operations as (code, index, option), 0 N, 1 G, 2 L, 3 B, 4 Da; without `out` only their number.
int64_t xmem_planner_ops(void* solver, int32_t* out) {
    auto s = static_cast<Solver*>(solver);
    if (!out) s->trace();
    if (out) std::copy(s->ops.begin(), s->ops.end(), out);
    return int64_t(s->ops.size() / 3);
}

}  // extern "C"
