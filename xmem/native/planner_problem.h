// The recursion that is solved: xmem/planner/problem.py in C++, where it is documented.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace planner {

using Bytes = int64_t;
using Ticks = double;

constexpr Ticks kNone = std::numeric_limits<Ticks>::infinity();
constexpr Bytes kMost = int64_t{1} << 62;

struct Point {
    Bytes size;
    Ticks x;
};

struct Choice {
    Bytes abar, tf, tb;
    Ticks f, excess;
    bool operator<(const Choice& o) const {
        return std::tie(abar, tf, tb, f, excess) < std::tie(o.abar, o.tf, o.tb, o.f, o.excess);
    }
};

enum Kind { kKeepHere, kSplit, kKeepLater };

struct Branch {
    Kind kind;
    int q, k;
    Bytes need, held;
    Ticks x;
};

struct Job {
    int s, t, j;
};

struct Problem {
    int n = 0, ends_most = 1, classes = 0;
    Bytes cap = 0;
    bool keeps = true;
    std::vector<Bytes> a, tng, before_loss, after_loss;
    std::vector<Ticks> fng, pre, again;
    std::vector<std::vector<Choice>> options;
    std::vector<int> class_of;

    int number(int s, int t) const { return class_of[size_t(s) * (n + 1) + t]; }
    size_t key(int s, int t, int j) const { return size_t(number(s, t)) * ends_most + j; }
    int ends(int t) const { return 1 + (keeps && t < n ? int(options[t].size()) : 0); }
    size_t fronts() const { return size_t(classes) * ends_most; }

    void prepare() {
        pre.assign(1, 0);
        again.resize(n);
        for (int i = 0; i < n; i++) {
            pre.push_back(pre[i] + fng[i]);
            again[i] = fng[i];
            for (auto& o : options[i]) again[i] = std::min(again[i], o.f);
            ends_most = std::max(ends_most, 1 + int(options[i].size()));
        }
        std::map<std::tuple<Bytes, Bytes, Bytes, Bytes, Ticks, std::vector<Choice>>, int> types;
        std::vector<int> kinds(n + 1, n);
        for (int i = 0; i < n; i++)
            kinds[i] = types.emplace(std::make_tuple(a[i + 1], tng[i], before_loss[i],
                                                     after_loss[i + 1], fng[i], options[i]), i)
                           .first->second;
        std::map<Bytes, int> sizes;  // equal jobs start at values of equal bytes
        for (int s = 0; s <= n; s++) sizes.emplace(a[s], -1 - int(sizes.size()));
        std::unordered_map<int64_t, int> numbers;
        numbers.reserve(size_t(n + 1) * (n + 2) / 2);
        class_of.assign(size_t(n + 1) * (n + 1), -1);
        for (int s = 0; s <= n; s++) {
            int64_t before = sizes[a[s]];
            for (int t = s; t <= n; t++) {
                auto found = numbers.emplace((before + n + 1) * (n + 1) + kinds[t], classes);
                classes += found.second;
                before = class_of[size_t(s) * (n + 1) + t] = found.first->second;
            }
        }
    }

    // Calls visit(job, key) for one job of each front, those it needs before it.
    template <class Visit>
    void jobs(Visit visit) const {
        std::vector<char> seen(classes, 0);
        for (int s = n; s >= 0; s--)
            for (int t = s; t <= n; t++) {
                if (std::exchange(seen[number(s, t)], 1)) continue;
                for (int j = 0; j < ends(t); j++) visit(Job{s, t, j}, key(s, t, j));
            }
    }

    void leaf(int s, int j, std::vector<Point>& ways) const {
        ways.clear();
        if (s == n) {
            ways.push_back({a[n] + after_loss[n], 0});
        } else if (j) {
            auto& o = options[s][j - 1];
            ways.push_back({o.abar + a[s + 1] + after_loss[s + 1] + o.tb, o.excess});
        } else {
            for (auto& o : options[s])
                ways.push_back({o.abar + a[s + 1] + after_loss[s + 1] + std::max(o.tf, o.tb),
                                o.excess});
        }
    }

    // Calls visit(branch) for the ways to do R(s,t,j), s < t, that cost no more than `most`.
    template <class Visit>
    void branches(Job job, Ticks most, Bytes room, Visit visit) const {
        auto [s, t, j] = job;
        Bytes found = (j ? options[t][j - 1].abar : 0) + (t < n ? a[t + 1] : 0);
        auto pins = [&, t = t](int i) { return t < n ? after_loss[t + 1] : before_loss[i]; };
        Bytes delta = a[s + 1] + after_loss[s + 1];
        for (int k = 0; k < int(options[s].size()); k++) {
            auto& o = options[s][k];
            Bytes need = std::max(found + pins(s) + o.abar + o.tf, delta + o.abar + o.tb);
            visit(Branch{kKeepHere, s, k, need, o.abar, o.excess});
        }
        Bytes need = found + pins(s) + a[s + 1] + tng[s];
        for (int q = s + 1; q <= t; q++) {
            Ticks x = pre[q] - pre[s];
            if (need > room || x > most) return;
            visit(Branch{kSplit, q, 0, need, a[q], x});
            if (q == n) return;
            for (int k = 0; keeps && q < t && k < int(options[q].size()); k++) {
                auto& o = options[q][k];
                Bytes higher = std::max(need, found + pins(q) + a[q] + o.abar + o.tf);
                visit(Branch{kKeepLater, q, k, higher, o.abar, x});
            }
            need = std::max(need, found + pins(q) + a[q] + a[q + 1] + tng[q]);
        }
    }

    size_t first(Job job, const Branch& b) const {
        return key(b.kind == kSplit ? b.q : b.q + 1, job.t, job.j);
    }
    size_t second(Job job, const Branch& b) const {
        return b.kind == kSplit ? key(job.s, b.q - 1, 0) : key(job.s, b.q, b.k + 1);
    }

    Bytes least_bytes() const {
        std::vector<Bytes> least(fronts(), kMost);
        std::vector<Point> ways;
        jobs([&](Job job, size_t key) {
            Bytes best = kMost;
            if (job.s == job.t) {
                leaf(job.s, job.j, ways);
                for (auto& p : ways) best = std::min(best, p.size);
            } else {
                branches(job, kNone, kMost, [&](const Branch& b) {
                    Bytes size = std::max(b.need, least[first(job, b)] + b.held);
                    if (b.kind != kKeepHere) size = std::max(size, least[second(job, b)]);
                    best = std::min(best, size);
                });
            }
            least[key] = best;
        });
        return least[key(0, n, 0)];
    }
};

}  // namespace planner
