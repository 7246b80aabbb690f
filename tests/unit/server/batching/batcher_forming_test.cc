#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/batching/launch_rule.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Le;

constexpr absl::Duration kWait = absl::Microseconds(500);

using BatcherFormingTest = BatcherTest;

TEST_F(BatcherFormingTest, SendsARequestAtOnceWhenTheEngineIsIdle) {
  MakeBatcher({.batch_wait_max = absl::Hours(1)});

  Answer& answer = SubmitRows(3);

  EXPECT_TRUE(answer.Wait().ok());
  EXPECT_THAT(BatchRows(), ElementsAre(3));
}

TEST_F(BatcherFormingTest, GathersRowsWhileABatchIsInFlightUntilTheOldestHasWaitedLongEnough) {
  MakeBatcher({.batch_wait_max = kWait});
  OccupyEngine();

  SubmitRows(2);
  clock_.WaitUntilAsleep();
  clock_.Advance(kWait / 2);
  SubmitRows(3);
  clock_.WaitUntilAsleep();
  EXPECT_THAT(BatchRows(), ElementsAre(1));
  clock_.Advance(kWait / 2);

  EXPECT_THAT(engine_->WaitForBatches(2), ElementsAre(1, 5));
}

TEST_F(BatcherFormingTest, SendsABatchAsSoonAsItsRowBudgetIsFull) {
  MakeBatcher({.batch_rows_max = 8, .batch_wait_max = absl::Hours(1)});
  OccupyEngine();

  SubmitRows(5);
  SubmitRows(3);

  EXPECT_THAT(engine_->WaitForBatches(2), ElementsAre(1, 5 + 3));
}

TEST_F(BatcherFormingTest, SendsWaitingRowsWhenTheEngineBecomesIdle) {
  MakeBatcher({.batch_wait_max = absl::Hours(1)});
  OccupyEngine();
  SubmitRows(2);
  clock_.WaitUntilAsleep();
  EXPECT_THAT(BatchRows(), ElementsAre(1));

  engine_->ReleaseOne();

  EXPECT_THAT(engine_->WaitForBatches(2), ElementsAre(1, 2));
}

// Regression: when batches took less time than the longest wait, the engine was idle while the next
// batch was gathered and copied.
TEST_F(BatcherFormingTest, SendsWaitingRowsShortlyBeforeTheEngineBecomesIdle) {
  MakeBatcher({.batch_wait_max = absl::Hours(1)});
  OccupyEngine();
  clock_.Advance(absl::Milliseconds(2));
  engine_->ReleaseOne();
  EXPECT_TRUE(answers_.back()->Wait().ok());  // A batch takes 2 ms.
  clock_.WaitUntilAsleep();
  SubmitRows(1);
  engine_->WaitForBatches(2);
  clock_.WaitUntilAsleep();
  SubmitRows(2);
  clock_.WaitUntilAsleep();
  clock_.Advance(absl::Milliseconds(2) - LaunchRule::kPrepareTime - absl::Microseconds(1));
  clock_.WaitUntilAsleep();
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1));

  clock_.Advance(absl::Microseconds(1));

  EXPECT_THAT(engine_->WaitForBatches(3), ElementsAre(1, 1, 2));
}

TEST_F(BatcherFormingTest, DoesNotWaitWhenTheLongestWaitIsZero) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyEngine();

  SubmitRows(2);

  EXPECT_THAT(engine_->WaitForBatches(2), ElementsAre(1, 2));
}

TEST_F(BatcherFormingTest, KeepsAtMostTwoBatchesInFlight) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();

  SubmitRows(4);
  clock_.WaitUntilAsleep();
  clock_.Advance(absl::Hours(1));
  clock_.WaitUntilAsleep();
  EXPECT_EQ(engine_->num_batches(), 2);
  engine_->ReleaseOne();

  EXPECT_THAT(engine_->WaitForBatches(3), ElementsAre(1, 1, 4));
}

TEST_F(BatcherFormingTest, CutsALongRequestIntoBatchesAndAnswersItOnce) {
  MakeBatcher({.batch_rows_max = 8});
  ScoreRequest request = MakeRequest({.rows = 300});
  const ScoreResult expected = ExpectedResult(request);

  Answer& answer = SubmitRequest(std::move(request));

  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  EXPECT_EQ(Differences(*answer.Wait(), expected), "");
  EXPECT_EQ(engine_->num_batches(), 38);
  EXPECT_THAT(BatchRows(), Each(Le(8)));
}

