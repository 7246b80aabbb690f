#include "server/transport/unread_answers.h"

#include <chrono>
#include <future>
#include <thread>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"

namespace logprobd::testing {
namespace {

class UnreadAnswersTest : public ::testing::Test {
 protected:
  uint64_t Begin(int64_t bytes = 0) {
    return unread_.Begin(bytes, [this] { ++cancelled_; });
  }
  /// Advances the time and returns how many calls have been cancelled.
  int CancelledAfter(absl::Duration step) {
    clock_.Advance(step);
    const int before = cancelled_;
    const int count = unread_.CancelOld();
    EXPECT_EQ(count, cancelled_ - before);
    return cancelled_;
  }

  FakeClock clock_;
  UnreadAnswers unread_{clock_};
  int cancelled_ = 0;
};

TEST_F(UnreadAnswersTest, CancelsAfterItsTimeAndOnce) {
  Begin();

  EXPECT_EQ(CancelledAfter(UnreadAnswers::kTimeMax - absl::Milliseconds(1)), 0);
  EXPECT_EQ(CancelledAfter(absl::Milliseconds(1)), 1);
  EXPECT_EQ(CancelledAfter(absl::Hours(1)), 1);
}

TEST_F(UnreadAnswersTest, GivesALargeResponseMoreTime) {
  Begin(UnreadAnswers::kBytesPerSecond * 60);

  EXPECT_EQ(CancelledAfter(UnreadAnswers::kTimeMax + absl::Seconds(59)), 0);
  EXPECT_EQ(CancelledAfter(absl::Seconds(1)), 1);
}

TEST_F(UnreadAnswersTest, GivesAResponseASecondForEachMebibyteBesideItsHalfMinute) {
  Begin(int64_t{3} << 20);

  EXPECT_EQ(CancelledAfter(absl::Seconds(32)), 0);
  EXPECT_EQ(CancelledAfter(absl::Seconds(1)), 1);
}

TEST_F(UnreadAnswersTest, DoesNotCancelWhatHasEnded) {
  const uint64_t first = Begin();
  Begin();
  unread_.End(first);

  EXPECT_EQ(CancelledAfter(UnreadAnswers::kTimeMax), 1);
}

TEST_F(UnreadAnswersTest, ACallThatEndsWhileItIsCancelledDoesNotWaitForItself) {
  uint64_t number = 0;
  number = unread_.Begin(0, [&] {
    ++cancelled_;
    unread_.End(number);
  });
  Begin();

  EXPECT_EQ(CancelledAfter(UnreadAnswers::kTimeMax), 2);
}

TEST_F(UnreadAnswersTest, EndWaitsForTheCancellationOnAnotherThread) {
  absl::Notification is_cancelling;
  absl::Notification may_go_on;
  bool has_returned = false;
  const uint64_t number = unread_.Begin(0, [&] {
    is_cancelling.Notify();
    may_go_on.WaitForNotification();
    has_returned = true;
  });
  clock_.Advance(UnreadAnswers::kTimeMax);
  std::thread canceller([this] { unread_.CancelOld(); });
  is_cancelling.WaitForNotification();
  std::thread releaser([&] { may_go_on.Notify(); });

  unread_.End(number);

  EXPECT_TRUE(has_returned);
  canceller.join();
  releaser.join();
}

TEST_F(UnreadAnswersTest, EndDoesNotWaitForTheCancellationOfAnotherCall) {
  absl::Notification is_cancelling;
  absl::Notification may_go_on;
  unread_.Begin(0, [&] {
    is_cancelling.Notify();
    may_go_on.WaitForNotification();
  });
  clock_.Advance(UnreadAnswers::kTimeMax);
  const uint64_t other = Begin();
  std::thread canceller([this] { unread_.CancelOld(); });
  is_cancelling.WaitForNotification();

  std::future<void> ended = std::async(std::launch::async, [&] { unread_.End(other); });
  EXPECT_EQ(ended.wait_for(std::chrono::seconds(20)), std::future_status::ready);

  may_go_on.Notify();
  canceller.join();
}

TEST_F(UnreadAnswersTest, EndOfNoAnswerReturnsAtOnce) {
  unread_.End(0);
  EXPECT_EQ(CancelledAfter(UnreadAnswers::kTimeMax), 0);
}

}  // namespace
}  // namespace logprobd::testing
