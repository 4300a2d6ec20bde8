// For each job its front, inside a proven band: xmem/planner/fronts.py in C++, documented there.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "planner_bands.h"
#include "planner_problem.h"

namespace planner {

constexpr std::ptrdiff_t kStride = 8;       // points that are skipped at once where none can matter
constexpr size_t kBlock = size_t{1} << 15;  // points in a block of memory

struct Front {
    const Point* points = nullptr;
    size_t count = 0;

    const Point* begin() const { return points; }
    const Point* end() const { return points + count; }
    const Point& last() const { return points[count - 1]; }
    Ticks at(Bytes size) const {
        auto above = std::partition_point(begin(), end(), [&](auto& p) { return p.size <= size; });
        return above == begin() ? kNone : above[-1].x;
    }
};

struct Solver {
    Problem p;
    std::optional<Bands> bands;
    bool ready = false, thinned = false;
    std::vector<Front> fronts;
    std::vector<std::vector<Point>> blocks;
    size_t block = 0;
    std::vector<Point> envelope, fresh, merged;
    std::vector<int> ops;

    Ticks solve(Ticks most, Ticks thinning, size_t whole) {
        auto& band = *bands;
        if (!std::exchange(ready, true)) band.prepare();
        for (auto& b : blocks) b.clear();
        block = 0;
        thinned = false;
        fronts.assign(p.fronts(), {});
        p.jobs([&](Job job, size_t key) {
            int number = p.number(job.s, job.t);
            Ticks paid = job.t < p.n ? p.pre[job.j ? job.t : job.t + 1] - p.pre[job.s] : 0;
            Ticks above = band.after[number];
            Ticks limit = most - paid - std::max(band.outside[key], above);
            envelope.clear();
            if (!(limit >= 0)) return;
            points(job, number, limit, most - paid - above);
            within(number, limit, most - paid - above);
            if (fresh.size() > whole && thinning > 0) thin(thinning);
            fronts[key] = store();
        });
        auto& all = front();
        return all.count ? all.last().x : kNone;
    }

    const Front& front() const { return fronts[p.key(0, p.n, 0)]; }

    void trace() {
        ops.clear();
        struct Task {
            int code;  // 0: do a job; else the operation code - 1
            Job job;
            Bytes size;
        };
        std::vector<Task> stack{{0, {0, p.n, 0}, p.cap}};
        while (!stack.empty()) {
            auto [code, job, size] = stack.back();
            stack.pop_back();
            if (code) {
                op(code - 1, job.s);
            } else if (job.s == job.t) {
                trace_leaf(job, size);
            } else {
                Branch b = best(job, size);
                auto [s, t, j] = job;
                if (b.kind == kKeepHere) {
                    op(1, s, b.k);
                    stack.push_back({1 + 3, {s, 0, 0}, 0});
                    stack.push_back({0, {s + 1, t, j}, size - b.held});
                    continue;
                }
                op(0, s);
                for (int i = s + 1; i < b.q; i++) op(0, i), op(4, i);
                if (b.kind == kSplit) {
                    stack.push_back({0, {s, b.q - 1, 0}, size});
                    stack.push_back({1 + 4, {b.q, 0, 0}, 0});
                    stack.push_back({0, {b.q, t, j}, size - b.held});
                } else {
                    op(1, b.q, b.k), op(4, b.q);
                    stack.push_back({0, {s, b.q, b.k + 1}, size});
                    stack.push_back({0, {b.q + 1, t, j}, size - b.held});
                }
            }
        }
    }

private:
    // 0 N, 1 G, 2 L, 3 B, 4 Da
    void op(int code, int index, int option = 0) { ops.insert(ops.end(), {code, index, option}); }

    void trace_leaf(Job job, Bytes size) {
        if (job.s == p.n) return op(2, 0);
        if (!job.j) {
            p.leaf(job.s, 0, fresh);
            int best = -1;
            for (int k = 0; k < int(fresh.size()); k++)
                if (fresh[k].size <= size && (best < 0 || fresh[k].x < fresh[best].x)) best = k;
            op(1, job.s, best);
        }
        op(3, job.s);
    }

    Branch best(Job job, Bytes size) const {
        Ticks least = kNone;
        Branch chosen{};
        p.branches(job, kNone, p.cap, [&](const Branch& b) {
            if (b.need > size) return;
            Ticks x = b.x + fronts[p.first(job, b)].at(size - b.held);
            if (b.kind != kKeepHere) x += fronts[p.second(job, b)].at(size);
            if (x < least) least = x, chosen = b;
        });
        return chosen;
    }

    void points(Job job, int number, Ticks limit, Ticks band) {
        static const Point nothing{0, 0};
        if (job.s == job.t) {
            p.leaf(job.s, job.j, envelope);
            std::sort(envelope.begin(), envelope.end(), [](auto& one, auto& two) {
                return std::tie(one.size, one.x) < std::tie(two.size, two.x);
            });
            return;
        }
        p.branches(job, limit, p.cap, [&](const Branch& b) {
            Front second{&nothing, 1};
            if (b.kind != kKeepHere) second = fronts[p.second(job, b)];
            add(fronts[p.first(job, b)], second, b, number, limit, band);
        });
    }

