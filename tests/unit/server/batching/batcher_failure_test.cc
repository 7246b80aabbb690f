#include <memory>
#include <thread>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;

using BatcherFailureTest = BatcherTest;

TEST_F(BatcherFailureTest, GivesEveryRequestOfABatchTheEnginesError) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  Answer& first = SubmitRows(2);
  Answer& second = SubmitRows(3);
  engine_->ReleaseOne();
  engine_->WaitForBatches(3);
  engine_->ReleaseOne();
  answers_[1]->Wait();

  engine_->FailNext(absl::InternalError("device fault"));
  engine_->Release();

  EXPECT_EQ(first.WaitForCode(), absl::StatusCode::kInternal);
  EXPECT_EQ(first.Wait().status().message(), "device fault");
  EXPECT_EQ(second.Wait().status(), first.Wait().status());
  EXPECT_TRUE(HasDetailsForLog(first.Wait().status()));
  EXPECT_TRUE(SubmitRows(1).Wait().ok());
}

TEST_F(BatcherFailureTest, EndsACutRequestWithTheFirstErrorAndDropsItsRest) {
  MakeBatcher({.batch_rows_max = 4});
  engine_->Hold();
  Answer& answer = SubmitRows(100);
  engine_->WaitForBatches(2);
  clock_.WaitUntilAsleep();

  engine_->FailNext(absl::InternalError("device fault"));
  engine_->ReleaseOne();

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kInternal);
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  EXPECT_EQ(engine_->num_batches(), 2);
}

TEST_F(BatcherFailureTest, EndsWaitingRequestsWhenTheEngineHasFailedForGood) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  Answer& waiting = SubmitRows(2);

  engine_->FailNext(absl::InternalError("device lost"));
  engine_->SetHealthy(false);
  engine_->ReleaseOne();

  EXPECT_EQ(waiting.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Refusal({.rows = 1}).code(), absl::StatusCode::kUnavailable);
}

// E112
TEST_F(BatcherFailureTest, AnswersAllRequestsWithoutItsThreadsWhenItIsAbandoned) {
  MakeBatcher({.batch_rows_max = 4, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();  // an engine that hangs
  Answer& queued = SubmitRows(3);
  Answer& cut = Submit({.rows = 7, .client_id = "other"});

  batcher_->Abandon(absl::UnavailableError("the server hangs"));

  for (const std::unique_ptr<Answer>& answer : answers_) {
    ASSERT_TRUE(answer->is_called());  // on this thread
    EXPECT_EQ(answer->Wait().status(), absl::UnavailableError("the server hangs"));
  }
  EXPECT_TRUE(queued.is_called() && cut.is_called());
  EXPECT_EQ(Refusal({.rows = 1}).code(), absl::StatusCode::kUnavailable);
}

TEST_F(BatcherFailureTest, ItsHeartbeatIsAtWorkWhileACallbackDoesNotReturn) {
  Heartbeats heartbeats;
  MakeBatcher({.heartbeats = &heartbeats});
  clock_.WaitUntilAsleep();
  const std::shared_ptr<const Heartbeat> heartbeat = heartbeats.All().front();
  EXPECT_FALSE(heartbeat->is_at_work());
  absl::Notification is_stuck;
  absl::Notification go_on;

  // A request without rows to score is answered on the batch thread.
  const auto ticket = batcher_->Submit(MakeRequest({.rows = 1, .ignored_rows = {0}}),
                                       [&](const absl::StatusOr<ScoreResult>& /*result*/) {
                                         is_stuck.Notify();
                                         go_on.WaitForNotification();
                                       });
  is_stuck.WaitForNotification();
  EXPECT_TRUE(heartbeat->is_at_work());
  EXPECT_EQ(heartbeat->owner().thread, "batch");
  EXPECT_EQ(heartbeat->owner().head, "default");

  go_on.Notify();
  clock_.WaitUntilAsleep();
  EXPECT_FALSE(heartbeat->is_at_work());
  EXPECT_TRUE(ticket.ok());
  batcher_.reset();
}

TEST_F(BatcherFailureTest, RetriesABatchThatDoesNotFitInTwoHalves) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  engine_->SetFittingRows(4);
  ScoreRequest first = MakeRequest({.rows = 3,
                                    .seed = 2,
                                    .outputs = OutputSet(kAllOutputBits),
                                    .top_k = 2,
                                    .candidate_counts = {2, 0, 1}});
  ScoreRequest second = MakeRequest({.rows = 5,
                                     .seed = 3,
                                     .entropy_temperature = 2.0F,
                                     .ignored_rows = {2},
                                     .nonfinite_rows = {4},
                                     .candidate_counts = {1, 3, 1, 0, 2},
                                     .segment_offsets = {0, 3, 5}});
  const ScoreResult expected_first = ExpectedResult(first);
  const ScoreResult expected_second = ExpectedResult(second);

  const Answer& first_answer = SubmitRequest(std::move(first));
  const Answer& second_answer = SubmitRequest(std::move(second));
  engine_->Release();

  ASSERT_TRUE(first_answer.Wait().ok()) << first_answer.Wait().status();
  ASSERT_TRUE(second_answer.Wait().ok()) << second_answer.Wait().status();
  EXPECT_EQ(Differences(*first_answer.Wait(), expected_first), "");
  EXPECT_EQ(Differences(*second_answer.Wait(), expected_second), "");
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1, 7, 3, 4));
}

