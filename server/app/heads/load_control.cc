#include "server/app/heads/load_control.h"

#include "server/base/clock.h"

namespace logprobd {
namespace {

constexpr absl::Duration kProgressPeriod = absl::Milliseconds(200);

}  // namespace

absl::Status ShuttingDown() { return absl::UnavailableError("the server is shutting down"); }

std::optional<LoadTurn::Holder> LoadTurn::Take(absl::Duration wait_max) {
  const absl::MutexLock lock(&mutex_);
  const auto is_free = +[](bool* is_taken) { return !*is_taken; };
  if (!mutex_.AwaitWithTimeout(absl::Condition(is_free, &is_taken_), wait_max)) return std::nullopt;
  is_taken_ = true;
  return std::optional<Holder>(std::in_place, *this);
}

void LoadTurn::Release() {
  const absl::MutexLock lock(&mutex_);
  is_taken_ = false;
}

absl::Status LoadTicker::Report(absl::string_view phase, int64_t bytes_done, int64_t bytes_total) {
  if (is_stopped_) return ShuttingDown();
  // The beginning and the end of each phase are always reported.
  const absl::Time now = Clock::Steady().Now();
  const bool is_end = bytes_total > 0 && bytes_done >= bytes_total;
  if (phase == phase_ && now < next_ && !is_end) return absl::OkStatus();
  phase_ = std::string(phase);
  next_ = now + kProgressPeriod;
  if (progress_ && !progress_({phase_, bytes_done, bytes_total})) {
    return absl::CancelledError("the load was cancelled");
  }
  return absl::OkStatus();
}

absl::Status StoppableWeights::ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                                        int64_t row_pitch_bytes) const {
  if (stop_.load(std::memory_order_relaxed)) {
    return absl::CancelledError("stopped while loading the weights");
  }
  return weights_.ReadRows(row_begin, row_end, out, row_pitch_bytes);
}

}  // namespace logprobd
