#include "server/base/clock.h"

#include <chrono>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"

namespace logprobd::testing {
namespace {

TEST(SteadyClockTest, NeverGoesBack) {
  const Clock& clock = Clock::Steady();
  absl::Time last = clock.Now();
  for (int i = 0; i < 1'000; ++i) {
    const absl::Time now = clock.Now();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(SteadyClockTest, GivesUpAtItsTime) {
  const Clock& clock = Clock::Steady();
  absl::Mutex mutex;
  bool condition = false;
  const absl::Time until = clock.Now() + absl::Milliseconds(2);

  absl::MutexLock lock(&mutex);
  EXPECT_FALSE(clock.AwaitUntil(mutex, absl::Condition(&condition), until));
  EXPECT_GE(clock.Now(), until);
  // The time has already passed, and the condition is false.
  EXPECT_FALSE(clock.AwaitUntil(mutex, absl::Condition(&condition), absl::InfinitePast()));
  condition = true;
  EXPECT_TRUE(clock.AwaitUntil(mutex, absl::Condition(&condition), absl::InfinitePast()));
}

TEST(SteadyClockTest, SeesTheConditionWithoutATime) {
  const Clock& clock = Clock::Steady();
  absl::Mutex mutex;
  bool condition = false;
  std::thread setter([&] {
    absl::MutexLock lock(&mutex);
    condition = true;
  });

  {
    absl::MutexLock lock(&mutex);
    EXPECT_TRUE(clock.AwaitUntil(mutex, absl::Condition(&condition), absl::InfiniteFuture()));
  }
  setter.join();
}

TEST(WallNowTest, IsTheTimeOfTheSystem) {
  const auto system_now = [] { return absl::FromChrono(std::chrono::system_clock::now()); };
  const absl::Time before = system_now();
  const absl::Time now = WallNow();

  EXPECT_LE(before, now);
  EXPECT_LE(now, system_now());
}

TEST(FakeClockTest, StandsStillUntilItIsAdvanced) {
  FakeClock clock;
  const absl::Time begin = clock.Now();
  EXPECT_EQ(clock.Now(), begin);

  clock.Advance(absl::Seconds(3));

  EXPECT_EQ(clock.Now(), begin + absl::Seconds(3));
}

TEST(FakeClockTest, WakesAWaiterWhenItsTimeHasCome) {
  FakeClock clock;
  absl::Mutex mutex;
  bool condition = false;
  bool has_returned = false;
  const absl::Time until = clock.Now() + absl::Seconds(2);
  std::thread waiter([&] {
    absl::MutexLock lock(&mutex);
    EXPECT_FALSE(clock.AwaitUntil(mutex, absl::Condition(&condition), until));
    has_returned = true;
  });
  clock.WaitForWaiter(until);

  clock.Advance(absl::Seconds(1));
  clock.WaitUntilAsleep();
  {
    absl::MutexLock lock(&mutex);
    EXPECT_FALSE(has_returned);
  }
  clock.Advance(absl::Seconds(1));

  waiter.join();
  EXPECT_TRUE(has_returned);
}

TEST(FakeClockTest, WakesAWaiterWhoseConditionHolds) {
  FakeClock clock;
  absl::Mutex mutex;
  bool condition = false;
  std::thread waiter([&] {
    absl::MutexLock lock(&mutex);
    EXPECT_TRUE(clock.AwaitUntil(mutex, absl::Condition(&condition), absl::InfiniteFuture()));
  });
  clock.WaitForWaiter(absl::InfiniteFuture());

  {
    absl::MutexLock lock(&mutex);
    condition = true;
  }
  waiter.join();
}

// Regression: a wait that was over counted until its thread ran again, so a test went on too early.
TEST(FakeClockTest, AThreadWithAReasonToWakeDoesNotCountAsWaiting) {
  FakeClock clock;
  absl::Mutex mutex;
  const absl::Time until = clock.Now() + absl::Seconds(1);
  int waits_over = 0;
  int waits_wanted = 0;
  const auto is_over = [&] { return waits_wanted > waits_over; };
  std::thread waiter([&] {
    const absl::MutexLock lock(&mutex);
    while (clock.AwaitUntil(mutex, absl::Condition(&is_over), until)) ++waits_over;
  });

  for (int i = 1; i <= 100; ++i) {
    clock.WaitForWaiter(until);
    const absl::MutexLock lock(&mutex);
    EXPECT_EQ(waits_over, waits_wanted);
    waits_wanted = i;
  }

  clock.WaitForWaiter(until);
  clock.Advance(absl::Seconds(1));
  waiter.join();
}

}  // namespace
}  // namespace logprobd::testing
