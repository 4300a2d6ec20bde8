// What a schedule must pay for outside a job: xmem/planner/bands.py in C++, documented there.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "planner_problem.h"

namespace planner {

struct Item {
    Ticks size, saved;  // bytes in a double: below 2**53
    int stage;
};

struct Bands {
    const Problem& p;
    std::vector<Item> items;
    Bytes room = 0, tail = 0;
    std::vector<int> low;
    std::vector<Ticks> after, outside;

    explicit Bands(const Problem& problem) : p(problem) {
        tail = p.n > 1 ? p.a[p.n - 1] : 0;
        Bytes last = kMost;
        for (auto& o : p.options[p.n - 1]) last = std::min(last, o.abar + o.tb);
        room = p.cap - last - p.a[p.n] - tail;
        for (int i = 0; i < p.n - 1; i++) hull(i, i == p.n - 2 ? tail : 0, items);
        by_efficiency(items);
        for (int i = 0; i < p.n - 1; i++) total_.push_back(total_[i] + p.again[i]);
    }

    Ticks least_excess() const { return pay(p.n, p.n, room); }

    void prepare() {
        for (int s = 0; s <= p.n; s++) tabulate(s);
        low.assign(p.classes, 0);
        after.assign(p.classes, kNone);
        outside.assign(p.fronts(), kNone);
        for (int s = p.n; s >= 0; s--)
            for (int t = s; t <= p.n; t++) {
                int number = p.number(s, t);
                low[number] = s;
                Ticks above = t < p.n ? pay(0, t, room) : 0;
                after[number] = std::min(after[number], above);
                for (int j = 0; j < p.ends(t); j++) {
                    Ticks& least = outside[p.key(s, t, j)];
                    least = std::min(least, t < p.n ? together(s, t, j) : 0);
                }
            }
    }

    Ticks before(int number, Bytes free) const {
        auto& sizes = sizes_[low[number]];
        auto& ticks = ticks_[low[number]];
        size_t k = std::upper_bound(sizes.begin(), sizes.end(), Ticks(free)) - sizes.begin();
        if (k == 0) return kNone;
        if (k == sizes.size()) return ticks[k - 1];
        k--;
        Ticks share = (ticks[k] - ticks[k + 1]) * (Ticks(free) - sizes[k]) /
                      (sizes[k + 1] - sizes[k]);
        return std::floor(ticks[k] - share);
    }

    // The bytes of a_s, for a job that starts at s > 0.
    Bytes held(int number) const { return Bytes(sizes_[low[number]][0]); }

    // The most bytes m with before(number, cap - m) <= ticks, or a few more.
    Bytes reach(int number, Ticks most) const {
        auto& sizes = sizes_[low[number]];
        auto& ticks = ticks_[low[number]];
        most += 2;
        size_t k = std::partition_point(ticks.begin(), ticks.end(),
                                        [&](Ticks x) { return x > most; }) -
                   ticks.begin();
        if (k == ticks.size()) return -1;
        Ticks size = sizes[k];
        if (k && ticks[k - 1] > ticks[k])
            size -= (sizes[k] - sizes[k - 1]) * ((most - ticks[k]) / (ticks[k - 1] - ticks[k]));
        return p.cap - Bytes(std::floor(size)) + 2;
    }

private:
    std::vector<Ticks> total_{0};
    std::vector<std::vector<Ticks>> sizes_, ticks_;

    void hull(int i, Bytes less, std::vector<Item>& steps) const {
        Ticks at = 0, saved = 0;
        for (;;) {
            Ticks best = -1, chosen_size = 0, chosen_value = 0;
            for (auto& o : p.options[i]) {
                Ticks size = Ticks(std::max<Bytes>(o.abar - less, 0));
                Ticks value = p.again[i] - o.excess;
                if (value <= 0 || value <= saved) continue;
                Ticks slope = (value - saved) / std::max(size - at, 1e-9);
                if (slope > best) best = slope, chosen_size = size, chosen_value = value;
            }
            if (best < 0) return;
            steps.push_back({std::max(chosen_size - at, 0.0), chosen_value - saved, i});
            at = std::max(at, chosen_size);
            saved = chosen_value;
        }
    }

    static void by_efficiency(std::vector<Item>& steps) {
        auto slope = [](const Item& z) { return z.saved / std::max(z.size, 1e-9); };
        std::stable_sort(steps.begin(), steps.end(),
                         [&](auto& one, auto& two) { return slope(one) > slope(two); });
    }

    Ticks pay(int s, int t, Bytes bytes) const {
        if (bytes < 0) return kNone;
        int last = p.n - 1;
        Ticks total = total_[std::min(s, last)] + (t < last ? total_[last] - total_[t + 1] : 0);
        Ticks left = Ticks(bytes);
        for (auto& z : items) {
            if (s <= z.stage && z.stage <= t) continue;
            if (z.size > left) return std::floor(total - z.saved * left / z.size);
            left -= z.size;
            total -= z.saved;
        }
        return total;
    }

    Ticks together(int s, int t, int j) const {
        Ticks paid = pay(s, t, room);
        if (!j || t == p.n - 1) return paid;
        Bytes more = t == p.n - 2 ? tail : 0;
        Ticks held = pay(s, t, room - p.options[t][j - 1].abar + more);
        return std::min(paid + p.again[t], held);
    }

    void tabulate(int s) {
        std::vector<Item> steps;
        int count = s < p.n ? s : p.n - 1;
        for (int i = 0; i < count; i++) hull(i, s < p.n && i == s - 1 ? p.a[s] : 0, steps);
        by_efficiency(steps);
        std::vector<Ticks> sizes{s ? Ticks(p.a[s]) : 0}, ticks{total_[std::min(s, p.n - 1)]};
        for (auto& z : steps) {
            sizes.push_back(sizes.back() + z.size);
            ticks.push_back(ticks.back() - z.saved);
        }
        sizes_.push_back(std::move(sizes));
        ticks_.push_back(std::move(ticks));
    }
};

}  // namespace planner
