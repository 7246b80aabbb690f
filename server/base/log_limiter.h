#pragma once

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logprobd {

/// Lets a bounded number of log lines through, so that a storm of errors does not become a storm of
/// lines. Thread-safe.
class LogLimiter {
 public:
  /// At most `lines_max` lines in each window of `window`. `clock` must outlive the limiter.
  LogLimiter(int64_t lines_max, absl::Duration window, const Clock& clock);

  /// The number of lines held back since the last one that was let through, or nothing when this
  /// one is to be held back too.
  std::optional<int64_t> Admit();

 private:
  const int64_t lines_max_;
  const absl::Duration window_;
  const Clock& clock_;
  absl::Mutex mutex_;
  absl::Time window_end_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t lines_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t suppressed_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logprobd
