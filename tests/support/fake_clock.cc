#include "tests/support/fake_clock.h"

#include <algorithm>
#include <thread>

#include "absl/time/clock.h"
#include "server/base/errors.h"

namespace logprobd::testing {
namespace {

/// A test that waits longer, in real time, waits for something that does not happen.
constexpr absl::Duration kWaitMax = absl::Minutes(1);

}  // namespace

FakeClock::FakeClock() : now_nanos_(absl::ToInt64Nanoseconds(absl::Hours(1000))) {}

absl::Time FakeClock::Now() const { return absl::FromUnixNanos(now_nanos_.load()); }

bool FakeClock::AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                           absl::Time until) const {
  if (condition.Eval() || Now() >= until) {
    return condition.Eval();
  }
  const auto is_ready = [&] { return Now() >= until || condition.Eval(); };
  const absl::Condition ready(&is_ready);
  std::list<Waiter>::iterator self;
  {
    absl::MutexLock lock(&mutex_);
    // `ready` detects a change of the time since the check above.
    self = waiters_.insert(waiters_.end(), Waiter{&mutex, until, &ready, false});
  }
  mutex.Await(ready);
  {
    absl::MutexLock lock(&mutex_);
    waiters_.erase(self);
  }
  return condition.Eval();
}

void FakeClock::Advance(absl::Duration step) {
  LOGPROBD_CHECK(step >= absl::ZeroDuration());
  now_nanos_.fetch_add(absl::ToInt64Nanoseconds(step));
  {
    absl::MutexLock lock(&mutex_);
    for (Waiter& waiter : waiters_) {
      waiter.stale = true;
    }
  }
  // absl::Mutex evaluates conditions on unlock. WakeStaleWaiters only tries to lock a waiter's
  // mutex, because the waiter may hold it while it locks mutex_. A waiter that has returned needs
  // no wake-up.
  while (!WakeStaleWaiters()) {
    std::this_thread::yield();
  }
}

bool FakeClock::WakeStaleWaiters() {
  absl::MutexLock lock(&mutex_);
  bool all_seen = true;
  for (Waiter& waiter : waiters_) {
    if (waiter.stale && waiter.mutex->TryLock()) {
      waiter.mutex->Unlock();
      waiter.stale = false;
    }
    all_seen = all_seen && !waiter.stale;
  }
  return all_seen;
}

void FakeClock::WaitForWaiter(absl::Time until) const {
  WaitFor([&] {
    return std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter& waiter) {
      return waiter.until == until && IsAsleep(waiter);
    });
  });
}

void FakeClock::WaitUntilAsleep(int count) const {
  WaitFor([&] {
    return static_cast<int>(waiters_.size()) >= count &&
           std::all_of(waiters_.begin(), waiters_.end(), IsAsleep);
  });
}

bool FakeClock::IsAsleep(const Waiter& waiter) {
  // Only tries to lock, as WakeStaleWaiters does.
  if (!waiter.mutex->TryLock()) return false;
  const bool is_ready = waiter.ready->Eval();
  waiter.mutex->Unlock();
  return !is_ready;
}

template <class Condition>
void FakeClock::WaitFor(const Condition& condition) const {
  const auto holds = [&] {
    const absl::MutexLock lock(&mutex_);
    return condition();
  };
  const absl::Time begin = absl::Now();
  while (!holds()) {
    LOGPROBD_CHECK(absl::Now() < begin + kWaitMax, "no thread, or too few, wait as they should");
    std::this_thread::yield();
  }
}

}  // namespace logprobd::testing
