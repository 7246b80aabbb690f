#pragma once

#include <cstdint>
#include <optional>

#include "absl/time/time.h"

namespace logprobd {

/// How fast the engine takes rows from the queue: a running mean for retry hints, and the best of
/// the last seconds for refusing what cannot be in time. A stall slows the mean; it must not make
/// the server refuse work that it could do. Not thread-safe.
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

  /// A batch was with the engine from `started` to `ended`. It is taken to have had the engine for
  /// itself from the end of the batch before it.
  void AddBatch(int64_t rows, absl::Time started, absl::Time ended);

  /// Time to score `rows` at the mean rate; none while nothing has been measured.
  std::optional<absl::Duration> TimeFor(double rows) const;

  /// Time to score `rows` at the best rate of late; none when nothing has been measured lately.
  std::optional<absl::Duration> LeastTimeFor(double rows, absl::Time now) const;

  /// When `rows` will have left, kept within the bounds above.
  absl::Duration RetryAfter(double rows) const;

 private:
  void NoteFastest(double seconds_per_row, absl::Time now);

  int64_t representative_rows_;
  absl::Time last_end_ = absl::InfinitePast();
  // Seconds a row, 0: not measured.
  double mean_ = 0;
  absl::Time period_begin_ = absl::InfinitePast();  ///< Of `fastest_`.
  double fastest_ = 0;                              ///< In the period.
  double earlier_fastest_ = 0;                      ///< In the kMemory before it.
};

}  // namespace logprobd
