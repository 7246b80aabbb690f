#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "server/base/scoring_engine.h"
#include "server/batching/row_queue.h"

namespace logprobd {

/// Decides how long a batch waits and how many rows it takes.
///
/// Waiting. A batch leaves at once when a replica has no batch in flight: waiting could only add
/// latency. When every replica has one in flight, the next batch leaves as soon as one of these
/// holds:
///   - its budget is full;
///   - its oldest request has waited `wait_max`;
///   - an engine will be idle within kPrepareTime, judged by the duration of its last batch.
/// When every replica has two in flight there is no free slot, and the batch waits for one.
///
/// Small requests. While a small request waits, or one arrived within kSmallMemory, a batch takes
/// rows of large requests for at most a quarter of its budget, so that a small request never waits
/// for a batch full of large ones.
///
/// Whole steps. An engine computes rows in steps (ScoringEngine::row_step); a part of a step takes
/// as long as a whole one. A batch of several steps therefore leaves the part to the next batch,
/// taking fewer rows of large requests, if other rows wait or another batch is in flight. A batch
/// of small requests only leaves the part in any case once it fills a step: most of its rows are
/// answered sooner and the rest hardly later.
class LaunchRule {
 public:
  /// How long a small request limits the share of large ones after it has arrived.
  static constexpr absl::Duration kSmallMemory = absl::Milliseconds(100);
  /// Time to gather a small batch and copy it to a GPU.
  static constexpr absl::Duration kPrepareTime = absl::Microseconds(250);
  /// A batch with fewer steps is never cut to whole steps.
  static constexpr int64_t kStepsMin = 4;
  /// The same when some rows have to wait for the next batch anyway.
  static constexpr int64_t kCutStepsMin = 2;

  /// Batches hold at most `rows_max` rows, or `rows_max_f32` rows of f32. `engine`, whose steps
  /// are used, must outlive the rule.
  LaunchRule(int64_t rows_max, int64_t rows_max_f32, const ScoringEngine& engine,
             absl::Duration wait_max)
      : rows_max_(rows_max), rows_max_f32_(rows_max_f32), engine_(engine), wait_max_(wait_max) {}

  void set_wait_max(absl::Duration wait_max) { wait_max_ = wait_max; }

  void NoteSmallRequest(absl::Time now) { last_small_ = now; }

  /// The most that a batch may take now.
  BatchBudget Budget(const RowQueue& queue, absl::Time now) const {
    const bool is_shared = queue.has_small() || now - last_small_ <= kSmallMemory;
    return BatchBudget{
        .rows_max = rows_max_,
        .rows_max_f32 = rows_max_f32_,
        .bulk_rows_max = is_shared ? std::max<int64_t>(rows_max_ / 4, 1) : rows_max_};
  }

  /// The budget of a batch that leaves now, cut to whole steps. `in_flight`: number of batches in
  /// flight on its replica.
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

  /// The time at which the next batch may leave if a slot is free; `now` if its budget is full, and
  /// infinite if nothing waits. `in_flight`: number of batches in flight on the healthy replica
  /// that has the fewest; `idle_time`: when that replica will probably end the older one.
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
