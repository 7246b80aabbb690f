#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "server/base/scoring_engine.h"
#include "server/batching/row_queue.h"

namespace logprobd {

/// When a batch leaves, and how much it takes.
///
/// With a replica that has no batch in flight it leaves at once: waiting could only add latency.
/// With one in flight at each, the engines are busy anyway, so it leaves when its budget is full,
/// when the oldest request has waited `wait_max`, or kPrepareTime before an engine falls idle, if
/// its batch takes as long as the one before. While a small request waits or came within
/// kSmallMemory, batches take at most a quarter of their budget of large requests, so that a small
/// one never waits for a batch full of them.
///
/// Rows beyond a multiple of the engine's step take as long as a whole step of them. A batch of
/// many leaves them to the next one, at the cost of large requests, where more wait than it may
/// take or another is in flight, so that they have company. One of small requests alone that has a
/// whole step leaves them in any case: most of its rows are answered sooner, the rest hardly later.
class LaunchRule {
 public:
  static constexpr absl::Duration kSmallMemory = absl::Milliseconds(100);
  /// What gathering a small batch and copying it to a GPU takes.
  static constexpr absl::Duration kPrepareTime = absl::Microseconds(250);
  /// Batches of fewer steps are left whole; fewer yet where some of their rows have to wait anyway.
  static constexpr int64_t kStepsMin = 4;
  static constexpr int64_t kCutStepsMin = 2;

  /// `engine`, whose steps they are, must outlive the rule.
  LaunchRule(int64_t rows_max, int64_t rows_max_f32, const ScoringEngine& engine,
             absl::Duration wait_max)
      : rows_max_(rows_max), rows_max_f32_(rows_max_f32), engine_(engine), wait_max_(wait_max) {}

  void set_wait_max(absl::Duration wait_max) { wait_max_ = wait_max; }

  void NoteSmallRequest(absl::Time now) { last_small_ = now; }

  BatchBudget Budget(const RowQueue& queue, absl::Time now) const {
    const bool is_shared = queue.has_small() || now - last_small_ <= kSmallMemory;
    return BatchBudget{
        .rows_max = rows_max_,
        .rows_max_f32 = rows_max_f32_,
        .bulk_rows_max = is_shared ? std::max<int64_t>(rows_max_ / 4, 1) : rows_max_};
  }

  /// What a batch takes that leaves now. `in_flight`: batches of its replica.
  BatchBudget CutBudget(const RowQueue& queue, int in_flight, absl::Time now) const {
    BatchBudget budget = Budget(queue, now);
    const int64_t bulk = std::min(queue.bulk_rows(), budget.bulk_rows_max);
    const int64_t small = queue.rows() - queue.bulk_rows();
    const int64_t rows = std::min(small + bulk, budget.rows_max);
    const bool some_wait = rows < queue.rows();
    const int64_t steps_min = some_wait ? kCutStepsMin : kStepsMin;
    const int64_t step = engine_.row_step(rows);
    const int64_t rest = rows % step;
    if (bulk == 0 && rest > 0 && rows > step) {
      budget.taken_rows_max = rows - rest;
    } else if ((some_wait || in_flight > 0) && rows >= steps_min * step && rest < bulk) {
      budget.bulk_rows_max = bulk - rest;
    }
    return budget;
  }

  /// The time from which the next batch may leave, given that a slot is free; `now` if it is full.
  /// `in_flight`: batches of the healthy replica that has the fewest; `idle_time`: when it will
  /// probably have ended the first.
  absl::Time LaunchTime(const RowQueue& queue, int in_flight, absl::Time idle_time,
                        absl::Time now) const {
    if (queue.empty()) {
      return absl::InfiniteFuture();
    }
    const BatchBudget budget = Budget(queue, now);
    if (in_flight == 0 || queue.rows() >= budget.rows_max ||
        queue.bulk_rows() >= budget.bulk_rows_max) {
      return now;
    }
    return std::min(queue.OldestSubmitted() + wait_max_, idle_time - kPrepareTime);
  }

 private:
  int64_t rows_max_;
  int64_t rows_max_f32_;
  const ScoringEngine& engine_;
  absl::Duration wait_max_;
  absl::Time last_small_ = absl::InfinitePast();
};

}  // namespace logprobd