    // envelope = min(envelope, x + first(m - held) + second(m)) for m >= need, inside the band.
    void add(Front first, Front second, const Branch& b, int number, Ticks limit, Ticks band) {
        if (!first.count || !second.count) return;
        Ticks low = b.x + first.last().x + second.last().x;
        if (low > limit) return;
        // Where either is too expensive even beside the other's cheapest, the sum is too.
        auto i = std::partition_point(first.begin(), first.end(), [&](auto& z) {
            return z.x > limit - b.x - second.last().x;
        });
        auto k = std::partition_point(second.begin(), second.end(), [&](auto& z) {
            return z.x > limit - b.x - first.last().x;
        });
        if (i == first.end() || k == second.end()) return;
        Bytes size = std::max({i->size + b.held, k->size, b.need});
        Bytes stop = std::min(p.cap, bands->reach(number, band - low));
        if (size > stop) return;
        size_t at = std::partition_point(envelope.begin(), envelope.end(),
                                         [&](auto& z) { return z.size <= size; }) -
                    envelope.begin();
        if (at && envelope[at - 1].x <= low) return;
        sum(first, second, b, {i, k, at, size, stop, limit});
        if (fresh.empty()) return;
        bool same = at && envelope[at - 1].size == size;  // it may have to go
        merge(same ? at - 1 : at);
    }

    struct Walk {
        const Point *i, *k;
        size_t at;
        Bytes size, stop;
        Ticks limit;
    };

    void sum(Front first, Front second, const Branch& b, Walk w) {
        auto [i, k, at, size, stop, limit] = w;
        auto i_last = first.end() - 1, k_last = second.end() - 1;
        fresh.clear();
        while (size <= stop) {
            while (i < i_last && i[1].size + b.held <= size) i++;
            while (k < k_last && k[1].size <= size) k++;
            while (at < envelope.size() && envelope[at].size <= size) at++;
            Ticks x = b.x + i->x + k->x;
            Ticks now = at ? envelope[at - 1].x : kNone;
            if (x <= limit && x < now) {
                fresh.push_back({size, x});
            } else if (at) {
                auto u = i + std::min(kStride, i_last - i), v = k + std::min(kStride, k_last - k);
                if (b.x + u->x + v->x >= now) {
                    bool u_ends = u < i + kStride, v_ends = v < k + kStride;
                    if (u_ends && v_ends) break;
                    size = std::min(u_ends ? kMost : u->size + b.held, v_ends ? kMost : v->size);
                    continue;
                }
            }
            size = std::min(i < i_last ? i[1].size + b.held : kMost,
                            k < k_last ? k[1].size : kMost);
        }
    }

    void merge(size_t at) {
        merged.assign(envelope.begin(), envelope.begin() + at);
        Ticks best = at ? envelope[at - 1].x : kNone;
        size_t k = 0;
        while (at < envelope.size() || k < fresh.size()) {
            bool old = k == fresh.size() ||
                       (at < envelope.size() && std::tie(envelope[at].size, envelope[at].x) <=
                                                    std::tie(fresh[k].size, fresh[k].x));
            Point z = old ? envelope[at++] : fresh[k++];
            if (z.x < best) merged.push_back(z), best = z.x;
        }
        envelope.swap(merged);
    }

    void within(int number, Ticks limit, Ticks band) {
        fresh.clear();
        Ticks best = kNone;
        Bytes fits = p.cap - bands->held(number);
        for (auto& z : envelope) {
            if (z.size > fits) break;
            if (z.x >= best || z.x > limit) continue;
            if (z.x + bands->before(number, p.cap - z.size) > band) continue;
            fresh.push_back(z);
            best = z.x;
        }
    }

    void thin(Ticks thinning) {
        size_t count = 0;
        Ticks best = kNone;
        for (size_t i = 0; i < fresh.size(); i++)
            if (fresh[i].x < best - thinning || i + 1 == fresh.size()) {
                best = fresh[i].x;
                fresh[count++] = fresh[i];
            }
        thinned = thinned || count < fresh.size();
        fresh.resize(count);
    }

    // Fronts lie in blocks, so they never move and no memory is doubled.
    Front store() {
        if (fresh.empty()) return {};
        while (block < blocks.size() &&
               blocks[block].size() + fresh.size() > blocks[block].capacity())
            block++;
        if (block == blocks.size()) {
            blocks.emplace_back();
            blocks.back().reserve(std::max(kBlock, fresh.size()));
        }
        auto& b = blocks[block];
        b.insert(b.end(), fresh.begin(), fresh.end());
        return {b.data() + b.size() - fresh.size(), fresh.size()};
    }
};

}  // namespace planner
