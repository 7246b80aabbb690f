#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"

namespace logprobd {

/// How fast the replicas together take rows from the queue: a running mean for retry hints, and the
/// best of the last seconds for refusing what cannot be in time. A stall slows the mean; it must
/// not make the server refuse work that it could do. Not thread-safe.
///
/// Measured is one replica, whichever a batch was with, and all are as fast. The time between the
/// ends of any two batches would tell nothing: those of different replicas may end together, and a
/// replica without work would make the others look slow.
class DrainRate {
 public:
  static constexpr absl::Duration kRetryAfterMin = absl::Milliseconds(1);
  static constexpr absl::Duration kRetryAfterMax = absl::Seconds(10);
  /// The hint while nothing has been measured.
  static constexpr absl::Duration kRetryAfterUnmeasured = absl::Milliseconds(50);
  /// The best rate is of the last kMemory, at most twice that.
  static constexpr absl::Duration kMemory = absl::Seconds(5);

  /// Batches below `representative_rows` do not slow the estimates: a batch of one row takes nearly
  /// as long as one of a hundred and would make the engine look slow.
  explicit DrainRate(int64_t representative_rows) : representative_rows_(representative_rows) {}

  /// How many replicas share the work from now on, >= 1; one at first.
  void set_num_replicas(int num_replicas) { num_replicas_ = num_replicas; }

  /// A batch was with `replica`, counted from 0, from `started` to `ended`. It is taken to have had
  /// the replica for itself from the end of the batch before it there.
  void AddBatch(int64_t rows, absl::Time started, absl::Time ended, int replica = 0);

  /// Time to score `rows` at the mean rate; none while nothing has been measured.
  std::optional<absl::Duration> TimeFor(double rows) const;

  /// Time to score `rows` at the best rate of late; none when nothing has been measured lately.
  std::optional<absl::Duration> LeastTimeFor(double rows, absl::Time now) const;

  /// When `rows` will have left, kept within the bounds above.
  absl::Duration RetryAfter(double rows) const;

 private:
  void NoteFastest(double seconds_per_row, absl::Time now);
  /// Of late; 0: not measured.
  double Fastest(absl::Time now) const;

  int64_t representative_rows_;
  int num_replicas_ = 1;
  std::vector<absl::Time> last_ends_;  ///< Of each replica that has ended a batch.
  // Seconds a row with one replica, 0: not measured.
  double mean_ = 0;
  absl::Time period_begin_ = absl::InfinitePast();  ///< Of `fastest_`.
  double fastest_ = 0;                              ///< In the period.
  double earlier_fastest_ = 0;                      ///< In the kMemory before it.
};

}  // namespace logprobd
