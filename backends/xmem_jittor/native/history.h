// A pool's history, in bounded memory: down-sampled by halving, the highest point of each part kept.
#pragma once
#include <vector>

#include "common.h"

namespace jittor {
namespace {

struct Point {
    int64 event = 0, allocated = 0, reserved = 0;
};

class History {
    static constexpr size_t kMost = 4096;
    std::vector<Point> points;
    Point highest, latest;  // of the part that is not full yet
    Point start;
    int64 stride = 1, in_part = 0;

    void halve() {
        for (size_t i = 0; i + 1 < points.size(); i += 2) {
            auto &first = points[i], &second = points[i + 1];
            points[i / 2] = second.allocated > first.allocated ? second : first;
        }
        points.resize(points.size() / 2);
        stride *= 2;
    }

   public:
    void add(const Point& point) {
        latest = point;
        if (!in_part || point.allocated > highest.allocated) highest = point;
        if (++in_part < stride) return;
        points.push_back(highest);
        in_part = 0;
        if (points.size() == kMost) halve();
    }

    void restart(const Point& now) {
        points.clear();
        stride = 1;
        in_part = 0;
        start = now;
        add(now);
    }

    // Everything there is, in order, from the restart until now.
    std::vector<Point> read() const {
        std::vector<Point> found;
        if (!points.empty() && points.front().event > start.event) found.push_back(start);
        found.insert(found.end(), points.begin(), points.end());
        if (in_part) found.push_back(highest);
        if (!found.empty() && found.back().event < latest.event) found.push_back(latest);
        return found;
    }
};

}  // namespace
}  // namespace jittor