TEST_F(BatcherFormingTest, FillsABatchToTheLastRowByCuttingARequest) {
  MakeBatcher({.batch_rows_max = 8, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  SubmitRows(5);
  SubmitRows(5);

  engine_->Release();

  EXPECT_THAT(engine_->WaitForBatches(4), ElementsAre(1, 1, 8, 2));
}

// Regression: batches of a bulk load over TCP were not full, and partial steps cost 1/25 of the
// GPU's time.
TEST_F(BatcherFormingTest, LeavesThePartOfAStepToTheNextBatchUnderLoad) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()}, {.row_step = 900});
  OccupyBothSlots();
  SubmitRows(1'700);
  SubmitRows(1'700);
  SubmitRows(500);

  engine_->ReleaseOne();
  engine_->WaitForBatches(3);
  clock_.WaitUntilAsleep();
  engine_->Release();

  EXPECT_THAT(engine_->WaitForBatches(4), ElementsAre(1, 1, 3'600, 300));
}

// Regression: one row of a small request, added to 2,048 rows of large requests (four steps), made
// the GPU compute a fifth step.
TEST_F(BatcherFormingTest, MakesRoomForSmallRequestsWithinWholeSteps) {
  MakeBatcher({.batch_rows_max = 4'000, .batch_wait_max = absl::ZeroDuration()}, {.row_step = 500});
  OccupyBothSlots();
  SubmitRows(3'000);
  SubmitRows(5);

  engine_->ReleaseOne();

  EXPECT_THAT(engine_->WaitForBatches(3), ElementsAre(1, 1, 1'000));
}

// Regression: a GPU needed as much time for 290 rows of 64 clients as for 512 rows.
TEST_F(BatcherFormingTest, LeavesThePartOfAStepOfSmallRequestsToTheNextBatch) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()}, {.row_step = 8});
  OccupyBothSlots();
  for (int i = 0; i < 4; ++i) SubmitRows(5);

  engine_->Release();

  EXPECT_THAT(engine_->WaitForBatches(4), ElementsAre(1, 1, 16, 4));
}

TEST_F(BatcherFormingTest, TakesAllRowsOfSmallRequestsThatFillAtMostOneStep) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()}, {.row_step = 10});
  OccupyBothSlots();
  for (int i = 0; i < 2; ++i) SubmitRows(5);

  engine_->ReleaseOne();

  EXPECT_THAT(engine_->WaitForBatches(3), ElementsAre(1, 1, 10));
}

TEST_F(BatcherFormingTest, TakesAllRowsWhenFewWaitOrTheEngineIsIdle) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()}, {.row_step = 800});
  EXPECT_TRUE(SubmitRows(3'500).Wait().ok());
  clock_.WaitUntilAsleep();
  OccupyBothSlots();
  SubmitRows(3'100);

  engine_->ReleaseOne();

  EXPECT_THAT(engine_->WaitForBatches(4), ElementsAre(3'500, 1, 1, 3'100));
}

TEST_F(BatcherFormingTest, DoesNotSendIgnoredRowsToTheEngine) {
  MakeBatcher();
  ScoreRequest request = MakeRequest({.rows = 6, .ignored_rows = {0, 2, 3, 5}});
  const std::vector<int32_t> targets = {request.targets[1], request.targets[4]};

  Answer& answer = SubmitRequest(std::move(request));

  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_EQ(answer.Wait()->ignored_rows, 4);
  ASSERT_EQ(engine_->num_batches(), 1);
  EXPECT_EQ(engine_->batches()[0].targets, targets);
}

TEST_F(BatcherFormingTest, AnswersWithoutTheEngineWhenAllRowsAreIgnored) {
  MakeBatcher();
  engine_->Hold();

  Answer& empty = SubmitRows(0);
  Answer& ignored = Submit({.rows = 2, .top_k = 3, .ignored_rows = {0, 1}});

  ASSERT_TRUE(empty.Wait().ok());
  EXPECT_EQ(empty.Wait()->rows, 0);
  ASSERT_TRUE(ignored.Wait().ok());
  EXPECT_THAT(ignored.Wait()->logprob, ElementsAre(0, 0));
  EXPECT_THAT(ignored.Wait()->top_k_ids, ElementsAre(0, 0, 0, 0, 0, 0));
  EXPECT_EQ(engine_->num_batches(), 0);
}

TEST_F(BatcherFormingTest, NeverMixesDtypesInABatch) {
  MakeBatcher({.batch_rows_max = 8, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  std::vector<std::pair<Answer*, ScoreResult>> expected;
  for (const char* client : {"a", "b"}) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32, Dtype::kF16}) {
      ScoreRequest request = MakeRequest({.rows = 2, .dtype = dtype, .client_id = client});
      ScoreResult result = ExpectedResult(request);
      expected.emplace_back(&SubmitRequest(std::move(request)), std::move(result));
    }
  }

  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));

  // A row that is read with the wrong width would have a wrong score.
  for (const auto& [answer, result] : expected) {
    ASSERT_TRUE(answer->Wait().ok());
    EXPECT_EQ(Differences(*answer->Wait(), result), "");
  }
  std::vector<Dtype> dtypes;
  for (const RecordedBatch& batch : engine_->batches()) {
    dtypes.push_back(batch.dtype);
  }
  EXPECT_THAT(dtypes,
              ElementsAre(Dtype::kBf16, Dtype::kBf16, Dtype::kBf16, Dtype::kF32, Dtype::kF16));
}

