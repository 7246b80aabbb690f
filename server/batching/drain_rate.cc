#include "server/batching/drain_rate.h"

#include <algorithm>

namespace logprobd {
namespace {

/// Weight of the newest batch in the running mean.
constexpr double kNewest = 0.2;

}  // namespace

void DrainRate::AddBatch(int64_t rows, absl::Time started, absl::Time ended) {
  const absl::Duration alone = ended - std::max(started, last_end_);
  last_end_ = std::max(last_end_, ended);
  if (rows < representative_rows_ || alone <= absl::ZeroDuration()) {
    return;
  }
  const double measured = absl::ToDoubleSeconds(alone) / static_cast<double>(rows);
  seconds_per_row_ =
      seconds_per_row_ == 0 ? measured : (1 - kNewest) * seconds_per_row_ + kNewest * measured;
}

std::optional<double> DrainRate::rows_per_second() const {
  if (seconds_per_row_ == 0) {
    return std::nullopt;
  }
  return 1 / seconds_per_row_;
}

std::optional<absl::Duration> DrainRate::TimeFor(double rows) const {
  if (seconds_per_row_ == 0) {
    return std::nullopt;
  }
  return absl::Seconds(rows * seconds_per_row_);
}

absl::Duration DrainRate::RetryAfter(double rows) const {
  return std::clamp(TimeFor(rows).value_or(kRetryAfterUnmeasured), kRetryAfterMin, kRetryAfterMax);
}

}  // namespace logprobd