TEST_F(BatcherFailureTest, GivesUpWhenAHalfDoesNotFitEither) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  Answer& fits = SubmitRows(2);
  Answer& spans = SubmitRows(1);
  Answer& too_large = SubmitRows(3);
  engine_->ReleaseOne();
  engine_->WaitForBatches(3);
  engine_->ReleaseOne();
  answers_[1]->Wait();
  // The whole batch does not fit, and afterwards its second half does not fit either.
  engine_->FailNext(absl::ResourceExhaustedError("does not fit"));
  engine_->ReleaseOne();
  engine_->WaitForBatches(4);
  engine_->ReleaseOne();
  engine_->WaitForBatches(5);
  engine_->FailNext(absl::ResourceExhaustedError("does not fit"));
  engine_->Release();

  EXPECT_TRUE(fits.Wait().ok());
  EXPECT_TRUE(spans.Wait().ok());
  EXPECT_EQ(too_large.WaitForCode(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfter(too_large.Wait().status()).has_value());
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1, 6, 3, 3));
}

TEST_F(BatcherFailureTest, EndsOnlyTheRequestsThatReachIntoTheHalfThatFails) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  Answer& in_first = SubmitRows(3);
  Answer& in_second = SubmitRows(3);
  engine_->ReleaseOne();
  engine_->WaitForBatches(3);
  engine_->ReleaseOne();
  answers_[1]->Wait();
  engine_->FailNext(absl::ResourceExhaustedError("does not fit"));
  engine_->ReleaseOne();
  engine_->WaitForBatches(4);

  engine_->FailNext(absl::InternalError("fault"));
  engine_->Release();

  EXPECT_EQ(in_first.WaitForCode(), absl::StatusCode::kInternal);
  EXPECT_TRUE(in_second.Wait().ok()) << in_second.Wait().status();
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1, 6, 3, 3));
}

TEST_F(BatcherFailureTest, HintsToRetryABatchThatDoesNotFitAfterTheTimeOfItsRows) {
  MakeBatcher({.batch_rows_max = 100});
  engine_->Hold();
  Answer& measured = SubmitRows(100);
  engine_->WaitForBatches(1);
  clock_.Advance(absl::Milliseconds(200));  // 500 rows per second.
  engine_->Release();
  ASSERT_TRUE(measured.Wait().ok());
  engine_->WaitUntilIdle();
  engine_->SetFittingRows(0);

  const Answer& too_large = SubmitRows(50);

  EXPECT_EQ(RetryAfter(too_large.Wait().status()), absl::Milliseconds(100));
}

TEST_F(BatcherFailureTest, CannotHalveARow) {
  MakeBatcher();
  engine_->SetFittingRows(0);

  EXPECT_EQ(SubmitRows(1).WaitForCode(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->num_batches(), 1);
}

TEST_F(BatcherFailureTest, DrainsQueuedRequestsAndRefusesNewOnes) {
  MakeBatcher({.batch_rows_max = 4});
  engine_->Hold();
  Answer& answer = SubmitRows(20);
  std::thread drain([this] { EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture())); });
  clock_.WaitUntilAsleep(2);

  EXPECT_EQ(Refusal({.rows = 1}).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(answer.is_called());
  engine_->Release();

  drain.join();
  EXPECT_TRUE(answer.is_called());
  EXPECT_TRUE(answer.Wait().ok());
}

TEST_F(BatcherFailureTest, StopsDrainingAtItsDeadline) {
  MakeBatcher();
  engine_->Hold();
  SubmitRows(1);
  engine_->WaitForBatches(1);
  const absl::Time deadline = clock_.Now() + absl::Seconds(20);
  std::thread drain([&] { EXPECT_FALSE(batcher_->Drain(deadline)); });
  clock_.WaitForWaiter(deadline);

  clock_.Advance(absl::Seconds(20));

  drain.join();
}

TEST_F(BatcherFailureTest, DestructorAnswersTheQueueAndWaitsForBatchesInFlight) {
  MakeBatcher({.batch_rows_max = 4});
  engine_->Hold();
  Answer& in_flight = SubmitRows(4);
  engine_->WaitForBatches(1);
  Answer& cut = SubmitRows(8);
  engine_->WaitForBatches(2);
  Answer& queued = SubmitRows(3);

  std::thread destroy([this] { batcher_ = nullptr; });
  EXPECT_EQ(cut.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(queued.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(in_flight.is_called());
  engine_->Release();
  destroy.join();

  EXPECT_TRUE(in_flight.Wait().ok());
}

TEST_F(BatcherFailureTest, MayBeUsedFromACallback) {
  MakeBatcher();
  Answer next;
  absl::Mutex mutex;
  bool submitted = false;
  const auto ticket = batcher_->Submit(RequestOfRows(1), [&](absl::StatusOr<ScoreResult>) {
    EXPECT_TRUE(batcher_->Submit(RequestOfRows(1), next.Callback()).ok());
    batcher_->Cancel(1'000);
    absl::MutexLock lock(&mutex);
    submitted = true;
  });
  ASSERT_TRUE(ticket.ok());

  { absl::MutexLock lock(&mutex, absl::Condition(&submitted)); }
  EXPECT_TRUE(next.Wait().ok());
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
}

}  // namespace
}  // namespace logprobd::testing
