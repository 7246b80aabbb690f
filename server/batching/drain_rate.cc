#include "server/batching/drain_rate.h"

#include <algorithm>

namespace logprobd {
namespace {

/// Weight of the newest batch in the running mean.
constexpr double kNewest = 0.2;

/// The smaller of two rates that have been measured (are not 0).
double Faster(double a, double b) { return a == 0 || b == 0 ? a + b : std::min(a, b); }

}  // namespace

void DrainRate::AddBatch(int64_t rows, absl::Time started, absl::Time ended, int replica) {
  const auto index = static_cast<size_t>(replica);
  if (index >= last_ends_.size()) {
    last_ends_.resize(index + 1, absl::InfinitePast());
  }
  absl::Time& last_end = last_ends_[index];
  const absl::Duration alone = ended - std::max(started, last_end);
  last_end = std::max(last_end, ended);
  if (rows <= 0 || alone <= absl::ZeroDuration()) {
    return;
  }
  const double measured = absl::ToDoubleSeconds(alone) / static_cast<double>(rows);
  const bool is_representative = rows >= representative_rows_;
  if (is_representative) {
    mean_ = mean_ == 0 ? measured : (1 - kNewest) * mean_ + kNewest * measured;
  }
  // A small batch proves a faster rate, never a slower one.
  if (is_representative || measured < Fastest(ended)) {
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
  return absl::Seconds(rows * mean_ / num_replicas_);
}

std::optional<absl::Duration> DrainRate::LeastTimeFor(double rows, absl::Time now) const {
  const double fastest = Fastest(now);
  if (fastest == 0) {
    return std::nullopt;
  }
  return absl::Seconds(rows * fastest / num_replicas_);
}

double DrainRate::Fastest(absl::Time now) const {
  const absl::Duration age = now - period_begin_;
  return age >= 2 * kMemory ? 0 : age < kMemory ? Faster(fastest_, earlier_fastest_) : fastest_;
}

absl::Duration DrainRate::RetryAfter(double rows) const {
  return std::clamp(TimeFor(rows).value_or(kRetryAfterUnmeasured), kRetryAfterMin, kRetryAfterMax);
}

}  // namespace logprobd
