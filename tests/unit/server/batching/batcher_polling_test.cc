#include <atomic>
#include <cstdint>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/base/clock.h"
#include "server/metrics/metrics.h"
#include "tests/support/batcher_on.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_engine.h"

namespace logprobd::testing {
namespace {

/// A FakeClock that counts how often it is looked at, and how often a thread begins to sleep.
class WatchedClock final : public Clock {
 public:
  absl::Time Now() const override {
    ++num_looks;
    return clock.Now();
  }
  bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                  absl::Time until) const override {
    if (!condition.Eval() && clock.Now() < until) ++num_sleeps;
    return clock.AwaitUntil(mutex, condition, until);
  }

  FakeClock clock;
  mutable std::atomic<int64_t> num_looks = 0;
  mutable std::atomic<int64_t> num_sleeps = 0;
};

TEST(BatcherPollingTest, AnIdleBatcherLooksForItsTimeAndThenSleeps) {
  constexpr absl::Duration kPoll = absl::Milliseconds(2);
  WatchedClock clock;
  FakeEngine engine(FakeEngine::Options{});
  Metrics metrics(Metrics::Options{.heads = {"default"}, .version = "test", .commit = "test"});
  const auto batcher = BatcherOn({&engine}, {.busy_poll = kPoll}, clock, metrics);
  ASSERT_TRUE(batcher.ok()) << batcher.status();

  while (clock.num_looks < 1'000 && clock.num_sleeps == 0) std::this_thread::yield();
  EXPECT_EQ(clock.num_sleeps, 0);

  clock.clock.Advance(kPoll);
  clock.clock.WaitForWaiter(absl::InfiniteFuture());
  EXPECT_EQ(clock.num_sleeps, 1);
}

}  // namespace
}  // namespace logprobd::testing
