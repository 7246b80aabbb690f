#include "server/app/load_ticker.h"

#include "server/base/clock.h"

namespace logprobd {
namespace {

constexpr absl::Duration kProgressPeriod = absl::Milliseconds(200);

}  // namespace

absl::Status ShuttingDown() { return absl::UnavailableError("the server is shutting down"); }

absl::Status LoadTicker::Tell(absl::string_view phase, int64_t bytes_done, int64_t bytes_total) {
  if (is_stopped_) {
    return ShuttingDown();
  }
  // Of each phase the begin and the end, and between them now and then.
  const absl::Time now = Clock::Steady().Now();
  const bool is_end = bytes_total > 0 && bytes_done >= bytes_total;
  if (phase == phase_ && now < next_ && !is_end) {
    return absl::OkStatus();
  }
  phase_ = std::string(phase);
  next_ = now + kProgressPeriod;
  if (progress_ && !progress_({phase_, bytes_done, bytes_total})) {
    return absl::CancelledError("the load was cancelled");
  }
  return absl::OkStatus();
}

}  // namespace logprobd
