#include "server/base/log_limiter.h"

#include <utility>

namespace logprobd {

LogLimiter::LogLimiter(int64_t lines_max, absl::Duration window, const Clock& clock)
    : lines_max_(lines_max), window_(window), clock_(clock) {}

std::optional<int64_t> LogLimiter::Admit() {
  const absl::Time now = clock_.Now();
  const absl::MutexLock lock(&mutex_);
  if (now >= window_end_) {
    window_end_ = now + window_;
    lines_ = 0;
  }
  if (lines_ >= lines_max_) {
    ++suppressed_;
    return std::nullopt;
  }
  ++lines_;
  return std::exchange(suppressed_, 0);
}

}  // namespace logprobd
