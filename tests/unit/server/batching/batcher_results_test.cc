#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr OutputSet kAllOutputs(kAllOutputBits);

class BatcherResultsTest : public BatcherTest {
 protected:
  void ExpectRightAnswer(ScoreRequest request) {
    const ScoreResult expected = ExpectedResult(request);
    Answer& answer = SubmitRequest(std::move(request));
    ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
    EXPECT_EQ(Differences(*answer.Wait(), expected), "");
  }
};

TEST_F(BatcherResultsTest, ReturnsEveryOutputOfEveryRow) {
  MakeBatcher({.batch_rows_max = 3});
  ExpectRightAnswer(MakeRequest({.rows = 11,
                                 .outputs = kAllOutputs,
                                 .temperature = 0.7F,
                                 .entropy_temperature = 1.0F,
                                 .top_k = 3,
                                 .ignored_rows = {0, 4, 5, 10},
                                 .nonfinite_rows = {2, 4},
                                 .greedy_rows = {1, 3, 8},
                                 .candidate_counts = {1, 0, 2, 3, 1, 0, 0, 4, 1, 0, 2},
                                 .segment_offsets = {0, 1, 1, 6, 11}}));
}

TEST_F(BatcherResultsTest, ReturnsOnlyRequestedOutputsWhenOthersInTheBatchRequestMore) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  ScoreRequest little =
      MakeRequest({.rows = 3, .seed = 2, .outputs = OutputSet().With(Output::kEntropy)});
  ScoreRequest much = MakeRequest({.rows = 4, .seed = 3, .outputs = kAllOutputs, .top_k = 5});
  ScoreRequest narrow = MakeRequest({.rows = 2, .seed = 4, .top_k = 2, .candidate_counts = {2, 1}});
  const ScoreResult expected_little = ExpectedResult(little);
  const ScoreResult expected_much = ExpectedResult(much);
  const ScoreResult expected_narrow = ExpectedResult(narrow);

  const Answer& little_answer = SubmitRequest(std::move(little));
  const Answer& much_answer = SubmitRequest(std::move(much));
  const Answer& narrow_answer = SubmitRequest(std::move(narrow));
  engine_->Release();

  EXPECT_EQ(Differences(*little_answer.Wait(), expected_little), "");
  EXPECT_EQ(Differences(*much_answer.Wait(), expected_much), "");
  EXPECT_EQ(Differences(*narrow_answer.Wait(), expected_narrow), "");
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1, 9));
  EXPECT_EQ(engine_->batches()[2].top_k, 5);
  EXPECT_EQ(engine_->batches()[2].outputs.bits(), kAllOutputBits);
}

TEST_F(BatcherResultsTest, AnswersManyRequestsOfABatchOnSeveralThreads) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration(), .answer_threads = 2});
  OccupyBothSlots();
  auto* const barrier = new absl::Barrier(2);  // Only two threads together pass it.
  absl::BlockingCounter left(5);
  for (int i = 0; i < 5; ++i) {
    const bool waits = i == 0 || i == 4;  // A thread takes four answers at a time.
    ASSERT_TRUE(batcher_
                    ->Submit(MakeRequest({.rows = 1}),
                             [&, waits](const absl::StatusOr<ScoreResult>& result) {
                               EXPECT_TRUE(result.ok()) << result.status();
                               if (waits && barrier->Block()) {
                                 delete barrier;
                               }
                               left.DecrementCount();
                             })
                    .ok());
  }

  engine_->Release();

  left.Wait();
  EXPECT_THAT(BatchRows(), ElementsAre(1, 1, 5));
}

TEST_F(BatcherResultsTest, ComputesTheOutputsThatSegmentsNeedWithoutReturningThem) {
  MakeBatcher();
  ScoreRequest request = MakeRequest({.rows = 4,
                                      .outputs = OutputSet().With(Output::kLse),
                                      .ignored_rows = {3},
                                      .greedy_rows = {0, 1},
                                      .segment_offsets = {0, 2, 4}});
  const ScoreResult expected = ExpectedResult(request);

  const Answer& answer = SubmitRequest(std::move(request));

  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_EQ(Differences(*answer.Wait(), expected), "");
  EXPECT_THAT(answer.Wait()->logprob, IsEmpty());
  EXPECT_THAT(answer.Wait()->greedy, IsEmpty());
  EXPECT_THAT(answer.Wait()->segment_rows, ElementsAre(2, 1));
  EXPECT_EQ(answer.Wait()->segment_greedy[0], 1);
}

