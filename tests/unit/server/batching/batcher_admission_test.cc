#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "tests/support/batcher_on.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

using BatcherAdmissionTest = BatcherTest;

TEST_F(BatcherAdmissionTest, RefusesRowsBeyondTheQueueLimitWithoutCallingBack) {
  MakeBatcher({.queue_rows_max = 10, .client_share_max = 1});
  OccupyBothSlots();
  Submit({.rows = 8, .client_id = "a"});

  const absl::Status status = Refusal({.rows = 3, .client_id = "b"});

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(),
              HasSubstr("8 are waiting, and 3 more would exceed the limit of 10"));
  EXPECT_TRUE(RetryAfter(status).has_value());
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  EXPECT_FALSE(answers_.back()->is_called());
}

TEST_F(BatcherAdmissionTest, AdmitsExactlyUpToTheLimit) {
  MakeBatcher({.queue_rows_max = 10, .client_share_max = 1});
  OccupyBothSlots();
  Submit({.rows = 8});

  EXPECT_TRUE(Refusal({.rows = 2}).ok());
  EXPECT_FALSE(Refusal({.rows = 1}).ok());
}

TEST_F(BatcherAdmissionTest, AppliesNewLimitsWhileItServes) {
  MakeBatcher({.queue_rows_max = 10, .client_share_max = 1});
  OccupyBothSlots();
  Answer& queued = Submit({.rows = 8});

  ASSERT_TRUE(batcher_->SetLimits({.queue_rows_max = 5, .client_share_max = 1}).ok());
  EXPECT_THAT(Refusal({.rows = 1}).message(), HasSubstr("would exceed the limit of 5"));
  ASSERT_TRUE(batcher_->SetLimits({.queue_rows_max = 20, .client_share_max = 1}).ok());

  EXPECT_TRUE(Refusal({.rows = 12}).ok());
  engine_->Release();
  EXPECT_TRUE(queued.Wait().ok());
}

