#pragma once

#include <atomic>
#include <cstdint>
#include <list>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logprobd::testing {

/// A Clock that moves only when a test advances it. Thread-safe; must outlive its users.
///
/// A thread in AwaitUntil sleeps until its condition holds or Advance reaches its time; no real
/// time is involved.
class FakeClock final : public Clock {
 public:
  /// Starts at an arbitrary time far from the epoch.
  FakeClock();

  absl::Time Now() const override;
  bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                  absl::Time until) const override;

  /// Advances the time by `step` >= 0 and wakes the threads that waited for it. The caller must not
  /// hold a mutex that a waiting thread passed to AwaitUntil.
  void Advance(absl::Duration step);

  // These two abort after a minute of real time.
  /// Blocks until a thread waits in AwaitUntil for exactly `until`, which may be
  /// absl::InfiniteFuture(), and has no reason to wake. The test then knows that the code under
  /// test sleeps.
  void WaitForWaiter(absl::Time until) const;

  /// Blocks until `count` threads wait in AwaitUntil and no waiting thread has a reason to wake.
  /// The threads have then done all earlier work.
  void WaitUntilAsleep(int count = 1) const;

 private:
  struct Waiter {
    absl::Mutex* mutex;
    absl::Time until;
    const absl::Condition* ready;
    bool stale;  // the time has changed since its condition was last evaluated
  };

  bool WakeStaleWaiters();
  /// Returns true if the thread does not hold its mutex and has no reason to wake.
  static bool IsAsleep(const Waiter& waiter);
  /// Blocks until `condition`, which is called with the mutex, holds.
  template <class Condition>
  void WaitFor(const Condition& condition) const;

  std::atomic<int64_t> now_nanos_;
  mutable absl::Mutex mutex_;  // locked while a waiter's mutex is held, never the reverse
  mutable std::list<Waiter> waiters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd::testing
