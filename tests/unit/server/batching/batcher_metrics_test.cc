#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using BatcherMetricsTest = BatcherTest;

TEST_F(BatcherMetricsTest, CountsBatchesAndRows) {
  MakeBatcher();

  Submit({.rows = 6, .ignored_rows = {1, 2}, .nonfinite_rows = {4}});
  Submit({.rows = 2, .ignored_rows = {0, 1}});
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  batcher_ = nullptr;

  EXPECT_EQ(Metric("logprobd_rows_total{head=\"default\",kind=\"scored\"}"), 3);
  EXPECT_EQ(Metric("logprobd_rows_total{head=\"default\",kind=\"ignored\"}"), 4);
  EXPECT_EQ(Metric("logprobd_rows_total{head=\"default\",kind=\"nonfinite\"}"), 1);
  EXPECT_EQ(Metric("logprobd_batch_rows_sum{head=\"default\"}"), 4);
  EXPECT_EQ(Metric("logprobd_batch_requests_count{head=\"default\"}"), 1);
  EXPECT_EQ(Metric("logprobd_stage_duration_seconds_count{stage=\"copy\"}"), 1);
  EXPECT_EQ(Metric("logprobd_stage_duration_seconds_count{stage=\"queue\"}"), 2);
}

TEST_F(BatcherMetricsTest, CountsTheStagesThatTheEngineHas) {
  MakeBatcher({}, {.kernel_seconds = 0.5});

  SubmitRows(1).Wait();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));

  EXPECT_EQ(Metric("logprobd_stage_duration_seconds_count{stage=\"kernel\"}"), 1);
  EXPECT_EQ(Metric("logprobd_stage_duration_seconds_sum{stage=\"kernel\"}"), 0.5);
  EXPECT_EQ(Metric("logprobd_stage_duration_seconds_count{stage=\"combine\"}"), 0);
}

TEST_F(BatcherMetricsTest, ShowsTheQueueAndItsOldestAge) {
  MakeBatcher();
  OccupyBothSlots();

  Submit({.rows = 5, .priority = Priority::kLow});
  clock_.WaitUntilAsleep();
  EXPECT_EQ(Metric("logprobd_queue_rows{head=\"default\",priority=\"low\"}"), 5);
  EXPECT_EQ(Metric("logprobd_queue_bytes{head=\"default\",priority=\"low\"}"), 56 + 5 * 20);
  EXPECT_EQ(Metric("logprobd_queue_requests{head=\"default\",priority=\"low\"}"), 1);
  EXPECT_EQ(Metric("logprobd_queue_rows{head=\"default\",priority=\"high\"}"), 0);
  // The age grows although nothing happens.
  clock_.Advance(absl::Seconds(3));
  clock_.WaitUntilAsleep();
  EXPECT_EQ(Metric("logprobd_queue_oldest_age_seconds{head=\"default\"}"), 3);
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  clock_.WaitUntilAsleep();

  EXPECT_EQ(Metric("logprobd_queue_rows{head=\"default\",priority=\"low\"}"), 0);
  EXPECT_EQ(Metric("logprobd_queue_bytes{head=\"default\",priority=\"low\"}"), 0);
  EXPECT_EQ(Metric("logprobd_queue_requests{head=\"default\",priority=\"low\"}"), 0);
  EXPECT_EQ(Metric("logprobd_queue_oldest_age_seconds{head=\"default\"}"), 0);
}

TEST_F(BatcherMetricsTest, CountsRefusalsByReason) {
  MakeBatcher({.queue_rows_max = 20, .client_share_max = 0.5});
  OccupyBothSlots();
  Submit({.rows = 10, .client_id = "a"});

  EXPECT_EQ(RejectionOf(Refusal({.rows = 1, .client_id = "a"})), Rejection::kClientShare);
  Submit({.rows = 9, .client_id = "b"});
  EXPECT_EQ(RejectionOf(Refusal({.rows = 2, .client_id = "c"})), Rejection::kQueueRows);
  EXPECT_EQ(RejectionOf(Refusal({.rows = 11, .client_id = "c"})), Rejection::kInvalid);
  EXPECT_EQ(RejectionOf(Refusal({.rows = 1, .deadline = clock_.Now()})), Rejection::kDeadline);
  engine_->SetHealthy(false);
  EXPECT_EQ(RejectionOf(Refusal({.rows = 1})), Rejection::kNotReady);

  // The transport counts each refusal once, and the Batcher does not.
  EXPECT_EQ(Metric("logprobd_rejected_total{reason=\"client_share\"}"), 0);
  EXPECT_EQ(Metric("logprobd_deadline_exceeded_total{stage=\"arrival\"}"), 1);
}

TEST_F(BatcherMetricsTest, CountsNoRowsOfARefusedAnswer) {
  MakeBatcher();

  Answer& answer = Submit({.rows = 2, .nonfinite_rows = {1}, .reject_nonfinite = true});

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Metric("logprobd_rows_total{head=\"default\",kind=\"scored\"}"), 0);
  EXPECT_EQ(Metric("logprobd_rows_total{head=\"default\",kind=\"nonfinite\"}"), 0);
}

// Regression: 35 of 40 requests whose deadline passed were counted as cancelled, because gRPC's own
// timer cancels a call shortly before the server's timer ends it.
TEST_F(BatcherMetricsTest, CountsACancelAtTheDeadlineAsTheDeadline) {
  MakeBatcher();
  engine_->Hold();
  Answer& answer = Submit({.rows = 1, .deadline = clock_.Now() + absl::Seconds(1)});
  engine_->WaitForBatches(1);
  clock_.WaitUntilAsleep();
  clock_.Advance(absl::Seconds(1) - absl::Milliseconds(1));

  batcher_->Cancel(last_ticket_);

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Metric("logprobd_deadline_exceeded_total{stage=\"engine\"}"), 1);
  EXPECT_EQ(Metric("logprobd_cancelled_total{stage=\"engine\"}"), 0);
}

TEST_F(BatcherMetricsTest, CountsTheStageInWhichRequestsEnd) {
  MakeBatcher();
  engine_->Hold();
  Submit({.rows = 1, .deadline = clock_.Now() + absl::Seconds(1)});
  engine_->WaitForBatches(1);
  SubmitRows(1);
  const RequestTicket queued = last_ticket_;
  Answer& late = Submit({.rows = 1, .deadline = clock_.Now() + absl::Microseconds(1)});

  batcher_->Cancel(queued);
  clock_.Advance(absl::Microseconds(1));
  late.Wait();
  clock_.Advance(absl::Seconds(1));
  answers_[0]->Wait();

  EXPECT_EQ(Metric("logprobd_cancelled_total{stage=\"queue\"}"), 1);
  EXPECT_EQ(Metric("logprobd_deadline_exceeded_total{stage=\"queue\"}"), 1);
  EXPECT_EQ(Metric("logprobd_deadline_exceeded_total{stage=\"engine\"}"), 1);
}

}  // namespace
}  // namespace logprobd::testing
