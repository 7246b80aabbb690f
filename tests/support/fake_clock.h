#pragma once

#include <atomic>
#include <cstdint>
#include <list>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logprobd::testing {

/// A Clock that moves only when a test advances it. Thread-safe; outlives its users.
///
/// A thread in AwaitUntil sleeps until its condition holds or Advance reaches its time; no real
/// time is involved.
class FakeClock final : public Clock {
 public:
  /// Starts at an arbitrary time well away from the epoch.
  FakeClock();

  absl::Time Now() const override;
  bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                  absl::Time until) const override;

  /// Moves time on by `step` >= 0 and wakes who waited for it. The caller holds no mutex on which a
  /// thread waits here.
  void Advance(absl::Duration step);

  /// Blocks until a thread waits in AwaitUntil for exactly `until` (absl::InfiniteFuture() counts):
  /// with it a test knows that the code under test has gone to sleep.
  void WaitForWaiter(absl::Time until) const;

  /// Blocks until `count` threads wait in AwaitUntil and none of all that do has anything to wake
  /// for: what was asked of them before has been done.
  void WaitUntilAsleep(int count = 1) const;

 private:
  struct Waiter {
    absl::Mutex* mutex;
    absl::Time until;
    const absl::Condition* ready;
    bool stale;  // time has moved since its condition was last looked at
  };

  bool WakeStaleWaiters();
  bool AreAsleep(int count) const;

  std::atomic<int64_t> now_nanos_;
  mutable absl::Mutex mutex_;  // may be taken with a waiter's mutex held, never the reverse
  mutable std::list<Waiter> waiters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd::testing
