#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "server/base/scoring_engine.h"
#include "server/batching/row_queue.h"

namespace logprobd {

/// Decides how long a batch waits and how many rows it takes.
///
/// Waiting: a batch is launched at once if a replica has no batch in flight, because waiting could
/// only add latency. If every replica has one in flight, the next batch is launched as soon as one
/// of these conditions is true:
///   - its budget is full;
///   - its oldest request has waited `wait_max`;
///   - an engine will be idle within kPrepareTime, estimated from the duration of its last batch.
/// If every replica has two in flight, there is no free slot, and the batch waits for one.
///
/// Small requests: while a small request waits, or if one arrived within kSmallMemory, a batch uses
/// at most a quarter of its budget for rows of large requests, so that a small request never waits
/// for a batch full of large ones.
///
/// Whole steps: an engine computes rows in steps (ScoringEngine::row_step), and a partial step may
/// take as long as a whole one. If other rows wait or another batch is in flight, a batch of
/// several steps therefore takes fewer rows of large requests and leaves the partial step to the
/// next batch. A batch of only small requests always leaves the partial step if it fills at least
/// one step: most of its rows are answered sooner and the others only slightly later.
class LaunchRule {
 public:
  /// Time after the arrival of a small request for which it limits the share of large ones.
  static constexpr absl::Duration kSmallMemory = absl::Milliseconds(100);
  /// Time to gather a small batch and copy it to a GPU.
  static constexpr absl::Duration kPrepareTime = absl::Microseconds(250);
  /// Minimum number of steps at which a batch with large requests is cut to whole steps.
  static constexpr int64_t kStepsMin = 4;
  /// The same minimum for the case that some rows have to wait for the next batch anyway.
  static constexpr int64_t kCutStepsMin = 2;

  /// Batches hold at most `rows_max` rows, or `rows_max_f32` rows of f32. `engine`, whose steps
  /// are used, must outlive the rule.
  LaunchRule(int64_t rows_max, int64_t rows_max_f32, const ScoringEngine& engine,
             absl::Duration wait_max)
      : rows_max_(rows_max), rows_max_f32_(rows_max_f32), engine_(engine), wait_max_(wait_max) {}

  void set_wait_max(absl::Duration wait_max) { wait_max_ = wait_max; }

  void NoteSmallRequest(absl::Time now) { last_small_ = now; }

  /// Returns the maximum that a batch may take now.
  BatchBudget Budget(const RowQueue& queue, absl::Time now) const {
    const bool is_shared = queue.has_small() || now - last_small_ <= kSmallMemory;
    return BatchBudget{
        .rows_max = rows_max_,
        .rows_max_f32 = rows_max_f32_,
        .bulk_rows_max = is_shared ? std::max<int64_t>(rows_max_ / 4, 1) : rows_max_};
  }

  /// Returns the budget of a batch that is launched now, cut to whole steps. `in_flight` is the
  /// number of batches in flight on its replica.
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

  /// Returns the time at which the next batch may be launched if a slot is free. This is `now` if
  /// its budget is full, and infinite if nothing waits. `in_flight` is the number of batches in
  /// flight on the healthy replica that has the fewest; `idle_time` is the time at which that
  /// replica will probably end the older one.
  absl::Time LaunchTime(const RowQueue& queue, int in_flight, absl::Time idle_time,
                        absl::Time now) const {
    if (queue.empty()) return absl::InfiniteFuture();
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
