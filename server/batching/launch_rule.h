#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "server/batching/row_queue.h"

namespace logprobd {

/// When a batch leaves, and how much it takes.
///
/// With a replica that has no batch in flight it leaves at once: waiting could only add latency.
/// With one in flight at each, the engines are busy anyway, so it leaves when its budget is full,
/// when the oldest request has waited `wait_max`, or when an engine falls idle. While a small
/// request waits or came within kSmallMemory, batches take at most a quarter of their budget of
/// large requests, so that a small one never waits for a batch full of them.
class LaunchRule {
 public:
  static constexpr absl::Duration kSmallMemory = absl::Milliseconds(100);

  LaunchRule(int64_t rows_max, int64_t rows_max_f32, absl::Duration wait_max)
      : rows_max_(rows_max), rows_max_f32_(rows_max_f32), wait_max_(wait_max) {}

  void set_wait_max(absl::Duration wait_max) { wait_max_ = wait_max; }

  void NoteSmallRequest(absl::Time now) { last_small_ = now; }

  BatchBudget Budget(const RowQueue& queue, absl::Time now) const {
    const bool is_shared = queue.has_small() || now - last_small_ <= kSmallMemory;
    return BatchBudget{
        .rows_max = rows_max_,
        .rows_max_f32 = rows_max_f32_,
        .bulk_rows_max = is_shared ? std::max<int64_t>(rows_max_ / 4, 1) : rows_max_};
  }

  /// The time from which the next batch may leave, given that a slot is free; `now` if it is full.
  /// `in_flight`: batches of the healthy replica that has the fewest.
  absl::Time LaunchTime(const RowQueue& queue, int in_flight, absl::Time now) const {
    if (queue.empty()) {
      return absl::InfiniteFuture();
    }
    const BatchBudget budget = Budget(queue, now);
    if (in_flight == 0 || queue.rows() >= budget.rows_max ||
        queue.bulk_rows() >= budget.bulk_rows_max) {
      return now;
    }
    return queue.OldestSubmitted() + wait_max_;
  }

 private:
  int64_t rows_max_;
  int64_t rows_max_f32_;
  absl::Duration wait_max_;
  absl::Time last_small_ = absl::InfinitePast();
};

}  // namespace logprobd
