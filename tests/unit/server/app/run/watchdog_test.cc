#include "server/app/run/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tests/support/fake_clock.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::FieldsAre;
using ::testing::IsEmpty;

constexpr absl::Duration kSecond = absl::Seconds(1);

/// A meter that looks once a second, and two threads.
class HangMeterTest : public ::testing::Test {
 protected:
  /// Looks after `passed`.
  std::vector<HungThread> Look(absl::Duration passed = kSecond) {
    now_ += passed;
    return meter_.Look(now_, heartbeats_.All());
  }

  Heartbeats heartbeats_;
  const std::shared_ptr<Heartbeat> first_ = heartbeats_.Add({.thread = "first", .head = ""});
  const std::shared_ptr<Heartbeat> second_ = heartbeats_.Add({.thread = "second", .head = ""});
  HangMeter meter_{kSecond};
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(HangMeterTest, CountsFromTheFirstLookAtTheSameBeat) {
  first_->Begin();

  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(Look(), ElementsAre(FieldsAre(first_, kSecond)));
  EXPECT_THAT(Look(), ElementsAre(FieldsAre(first_, 2 * kSecond)));
}

TEST_F(HangMeterTest, AThreadThatMovesNeverStandsStill) {
  first_->Begin();
  Look();

  for (int i = 0; i < 3; ++i) {
    first_->Beat();
    EXPECT_THAT(Look(), IsEmpty());
  }
}

TEST_F(HangMeterTest, AThreadWithoutWorkNeverStandsStill) {
  first_->Begin();
  Look();
  first_->End();

  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(Look(), IsEmpty());
}

TEST_F(HangMeterTest, StartsAnewWithNewWork) {
  first_->Begin();
  Look();
  Look();
  first_->End();
  first_->Begin();

  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(Look(), ElementsAre(FieldsAre(first_, kSecond)));
}

TEST_F(HangMeterTest, NamesTheLongestHangFirst) {
  first_->Begin();
  Look();
  second_->Begin();
  Look();
  first_->Beat();
  Look();

  EXPECT_THAT(Look(), ElementsAre(FieldsAre(second_, 2 * kSecond), FieldsAre(first_, kSecond)));
}

TEST_F(HangMeterTest, CountsNoTimeInWhichTheProcessWasStopped) {
  first_->Begin();
  Look();

  EXPECT_THAT(Look(absl::Hours(1)), ElementsAre(FieldsAre(first_, 2 * kSecond)));
  EXPECT_THAT(Look(), ElementsAre(FieldsAre(first_, 3 * kSecond)));
}

TEST_F(HangMeterTest, ForgetsAThreadThatHasEnded) {
  std::shared_ptr<Heartbeat> ended = heartbeats_.Add({.thread = "ended", .head = ""});
  ended->Begin();
  Look();
  ended.reset();

  EXPECT_THAT(Look(), ElementsAre());
  EXPECT_THAT(Look(), ElementsAre());
}

TEST(DescribeHangTest, LeavesOutWhatDoesNotApply) {
  const auto engine =
      std::make_shared<Heartbeat>(Heartbeat::Owner{"engine-finish", "chat", /*replica=*/2});
  const auto main = std::make_shared<Heartbeat>(Heartbeat::Owner{"main", ""});
  engine->Begin(3);

  EXPECT_EQ(DescribeHang({engine, absl::Milliseconds(6'900)}),
            "thread engine-finish, head chat, replica 2, shard 3 has not moved for 6 s");
  EXPECT_EQ(DescribeHang({main, absl::Minutes(2)}), "thread main has not moved for 120 s");
}

/// A watchdog on a fake clock, which waits after each look.
class WatchdogTest : public ::testing::Test {
 protected:
  const absl::Duration still_max_ = 4 * Watchdog::kInterval;

  void Start(absl::Duration ping_interval = absl::InfiniteDuration()) {
    Watchdog::Options options;
    options.still_max = still_max_;
    options.on_hang = [this](absl::Span<const HungThread> still) {
      const absl::MutexLock lock(&mutex_);
      ++num_calls_;
      still_.assign(still.begin(), still.end());
    };
    options.ping_interval = ping_interval;
    options.ping = [this] {
      const absl::MutexLock lock(&mutex_);
      ++num_pings_;
    };
    auto watchdog = Watchdog::Create(std::move(options), heartbeats_, clock_);
    ASSERT_TRUE(watchdog.ok()) << watchdog.status();
    watchdog_ = *std::move(watchdog);
    clock_.WaitUntilAsleep();
  }

  /// Lets the watchdog look `count` more times.
  void Look(int count) {
    for (int i = 0; i < count; ++i) {
      clock_.Advance(Watchdog::kInterval);
      clock_.WaitUntilAsleep();
    }
  }

  /// Lets the watchdog look once more and waits until it has found a hang.
  std::vector<HungThread> LookAndFind() {
    clock_.Advance(Watchdog::kInterval);
    const absl::MutexLock lock(&mutex_);
    const auto is_called = [this]()
                               ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return num_calls_ > 0; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&is_called), absl::Minutes(1)));
    return still_;
  }

  int num_calls() {
    const absl::MutexLock lock(&mutex_);
    return num_calls_;
  }
  int num_pings() {
    const absl::MutexLock lock(&mutex_);
    return num_pings_;
  }

  testing::FakeClock clock_;
  Heartbeats heartbeats_;
  const std::shared_ptr<Heartbeat> thread_ = heartbeats_.Add({.thread = "thread", .head = ""});
  absl::Mutex mutex_;
  int num_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int num_pings_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<HungThread> still_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Watchdog> watchdog_;  // destroyed first
};

TEST_F(WatchdogTest, ReportsAHangBeyondTheLimitAndNotBefore) {
  thread_->Begin();
  Start();

  Look(4);
  EXPECT_EQ(num_calls(), 0);  // exactly the limit

  EXPECT_THAT(LookAndFind(), ElementsAre(FieldsAre(thread_, 5 * Watchdog::kInterval)));
}

TEST_F(WatchdogTest, ReportsOnlyTheThreadsBeyondTheLimit) {
  const std::shared_ptr<Heartbeat> later = heartbeats_.Add({.thread = "later", .head = ""});
  thread_->Begin();
  Start();
  Look(4);
  later->Begin();

  EXPECT_THAT(LookAndFind(), ElementsAre(Field(&HungThread::heartbeat, thread_)));
}

TEST_F(WatchdogTest, PingsAtItsIntervalWhileThreadsMoveOrRest) {
  Start(/*ping_interval=*/2 * Watchdog::kInterval);
  EXPECT_EQ(num_pings(), 1);

  Look(4);
  EXPECT_EQ(num_pings(), 3);

  thread_->Begin();
  for (int i = 0; i < 4; ++i) {
    thread_->Beat();
    Look(1);
  }
  EXPECT_EQ(num_pings(), 5);
}

TEST_F(WatchdogTest, DoesNotPingAfterAThreadHasStoodStillForAnInterval) {
  thread_->Begin();
  Start(/*ping_interval=*/2 * Watchdog::kInterval);
  Look(2);
  EXPECT_EQ(num_pings(), 2);  // exactly an interval

  const std::shared_ptr<Heartbeat> later = heartbeats_.Add({.thread = "later", .head = ""});
  later->Begin();
  Look(2);  // the second thread has stood still for less
  EXPECT_EQ(num_pings(), 2);

  thread_->Beat();
  Look(1);
  EXPECT_EQ(num_pings(), 3);
}

TEST_F(WatchdogTest, NeverPingsWithoutAnInterval) {
  Start();

  Look(4);

  EXPECT_EQ(num_pings(), 0);
}

}  // namespace
}  // namespace logprobd