TEST_F(BatcherResultsTest, ReportsTheTimeOfTheSlowestBatchOfARequest) {
  MakeBatcher({.batch_rows_max = 1});
  engine_->Hold();
  const Answer& answer = Submit({.rows = 3});
  engine_->WaitForBatches(2);

  clock_.Advance(absl::Seconds(4));
  engine_->ReleaseOne();  // after 4 s
  engine_->WaitForBatches(3);
  clock_.Advance(absl::Seconds(1));
  engine_->Release();  // after 5 s and 1 s

  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_EQ(answer.Wait()->stages.engine, 5);
}

TEST_F(BatcherResultsTest, ATraceReachesFromTheFirstToTheLastBatch) {
  MakeBatcher({.batch_rows_max = 1}, {.kernel_seconds = 0.5});
  engine_->Hold();
  ScoreRequest request = RequestOfRows(3);
  request.trace = true;
  const absl::Time begin = clock_.Now();
  const Answer& answer = SubmitRequest(std::move(request));
  engine_->WaitForBatches(2);  // both at 0 s

  clock_.Advance(absl::Seconds(4));
  engine_->ReleaseOne();
  engine_->WaitForBatches(3);  // at 4 s
  clock_.Advance(absl::Seconds(1));
  engine_->Release();

  ASSERT_TRUE(answer.Wait().ok());
  const StageTimes& times = answer.Wait()->times;
  EXPECT_EQ(times.submitted, begin);
  EXPECT_EQ(times.first_cut, begin);
  EXPECT_EQ(times.first_start, begin);
  EXPECT_EQ(times.last_cut, begin + absl::Seconds(4));
  EXPECT_EQ(times.last_start, begin + absl::Seconds(4));
  EXPECT_EQ(times.last_end, begin + absl::Seconds(5));
  EXPECT_EQ(times.kernel_seconds, 1.5);
}

TEST_F(BatcherResultsTest, ATraceHasTheKernelsOfBothHalvesOfABatch) {
  MakeBatcher({}, {.kernel_seconds = 0.5});
  engine_->SetFittingRows(2);
  ScoreRequest request = RequestOfRows(4);
  request.trace = true;
  const Answer& halved = SubmitRequest(std::move(request));
  ASSERT_TRUE(halved.Wait().ok());
  engine_->SetFittingRows(8);
  request = RequestOfRows(4);
  request.trace = true;
  const Answer& whole = SubmitRequest(std::move(request));

  ASSERT_TRUE(whole.Wait().ok());
  EXPECT_EQ(halved.Wait()->times.kernel_seconds, 1.0);
  EXPECT_EQ(whole.Wait()->times.kernel_seconds, 0.5);
}

TEST_F(BatcherResultsTest, ATraceWithoutScoredRowsHasNoBatch) {
  MakeBatcher();
  ScoreRequest request = MakeRequest({.rows = 1, .ignored_rows = {0}});
  request.trace = true;

  const Answer& answer = SubmitRequest(std::move(request));

  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_FALSE(answer.Wait()->times.has_batch());
  EXPECT_EQ(answer.Wait()->times.submitted, clock_.Now());
}

TEST_F(BatcherResultsTest, CountsASegmentWithoutScoredRowsAsZeroAndGreedy) {
  MakeBatcher();

  const Answer& answer = Submit({.rows = 2, .ignored_rows = {0, 1}, .segment_offsets = {0, 0, 2}});

  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_THAT(answer.Wait()->segment_logprob, ElementsAre(0, 0));
  EXPECT_THAT(answer.Wait()->segment_rows, ElementsAre(0, 0));
  EXPECT_THAT(answer.Wait()->segment_greedy, ElementsAre(1, 1));
}

