#pragma once

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logprobd {

/// Time for queues and deadlines: monotonic, with an arbitrary epoch, so that a step of the wall
/// clock expires nothing. Never mix with absl::Now().
class Clock {
 public:
  virtual ~Clock() = default;

  virtual absl::Time Now() const = 0;

  /// Waits until `condition` holds or Now() reaches `until`; returns whether it holds. `mutex` is
  /// held on entry and exit. A fake clock returns when it has been advanced past `until`.
  virtual bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                          absl::Time until) const = 0;

  /// The process's steady clock.
  static const Clock& Steady();
};

}  // namespace logprobd
