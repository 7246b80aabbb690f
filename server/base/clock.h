#pragma once

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logprobd {

/// A monotonic clock for queues and deadlines. Its epoch is arbitrary, and a change of the wall
/// clock does not affect it. Do not mix its times with absl::Now().
class Clock {
 public:
  virtual ~Clock() = default;

  virtual absl::Time Now() const = 0;

  /// Waits until `condition` holds or Now() reaches `until`, and returns whether it holds. `mutex`
  /// is held on entry and exit. A fake clock returns after it has been advanced past `until`.
  virtual bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                          absl::Time until) const = 0;

  /// Returns the clock of the process.
  static const Clock& Steady();
};

/// Returns the time of the wall clock. Unlike absl::Now(), which extrapolates from its last reading
/// and lags for some time after a step of the wall clock, it reads the clock that gRPC reads.
absl::Time WallNow();

}  // namespace logprobd
