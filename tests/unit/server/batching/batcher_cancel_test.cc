#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;

using BatcherCancelTest = BatcherTest;

TEST_F(BatcherCancelTest, DropsAQueuedRequestAtOnce) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  ScoreRequest request = RequestOfRows(5);
  const std::weak_ptr<void> payload = request.hidden.owner;
  Answer& answer = SubmitRequest(std::move(request));

  batcher_->Cancel(last_ticket_);

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kCancelled);
  clock_.WaitUntilAsleep();
  EXPECT_TRUE(payload.expired());
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1));
}

TEST_F(BatcherCancelTest, AnswersAtOnceWhileTheEngineHasTheRowsAndIgnoresTheirScores) {
  MakeBatcher();
  engine_->Hold();
  Answer& answer = SubmitRows(5);
  engine_->WaitForBatches(1);

  batcher_->Cancel(last_ticket_);

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kCancelled);
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
}

TEST_F(BatcherCancelTest, DropsTheQueuedRestOfACutRequest) {
  MakeBatcher({.batch_rows_max = 4});
  engine_->Hold();
  Answer& answer = SubmitRows(20);
  engine_->WaitForBatches(2);
  clock_.WaitUntilAsleep();

  batcher_->Cancel(last_ticket_);

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kCancelled);
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  EXPECT_EQ(engine_->num_batches(), 2);
}

TEST_F(BatcherCancelTest, ReleasesTheBudgetAtOnce) {
  MakeBatcher({.queue_rows_max = 8, .client_share_max = 1});
  OccupyBothSlots();
  SubmitRows(8);
  EXPECT_EQ(Refusal({.rows = 8}).code(), absl::StatusCode::kResourceExhausted);

  batcher_->Cancel(last_ticket_);

  EXPECT_TRUE(Refusal({.rows = 8}).ok());
}

TEST_F(BatcherCancelTest, DoesNotAffectOtherRequestsOfTheBatch) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  ScoreRequest kept = MakeRequest({.rows = 3, .seed = 9});
  const ScoreResult expected = ExpectedResult(kept);
  SubmitRows(2);
  const RequestTicket cancelled = last_ticket_;
  Answer& answer = SubmitRequest(std::move(kept));
  engine_->ReleaseOne();
  engine_->WaitForBatches(3);

  batcher_->Cancel(cancelled);
  engine_->Release();

  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_EQ(Differences(*answer.Wait(), expected), "");
}

TEST_F(BatcherCancelTest, IgnoresUnknownAndFinishedTickets) {
  MakeBatcher();
  Answer& answer = SubmitRows(1);
  EXPECT_TRUE(answer.Wait().ok());

  batcher_->Cancel(last_ticket_);
  batcher_->Cancel(12'345);

  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
}

TEST_F(BatcherCancelTest, IgnoresASecondCancel) {
  MakeBatcher();
  engine_->Hold();
  Answer& answer = SubmitRows(1);

  batcher_->Cancel(last_ticket_);
  batcher_->Cancel(last_ticket_);

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace logprobd::testing
