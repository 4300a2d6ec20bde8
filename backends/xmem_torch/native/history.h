// The pool's history in bounded space: the highest moment of each stretch of events. When it is
// full, neighbours are joined, the higher one stays, and stretches become twice as long.
#pragma once

#include <cstdint>

namespace xmem_torch {

struct Point {
  int64_t event, allocated, reserved;
};

class History {
 public:
  static constexpr int kCapacity = 4096;

  void restart(Point now) {
    count_ = 0;
    stretch_ = 1;
    seen_ = 0;
    add(now);
  }

  void add(Point now) {
    if (seen_ == 0 || now.allocated >= highest_.allocated) highest_ = now;
    if (++seen_ < stretch_) return;
    seen_ = 0;
    points_[count_++] = highest_;
    if (count_ == kCapacity) halve();
  }

  // Writes at most kCapacity points, the unfinished stretch included.
  int read(Point* out) const {
    for (int i = 0; i < count_; ++i) out[i] = points_[i];
    if (seen_ == 0) return count_;
    out[count_] = highest_;
    return count_ + 1;
  }

 private:
  void halve() {
    for (int i = 0; i < kCapacity / 2; ++i) {
      const Point &first = points_[2 * i], &second = points_[2 * i + 1];
      points_[i] = second.allocated >= first.allocated ? second : first;
    }
    count_ = kCapacity / 2;
    stretch_ *= 2;
  }

  Point points_[kCapacity];
  Point highest_{};
  int count_ = 0;
  int64_t stretch_ = 1, seen_ = 0;
};

}  // namespace xmem_torch