TEST_F(BatcherAdmissionTest, KeepsItsLimitsWhenNewOnesAreInvalid) {
  MakeBatcher({.queue_rows_max = 10, .client_share_max = 1});

  EXPECT_EQ(batcher_->SetLimits({.queue_rows_max = 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(batcher_->SetLimits({.batch_wait_max = absl::Seconds(-1)}).code(),
            absl::StatusCode::kInvalidArgument);

  EXPECT_TRUE(Refusal({.rows = 10}).ok());
}

TEST_F(BatcherAdmissionTest, ANewLongestWaitAppliesToRequestsThatAlreadyWait) {
  MakeBatcher({.batch_wait_max = absl::Hours(1)});
  OccupyEngine();
  SubmitRows(1);
  clock_.WaitUntilAsleep();
  EXPECT_EQ(engine_->num_batches(), 1);

  ASSERT_TRUE(batcher_->SetLimits({.batch_wait_max = absl::ZeroDuration()}).ok());

  engine_->WaitForBatches(2);
}

TEST_F(BatcherAdmissionTest, RefusesBytesBeyondTheQueueLimit) {
  // A row costs 8 bytes of payload, 4 of target and 8 of answer; each piece costs 56 bytes.
  MakeBatcher({.queue_bytes_max = 320, .client_share_max = 1});
  OccupyBothSlots();  // Its two rows are gathered and still cost 12 bytes each.
  Submit({.rows = 10});

  const absl::Status status = Refusal({.rows = 1});

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(),
              HasSubstr("queue bytes: 280 are waiting, and 76 more would exceed the limit of 320"));
}

TEST_F(BatcherAdmissionTest, RefusesRequestsBeyondTheQueueLimit) {
  MakeBatcher({.queue_requests_max = 2, .client_share_max = 1});
  OccupyBothSlots();
  SubmitRows(1);
  SubmitRows(1);

  const absl::Status status = Refusal({.rows = 1});

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(),
            "queue requests: 2 are waiting, and 1 more would exceed the limit of 2");
}

TEST_F(BatcherAdmissionTest, KeepsAClientWithinItsShareWithoutHurtingOthers) {
  MakeBatcher({.queue_rows_max = 20, .client_share_max = 0.5});
  OccupyBothSlots();
  Submit({.rows = 10, .client_id = "greedy"});

  const absl::Status greedy = Refusal({.rows = 1, .client_id = "greedy"});
  const absl::Status other = Refusal({.rows = 10, .client_id = "other"});

  EXPECT_EQ(greedy.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(greedy.message(), HasSubstr("this client's queue rows"));
  EXPECT_TRUE(other.ok()) << other;
}

TEST_F(BatcherAdmissionTest, TheSubClientsOfAClientHaveItsShareTogether) {
  MakeBatcher({.queue_rows_max = 20, .client_share_max = 0.5});
  OccupyBothSlots();
  Submit({.rows = 5, .client_id = "team", .sub_client_id = "x"});
  Submit({.rows = 5, .client_id = "team", .sub_client_id = "y"});

  const absl::Status third = Refusal({.rows = 1, .client_id = "team", .sub_client_id = "z"});

  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(third.message(), HasSubstr("this client's queue rows: 10 are waiting"));
}

TEST_F(BatcherAdmissionTest, RefusesARequestThatCanNeverBeAdmitted) {
  MakeBatcher({.queue_rows_max = 20, .queue_bytes_max = 300, .client_share_max = 0.5});

  const absl::Status rows = Refusal({.rows = 11});
  const absl::Status bytes = Refusal({.rows = 5});

  EXPECT_EQ(rows.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(rows.message(), AllOf(HasSubstr("rows: 11"), HasSubstr("limit of 10 ")));
  EXPECT_EQ(bytes.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(bytes.message(), AllOf(HasSubstr("156 bytes"), HasSubstr("limit of 150 ")));
}

TEST_F(BatcherAdmissionTest, ReleasesTheBudgetAsRowsLeaveTheQueue) {
  MakeBatcher({.batch_rows_max = 4,
               .batch_wait_max = absl::ZeroDuration(),
               .queue_rows_max = 8,
               .client_share_max = 1});
  OccupyBothSlots();
  Submit({.rows = 8});
  EXPECT_EQ(Refusal({.rows = 1}).code(), absl::StatusCode::kResourceExhausted);

  engine_->ReleaseOne();
  engine_->WaitForBatches(3);  // Four rows have left the queue.

  EXPECT_TRUE(Refusal({.rows = 4}).ok());
  EXPECT_EQ(Refusal({.rows = 1}).code(), absl::StatusCode::kResourceExhausted);
}

/// A request of one row with `count` candidates is charged PayloadCharge() bytes until its payload
/// is gathered, and HeldCharge(count) bytes for its other fields and its answer until it ends.
constexpr int64_t PayloadCharge() { return 8 + 56; }
constexpr int64_t HeldCharge(int64_t count) { return 4 + 8 + count * (4 + 4) + 2 * 4; }

// Regression: 100 one-row requests with 2^20 candidates each made the server grow by 2.3 GB.
TEST_F(BatcherAdmissionTest, ChargesCandidatesAndAnswersUntilTheyAreAnswered) {
  MakeBatcher({.queue_bytes_max = PayloadCharge() + 2 * HeldCharge(1'000), .client_share_max = 1});
  engine_->Hold();
  Answer& first = Submit({.rows = 1, .candidate_counts = {1'000}});
  engine_->WaitForBatches(1);
  clock_.WaitUntilAsleep();  // Its payload has been gathered and released.

  Submit({.rows = 1, .candidate_counts = {1'000}});
  EXPECT_EQ(RejectionOf(Refusal({.rows = 1})), Rejection::kQueueBytes);
  engine_->ReleaseOne();
  ASSERT_TRUE(first.Wait().ok());

  EXPECT_TRUE(Refusal({.rows = 1}).ok());
}

TEST_F(BatcherAdmissionTest, ChargesTheWholeMessage) {
  MakeBatcher({.queue_bytes_max = 1'000, .client_share_max = 1});
  ScoreRequest request = RequestOfRows(1);
  request.message_bytes = 1'000;  // Much larger than the payload.

  const auto ticket = batcher_->Submit(std::move(request), [](auto) {});

  EXPECT_EQ(RejectionOf(ticket.status()), Rejection::kInvalid);
}

TEST_F(BatcherAdmissionTest, ChargesACancelledRequestUntilTheEngineIsDoneWithIt) {
  MakeBatcher({.queue_bytes_max = PayloadCharge() + HeldCharge(1'000), .client_share_max = 1});
  engine_->Hold();
  Answer& cancelled = Submit({.rows = 1, .candidate_counts = {1'000}});
  engine_->WaitForBatches(1);
  clock_.WaitUntilAsleep();

  batcher_->Cancel(last_ticket_);
  cancelled.Wait();
  EXPECT_EQ(RejectionOf(Refusal({.rows = 1, .candidate_counts = {1}})), Rejection::kQueueBytes);
  engine_->Release();
  engine_->WaitUntilIdle();
  clock_.WaitUntilAsleep();

  EXPECT_TRUE(Refusal({.rows = 1, .candidate_counts = {1}}).ok());
}

TEST_F(BatcherAdmissionTest, ReleasesTheWholeBudgetHoweverRequestsEnd) {
  MakeBatcher({.batch_rows_max = 4, .queue_bytes_max = 2'000, .client_share_max = 1});
  OccupyBothSlots();
  Submit({.rows = 3});
  Submit({.rows = 9});
  const RequestTicket cut = last_ticket_;
  Answer& late = Submit({.rows = 1, .deadline = clock_.Now() + absl::Milliseconds(30)});
  Submit({.rows = 0});
  Submit({.rows = 1, .ignored_rows = {0}});

  clock_.Advance(absl::Milliseconds(30));
  late.Wait();
  engine_->FailNext(absl::InternalError("fault"));
  engine_->ReleaseOne();
  engine_->WaitForBatches(3);
  clock_.WaitUntilAsleep();
  batcher_->Cancel(cut);
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  clock_.WaitUntilAsleep();

  EXPECT_EQ(Metric("logprobd_queue_bytes{head=\"default\",priority=\"normal\"}"), 0);
  EXPECT_EQ(Metric("logprobd_queue_requests{head=\"default\",priority=\"normal\"}"), 0);
  EXPECT_EQ(Metric("logprobd_queue_rows{head=\"default\",priority=\"normal\"}"), 0);
}

TEST_F(BatcherAdmissionTest, DoesNotChargeIgnoredRows) {
  MakeBatcher({.queue_rows_max = 3, .client_share_max = 1});
  OccupyBothSlots();

  EXPECT_TRUE(Refusal({.rows = 6, .ignored_rows = {1, 3, 4}}).ok());
  EXPECT_TRUE(Refusal({.rows = 3, .ignored_rows = {0, 1, 2}}).ok());
  EXPECT_FALSE(Refusal({.rows = 1}).ok());
}

TEST_F(BatcherAdmissionTest, DoesNotChargeIgnoredRowsAtTheFrontOfARequest) {
  MakeBatcher({.queue_rows_max = 4, .client_share_max = 1});
  OccupyBothSlots();

  EXPECT_TRUE(Refusal({.rows = 6, .ignored_rows = {0, 1, 2}}).ok());
  EXPECT_TRUE(Refusal({.rows = 3, .ignored_rows = {0, 1, 2}}).ok());
}

TEST_F(BatcherAdmissionTest, HintsWhenToRetryFromTheMeasuredRate) {
  MakeBatcher({.batch_rows_max = 100, .queue_rows_max = 1'000, .client_share_max = 1});
  engine_->Hold();
  Submit({.rows = 100});
  engine_->WaitForBatches(1);
  clock_.Advance(absl::Milliseconds(200));  // 500 rows per second.
  engine_->Release();
  EXPECT_TRUE(answers_.back()->Wait().ok());
  engine_->WaitUntilIdle();
  OccupyBothSlots();
  Submit({.rows = 1'000});

  const absl::Status ten = Refusal({.rows = 10});
  const absl::Status all = Refusal({.rows = 1'000});

  EXPECT_EQ(RetryAfter(ten), absl::Milliseconds(20));
  EXPECT_EQ(RetryAfter(all), absl::Seconds(2));
}

TEST_F(BatcherAdmissionTest, RefusesEverythingWhileTheEngineIsUnhealthy) {
  MakeBatcher();
  engine_->SetHealthy(false);

  EXPECT_EQ(Refusal({.rows = 1}).code(), absl::StatusCode::kUnavailable);
}

struct BadOption {
  std::string name;
  std::function<void(Batcher::Options&)> set;
};

TEST_F(BatcherAdmissionTest, NamesABadOption) {
  const FakeEngine::Options engine{.batch_rows_max = 64};
  const std::vector<BadOption> cases = {
      {"batch_rows_max", [](auto& options) { options.batch_rows_max = 0; }},
      {"batch_rows_max", [](auto& options) { options.batch_rows_max = 65; }},
      {"batch_wait_max", [](auto& options) { options.batch_wait_max = -absl::Seconds(1); }},
      {"queue_rows_max", [](auto& options) { options.queue_rows_max = 0; }},
      {"queue_bytes_max", [](auto& options) { options.queue_bytes_max = 0; }},
      {"queue_requests_max", [](auto& options) { options.queue_requests_max = -1; }},
      {"client_share_max", [](auto& options) { options.client_share_max = 0; }},
      {"client_share_max", [](auto& options) { options.client_share_max = 1.5; }},
      {"client_share_max",
       [](auto& options) { options.client_share_max = std::numeric_limits<double>::quiet_NaN(); }},
      {"copy_threads", [](auto& options) { options.copy_threads = -1; }},
      {"copy_threads", [](auto& options) { options.copy_threads = 257; }},
      {"answer_threads", [](auto& options) { options.answer_threads = -1; }},
      {"answer_threads", [](auto& options) { options.answer_threads = 257; }},
  };
  for (const BadOption& bad : cases) {
    FakeEngine fake(engine);
    Batcher::Options options{.batch_rows_max = 64};
    bad.set(options);

    const auto batcher = BatcherOn({&fake}, options, clock_, metrics_);

    EXPECT_EQ(batcher.status().code(), absl::StatusCode::kInvalidArgument) << bad.name;
    EXPECT_THAT(batcher.status().message(), HasSubstr(bad.name));
  }
}

TEST_F(BatcherAdmissionTest, FailsToBeCreatedWithoutStagingMemory) {
  FakeEngine fake({.hidden_size = 1'024, .staging_bytes_max = 1 << 20});

  const auto batcher = BatcherOn({&fake}, {}, clock_, metrics_);

  EXPECT_EQ(batcher.status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace logprobd::testing
