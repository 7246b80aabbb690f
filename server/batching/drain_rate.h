#pragma once

#include <cstdint>
#include <optional>

#include "absl/time/time.h"

namespace logprobd {

/// How fast the engine takes rows from the queue, from batches large enough to tell; for retry
/// hints and for refusing what cannot be in time. Not thread-safe.
class DrainRate {
 public:
  static constexpr absl::Duration kRetryAfterMin = absl::Milliseconds(1);
  static constexpr absl::Duration kRetryAfterMax = absl::Seconds(10);
  /// The hint while nothing has been measured.
  static constexpr absl::Duration kRetryAfterUnmeasured = absl::Milliseconds(50);

  /// Batches below `representative_rows` are not counted: a batch of one row takes nearly as long
  /// as one of a hundred and would make the engine look slow.
  explicit DrainRate(int64_t representative_rows) : representative_rows_(representative_rows) {}

  /// A batch was with the engine from `started` to `ended`. It is taken to have had the engine for
  /// itself from the end of the batch before it.
  void AddBatch(int64_t rows, absl::Time started, absl::Time ended);

  std::optional<double> rows_per_second() const;

  /// Time to score `rows`; none while nothing has been measured.
  std::optional<absl::Duration> TimeFor(double rows) const;

  /// When `rows` will have left, kept within the bounds above.
  absl::Duration RetryAfter(double rows) const;

 private:
  int64_t representative_rows_;
  absl::Time last_end_ = absl::InfinitePast();
  double seconds_per_row_ = 0;  // 0: not measured
};

}  // namespace logprobd