TEST_F(BatcherResultsTest, UsesTheRowsTemperatureWithoutAnEntropyTemperature) {
  MakeBatcher({.batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();

  Submit({.rows = 1, .temperature = 2.0F});
  Submit({.rows = 1, .temperature = 3.0F, .entropy_temperature = 1.0F});
  engine_->Release();
  engine_->WaitForBatches(3);

  EXPECT_THAT(engine_->batches()[0].entropy_temperatures, IsEmpty());
  EXPECT_THAT(engine_->batches()[2].temperatures, ElementsAre(2.0F, 3.0F));
  EXPECT_THAT(engine_->batches()[2].entropy_temperatures, ElementsAre(2.0F, 1.0F));
}

TEST_F(BatcherResultsTest, UsesTheTemperatureOfEachRow) {
  MakeBatcher({.batch_rows_max = 2});
  ScoreRequest request = MakeRequest({.rows = 4, .ignored_rows = {1}});
  request.row_temperatures = {0.5F, 1.0F, 2.0F, 4.0F};
  ExpectRightAnswer(std::move(request));
}

TEST_F(BatcherResultsTest, NamesTheVersionOfTheWeights) {
  MakeBatcher({}, {.weights_version = 7});

  EXPECT_EQ(SubmitRows(1).Wait()->weights_version, 7U);
  EXPECT_EQ(SubmitRows(0).Wait()->weights_version, 7U);
}

TEST_F(BatcherResultsTest, RefusesNonfiniteRowsOnRequestAndNamesTheFirst) {
  MakeBatcher({.batch_rows_max = 2});

  const Answer& answer = Submit(
      {.rows = 9, .ignored_rows = {1}, .nonfinite_rows = {1, 5, 8}, .reject_nonfinite = true});

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(answer.Wait().status().message(), HasSubstr("row 5"));
}

TEST_F(BatcherResultsTest, ReportsHowLongARequestWaited) {
  MakeBatcher({.batch_wait_max = absl::Milliseconds(2)});
  OccupyEngine();
  ScoreRequest request = RequestOfRows(1);
  request.received = clock_.Now() - absl::Milliseconds(1);

  const Answer& answer = SubmitRequest(std::move(request));
  clock_.WaitUntilAsleep();
  clock_.Advance(absl::Milliseconds(2));
  engine_->WaitForBatches(2);
  clock_.Advance(absl::Milliseconds(4));
  engine_->Release();

  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_DOUBLE_EQ(answer.Wait()->stages.queue, 0.002);
  EXPECT_DOUBLE_EQ(answer.Wait()->stages.total, 0.007);
}

/// Parameters: piece size, misalignment in bytes, rows per batch.
class BatcherPayloadTest : public BatcherResultsTest,
                           public ::testing::WithParamInterface<std::tuple<int, int, int>> {};

TEST_P(BatcherPayloadTest, GathersRowsFromPiecesOfAnySizeAndAlignment) {
  const auto [piece_bytes, misalignment, batch_rows] = GetParam();
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
    MakeBatcher({.batch_rows_max = batch_rows}, {.hidden_size = 5});
    ExpectRightAnswer(MakeRequest({.rows = 23,
                                   .hidden_size = 5,
                                   .dtype = dtype,
                                   .ignored_rows = {0, 7, 8, 22},
                                   .piece_bytes = piece_bytes,
                                   .misalignment = misalignment}));
    batcher_ = nullptr;
  }
}

INSTANTIATE_TEST_SUITE_P(Pieces, BatcherPayloadTest,
                         ::testing::Combine(::testing::Values(1, 3, 10, 11, 64, 0),
                                            ::testing::Values(0, 1, 3),
                                            ::testing::Values(1, 4, 64)));

TEST_F(BatcherResultsTest, GathersLargeBatchesOnSeveralThreads) {
  MakeBatcher({.batch_rows_max = 4'096, .copy_threads = 3}, {.hidden_size = 512});
  ExpectRightAnswer(MakeRequest({.rows = 5'000,
                                 .hidden_size = 512,
                                 .ignored_rows = {1, 2, 3, 500, 4'999},
                                 .piece_bytes = 8'191}));
}

TEST_F(BatcherResultsTest, ReleasesThePayloadOnceItIsGathered) {
  MakeBatcher();
  engine_->Hold();
  ScoreRequest request = RequestOfRows(4);
  const std::weak_ptr<void> owner = request.hidden.owner;

  SubmitRequest(std::move(request));
  engine_->WaitForBatches(1);
  clock_.WaitUntilAsleep();

  EXPECT_TRUE(owner.expired());
  engine_->Release();
}

}  // namespace
}  // namespace logprobd::testing
