#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/batcher_on.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using BatcherDeadlineTest = BatcherTest;

/// A clock that, once it ticks, advances by a millisecond whenever it is read.
class TickingClock final : public Clock {
 public:
  absl::Time Now() const override {
    return clock_.Now() + absl::Milliseconds(is_ticking_ ? ++ticks_ : 0);
  }
  bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition,
                  absl::Time /*until*/) const override {
    return clock_.AwaitUntil(mutex, condition, absl::InfiniteFuture());
  }

  /// Waits until the thread that uses the clock sleeps, then starts ticking. Returns the time
  /// before the first tick.
  absl::Time StartTicking() {
    clock_.WaitUntilAsleep();
    is_ticking_ = true;
    return clock_.Now();
  }

 private:
  FakeClock clock_;
  std::atomic<bool> is_ticking_ = false;
  mutable std::atomic<int64_t> ticks_ = 0;
};

TEST_F(BatcherDeadlineTest, RefusesARequestWhoseDeadlineHasPassed) {
  MakeBatcher();

  EXPECT_EQ(Refusal({.rows = 1, .deadline = clock_.Now()}).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Refusal({.rows = 0, .deadline = clock_.Now() - absl::Seconds(1)}).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine_->num_batches(), 0);
}

TEST_F(BatcherDeadlineTest, EndsQueuedRequestsOnTimeWhileTheEngineHangs) {
  MakeBatcher();
  OccupyBothSlots();
  Answer& late = Submit({.rows = 1, .deadline = clock_.Now() + absl::Milliseconds(30)});
  Answer& later = Submit({.rows = 1, .deadline = clock_.Now() + absl::Milliseconds(50)});

  clock_.Advance(absl::Milliseconds(30));

  EXPECT_EQ(late.WaitForCode(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(late.Wait().status().message(), HasSubstr("1 of 1 rows waited"));
  EXPECT_FALSE(later.is_called());
}

TEST_F(BatcherDeadlineTest, WakesForADeadlineEarlierThanTheOneItWaitsFor) {
  MakeBatcher();
  OccupyBothSlots();
  Submit({.rows = 1, .deadline = clock_.Now() + absl::Milliseconds(500)});
  clock_.WaitUntilAsleep();
  Answer& early = Submit({.rows = 1, .deadline = clock_.Now() + absl::Milliseconds(5)});
  clock_.WaitForWaiter(clock_.Now() + absl::Milliseconds(5));

  clock_.Advance(absl::Milliseconds(5));

  EXPECT_EQ(early.WaitForCode(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(BatcherDeadlineTest, NeverLaunchesExpiredRows) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  Submit({.rows = 5, .deadline = clock_.Now() + absl::Milliseconds(30)});
  Answer& alive = Submit({.rows = 2});

  clock_.Advance(absl::Milliseconds(30));
  engine_->Release();

  EXPECT_TRUE(alive.Wait().ok());
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1, 2));
}

TEST_F(BatcherDeadlineTest, DropsABatchWhoseRequestsAllExpireDuringTheCopy) {
  TickingClock clock;
  FakeEngine engine;
  // The 64 + 12 bytes of one request.
  auto batcher =
      BatcherOn({&engine}, {.queue_bytes_max = 76, .client_share_max = 1}, clock, metrics_);
  ASSERT_TRUE(batcher.ok());
  Answer answer;
  Answer later;
  const absl::Time begin = clock.StartTicking();

  // The clock is read at Submit, when the batch is cut, before and after the copy, and when the
  // deadlines are checked after the copy. The deadline has passed at this fifth reading.
  const auto ticket = (*batcher)->Submit(
      MakeRequest({.rows = 1, .deadline = begin + absl::Microseconds(4'500)}), answer.Callback());

  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine.num_batches(), 0);
  const auto next = (*batcher)->Submit(RequestOfRows(1), later.Callback());
  EXPECT_TRUE(next.ok()) << next.status();  // the queue is empty again
  EXPECT_TRUE(!next.ok() || later.Wait().ok());
}

// The second batch of the request is dropped because the deadline has passed. The first batch ends
// while the dropped rows are freed: it must not answer the request as complete.
TEST_F(BatcherDeadlineTest, NeverAnswersHalfARequestWhenItsLastBatchIsDropped) {
  TickingClock clock;
  FakeEngine engine;
  auto batcher = BatcherOn({&engine}, {.batch_rows_max = 1}, clock, metrics_);
  ASSERT_TRUE(batcher.ok());
  engine.Hold();
  Answer answer;
  const absl::Time begin = clock.StartTicking();
  // The clock is read at Submit, five times for the first batch, three times until the second batch
  // is cut and copied, and when the deadlines are checked after that copy.
  ScoreRequest request = MakeRequest({.rows = 2, .deadline = begin + absl::Microseconds(9'500)});
  const auto end_first_batch = [&engine, rows = request.hidden.owner](void* /*unused*/) {
    engine.Release();
    engine.WaitUntilIdle();
  };
  request.hidden.owner = std::shared_ptr<void>(&engine, end_first_batch);

  const auto ticket = (*batcher)->Submit(std::move(request), answer.Callback());

  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine.num_batches(), 1);  // otherwise nothing was dropped
}

TEST_F(BatcherDeadlineTest, AnswersOnTimeForRowsThatTheEngineHas) {
  MakeBatcher();
  engine_->Hold();
  Answer& answer = Submit({.rows = 3, .deadline = clock_.Now() + absl::Milliseconds(30)});
  engine_->WaitForBatches(1);

  clock_.Advance(absl::Milliseconds(30));

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(answer.Wait().status().message(), HasSubstr("the engine"));
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
}

TEST_F(BatcherDeadlineTest, AnswersARequestThatIsInTime) {
  MakeBatcher();

  EXPECT_TRUE(Submit({.rows = 3, .deadline = clock_.Now() + absl::Milliseconds(1)}).Wait().ok());
}

TEST_F(BatcherDeadlineTest, RefusesARequestThatCannotBeInTimeAtTheMeasuredRate) {
  MakeBatcher({.batch_rows_max = 100});
  const absl::Time soon = clock_.Now() + absl::Milliseconds(300);
  engine_->Hold();
  Answer& first = Submit({.rows = 100});
  engine_->WaitForBatches(1);
  clock_.Advance(absl::Milliseconds(200));  // 500 rows per second.
  engine_->Release();
  EXPECT_TRUE(first.Wait().ok());
  OccupyEngine();

  const absl::Status too_long = Refusal({.rows = 100, .deadline = soon});
  const absl::Status fits = Refusal({.rows = 40, .deadline = soon});

  EXPECT_EQ(too_long.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(too_long.message(), HasSubstr("100 rows of this client take at least 200ms"));
  EXPECT_TRUE(fits.ok()) << fits;
}

// Regression: after one stall of 3 s, an idle server refused every request with a deadline of 500
// ms permanently.
TEST_F(BatcherDeadlineTest, AcceptsWorkOnAnIdleEngineHoweverSlowItWas) {
  MakeBatcher({.batch_rows_max = 100});
  engine_->Hold();
  Answer& stalled = Submit({.rows = 100});
  engine_->WaitForBatches(1);
  clock_.Advance(absl::Seconds(3));
  engine_->Release();
  EXPECT_TRUE(stalled.Wait().ok());
  engine_->WaitUntilIdle();

  EXPECT_TRUE(
      Submit({.rows = 100, .deadline = clock_.Now() + absl::Milliseconds(500)}).Wait().ok());
}

TEST_F(BatcherDeadlineTest, ForgetsAStallOnceTheEngineIsFastAgain) {
  MakeBatcher({.batch_rows_max = 100});
  const auto score = [this](absl::Duration taken) {
    engine_->Hold();
    Answer& answer = Submit({.rows = 100});
    engine_->WaitUntilInFlight(1);
    clock_.Advance(taken);
    engine_->Release();
    EXPECT_TRUE(answer.Wait().ok());
    engine_->WaitUntilIdle();
  };
  score(absl::Seconds(3));
  score(absl::Milliseconds(30));
  OccupyEngine();

  EXPECT_TRUE(Refusal({.rows = 100, .deadline = clock_.Now() + absl::Milliseconds(500)}).ok());
}

TEST_F(BatcherDeadlineTest, CountsOnlyRowsToBeScoredInTheEstimate) {
  MakeBatcher({.batch_rows_max = 100});
  engine_->Hold();
  Answer& first = Submit({.rows = 100});
  engine_->WaitForBatches(1);
  clock_.Advance(absl::Seconds(1));  // 100 rows per second.
  engine_->Release();
  EXPECT_TRUE(first.Wait().ok());
  OccupyEngine();
  std::vector<int64_t> ignored(90);
  std::iota(ignored.begin(), ignored.end(), 5);

  const absl::Status status = Refusal(
      {.rows = 100, .deadline = clock_.Now() + absl::Milliseconds(300), .ignored_rows = ignored});

  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(BatcherDeadlineTest, DoesNotJudgeTheEngineByItsSmallBatches) {
  MakeBatcher({.batch_rows_max = 100});
  engine_->Hold();
  Answer& first = Submit({.rows = 1});
  engine_->WaitForBatches(1);
  clock_.Advance(absl::Seconds(1));
  engine_->Release();
  EXPECT_TRUE(first.Wait().ok());

  EXPECT_TRUE(Refusal({.rows = 100, .deadline = clock_.Now() + absl::Milliseconds(10)}).ok());
}

}  // namespace
}  // namespace logprobd::testing