TEST_F(BatcherFormingTest, SizesStagingForTheHeadsDtypeAndCutsWiderRowsShorter) {
  MakeBatcher({.batch_rows_max = 8}, {.hidden_size = 16, .dtype = Dtype::kBf16});
  EXPECT_EQ(engine_->staging_bytes(), 2 * 8 * 16 * 2);
  ASSERT_EQ(batcher_->memory().size(), 1U);
  EXPECT_EQ(batcher_->memory()[0].bytes, 2 * 8 * 16 * 2);

  Answer& answer = Submit({.rows = 8, .hidden_size = 16, .dtype = Dtype::kF32});

  EXPECT_TRUE(answer.Wait().ok());
  EXPECT_THAT(BatchRows(), ElementsAre(4, 4));
}

TEST_F(BatcherFormingTest, AlwaysHasRoomForOneRowOfTheWidestDtype) {
  MakeBatcher({.batch_rows_max = 1});

  Answer& answer = Submit({.rows = 2, .dtype = Dtype::kF32});

  EXPECT_TRUE(answer.Wait().ok());
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1));
}

TEST_F(BatcherFormingTest, TakesFewerRowsOfLargeRequestsWhileSmallOnesArrive) {
  MakeBatcher({.batch_rows_max = 1'024, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  Submit({.rows = 4'096, .client_id = "bulk"});
  Submit({.rows = 3, .client_id = "small"});

  engine_->ReleaseOne();
  EXPECT_EQ(engine_->WaitForBatches(3)[2], 256 + 3);
  clock_.WaitUntilAsleep();
  // The Batcher remembers the last small request for less than a second.
  clock_.Advance(absl::Seconds(1));
  engine_->ReleaseOne();

  EXPECT_EQ(engine_->WaitForBatches(4)[3], 1'024);
}

TEST_F(BatcherFormingTest, LeavesRoomForSmallRequestsExactlyAsLongAsItRemembersTheLastOne) {
  MakeBatcher({.batch_rows_max = 1'024, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  Submit({.rows = 4'096, .client_id = "bulk"});
  Submit({.rows = 3, .client_id = "small"});
  engine_->ReleaseOne();
  engine_->WaitForBatches(3);  // The small request and 256 large rows.
  clock_.WaitUntilAsleep();

  clock_.Advance(LaunchRule::kSmallMemory);
  engine_->ReleaseOne();
  EXPECT_EQ(engine_->WaitForBatches(4)[3], 256);
  clock_.WaitUntilAsleep();
  clock_.Advance(absl::Nanoseconds(1));
  engine_->ReleaseOne();

  EXPECT_EQ(engine_->WaitForBatches(5)[4], 1'024);
}

TEST_F(BatcherFormingTest, SendsASmallRequestWithTheNextBatchHoweverLongAnotherIs) {
  MakeBatcher({.batch_rows_max = 1'024, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  Submit({.rows = 60'000, .client_id = "bulk"});

  for (int i = 0; i < 20; ++i) {
    const auto batches_before = static_cast<int>(engine_->num_batches());
    Answer& small = Submit({.rows = 2, .client_id = "small"});
    // Two batches are in flight; the third one contains the small request.
    for (int step = 1; step <= 3; ++step) {
      engine_->ReleaseOne();
      engine_->WaitForBatches(batches_before + step);
    }
    small.Wait();
    clock_.WaitUntilAsleep();
    EXPECT_EQ(engine_->num_batches(), batches_before + 3);
    clock_.Advance(absl::Milliseconds(10));
  }
  for (const int64_t rows : BatchRows()) {
    EXPECT_LE(rows, 256 + 2);
  }
  engine_->Release();
}

}  // namespace
}  // namespace logprobd::testing
