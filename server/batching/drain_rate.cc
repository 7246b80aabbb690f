#include "server/batching/drain_rate.h"

#include <algorithm>

namespace logprobd {
namespace {

/// Weight of the newest batch in the running mean.
constexpr double kNewest = 0.2;

/// The smaller of two rates that have been measured (are not 0).
double Faster(double a, double b) { return a == 0 || b == 0 ? a + b : std::min(a, b); }

}  // namespace

void DrainRate::AddBatch(int64_t rows, absl::Time started, absl::Time ended) {
  const absl::Duration alone = ended - std::max(started, last_end_);
  last_end_ = std::max(last_end_, ended);
  if (rows <= 0 || alone <= absl::ZeroDuration()) {
    return;
  }
  const double measured = absl::ToDoubleSeconds(alone) / static_cast<double>(rows);
  const bool is_representative = rows >= representative_rows_;
  if (is_representative) {
    mean_ = mean_ == 0 ? measured : (1 - kNewest) * mean_ + kNewest * measured;
  }
  // A small batch proves a faster rate, never a slower one.
  const std::optional<absl::Duration> least = LeastTimeFor(1, ended);
  if (is_representative || (least.has_value() && absl::Seconds(measured) < *least)) {
    NoteFastest(measured, ended);
  }
}

void DrainRate::NoteFastest(double seconds_per_row, absl::Time now) {
  const absl::Duration age = now - period_begin_;
  if (age >= kMemory) {
    earlier_fastest_ = age < 2 * kMemory ? fastest_ : 0;
    fastest_ = 0;
    period_begin_ = now;
  }
  fastest_ = Faster(fastest_, seconds_per_row);
}

std::optional<absl::Duration> DrainRate::TimeFor(double rows) const {
  if (mean_ == 0) {
    return std::nullopt;
  }
  return absl::Seconds(rows * mean_);
}

std::optional<absl::Duration> DrainRate::LeastTimeFor(double rows, absl::Time now) const {
  const absl::Duration age = now - period_begin_;
  if (age >= 2 * kMemory) {
    return std::nullopt;
  }
  const double best = age < kMemory ? Faster(fastest_, earlier_fastest_) : fastest_;
  return absl::Seconds(rows * best);
}

absl::Duration DrainRate::RetryAfter(double rows) const {
  return std::clamp(TimeFor(rows).value_or(kRetryAfterUnmeasured), kRetryAfterMin, kRetryAfterMax);
}

}  // namespace logprobd
