#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/batching/hidden_rows.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

/// Hidden size at which a single row is just long enough to be read in place.
constexpr int64_t kHiddenSize = HiddenRuns::kRunBytes / 2;

const FakeEngine::Options kInPlace = {
    .batch_rows_max = 16, .hidden_size = kHiddenSize, .reads_in_place = true};

RequestSpec Message(int64_t rows) { return {.rows = rows, .hidden_size = kHiddenSize, .seed = 11}; }
RequestSpec Pinned(int64_t rows) {
  return {.rows = rows,
          .hidden_size = kHiddenSize,
          .seed = 12,
          .place = PayloadPlace::kSharedMemory,
          .is_pinned = true};
}
RequestSpec OnGpu(int64_t rows) {
  return {.rows = rows,
          .hidden_size = kHiddenSize,
          .seed = 13,
          .place = PayloadPlace::kDevice,
          .gpu = 1};
}

class BatcherInPlaceTest : public BatcherTest {
 protected:
  /// Returns the addresses of the rows in the batch's runs.
  std::vector<const std::byte*> RunsOf(size_t batch) const {
    std::vector<const std::byte*> places;
    const RecordedBatch recorded = engine_->batches().at(batch);
    for (const HiddenRun& run : recorded.runs) {
      places.push_back(run.data);
    }
    return places;
  }

  /// Submits the requests so that they share a batch, which is the third batch of the engine.
  /// Returns their answers.
  std::vector<Answer*> SubmitTogether(std::vector<ScoreRequest> requests) {
    MakeBatcher({.batch_rows_max = 16, .batch_wait_max = absl::ZeroDuration()}, kInPlace);
    engine_->Hold();
    for (int i = 0; i < 2; ++i) {
      SubmitRequest(MakeRequest(Message(1)));
      engine_->WaitUntilInFlight(i + 1);
      clock_.WaitUntilAsleep();
    }
    std::vector<Answer*> answers;
    for (ScoreRequest& request : requests) {
      answers.push_back(&SubmitRequest(std::move(request)));
    }
    return answers;
  }

  void ReleaseTheTwoBefore() {
    engine_->ReleaseOne();
    engine_->ReleaseOne();
    answers_[0]->Wait();
    answers_[1]->Wait();
  }
};

TEST_F(BatcherInPlaceTest, ReadsPinnedSharedMemoryInPlace) {
  MakeBatcher({.batch_rows_max = 16}, kInPlace);
  ScoreRequest request = MakeRequest(Pinned(3));
  const std::byte* rows = request.hidden.pieces.front().data();
  const ScoreResult expected = ExpectedResult(request);

  const auto& result = SubmitRequest(std::move(request)).Wait();

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Differences(*result, expected), "");
  EXPECT_THAT(RunsOf(0), ::testing::ElementsAre(rows));
}

TEST_F(BatcherInPlaceTest, StagesSharedMemoryThatIsNotPinned) {
  MakeBatcher({.batch_rows_max = 16}, kInPlace);
  RequestSpec spec = Pinned(3);
  spec.is_pinned = false;

  const auto& result = Submit(spec).Wait();

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Differences(*result, ExpectedResult(MakeRequest(spec))), "");
  EXPECT_THAT(RunsOf(0), IsEmpty());
}

TEST_F(BatcherInPlaceTest, StagesSharedMemoryForAnEngineThatDoesNotReadInPlace) {
  MakeBatcher({.batch_rows_max = 16}, {.hidden_size = kHiddenSize});

  const auto& result = Submit(Pinned(3)).Wait();

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Differences(*result, ExpectedResult(MakeRequest(Pinned(3)))), "");
  EXPECT_THAT(RunsOf(0), IsEmpty());
}

TEST_F(BatcherInPlaceTest, RefusesAGpusMemoryForAnEngineThatDoesNotReadInPlace) {
  MakeBatcher({.batch_rows_max = 16}, {.hidden_size = kHiddenSize});

  const absl::Status refusal = Refusal(OnGpu(1));

  EXPECT_EQ(refusal.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refusal.message()), ::testing::HasSubstr("not scored on a GPU"));
}

// Regression: such a request waited for the next version, and the host read the GPU's memory.
TEST_F(BatcherInPlaceTest, RefusesAGpusMemoryAlsoWhileNoVersionIsLive) {
  MakeBatcher({.batch_rows_max = 16}, {.hidden_size = kHiddenSize});
  batcher_->Commit(nullptr);
  ASSERT_TRUE(batcher_->AwaitRetired());

  EXPECT_EQ(Refusal(OnGpu(1)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Refusal(Message(1)).ok());
}

TEST_F(BatcherInPlaceTest, MixesRowsOfMessagesOfSharedMemoryAndOfGpusInABatch) {
  RequestSpec ignoring = OnGpu(6);
  ignoring.ignored_rows = {1, 4};
  std::vector<ScoreResult> expected;
  std::vector<ScoreRequest> requests;
  for (const RequestSpec& spec : {Message(2), ignoring, Pinned(4), Message(3)}) {
    requests.push_back(MakeRequest(spec));
    expected.push_back(ExpectedResult(requests.back()));
  }
  const std::vector<Answer*> answers = SubmitTogether(std::move(requests));

  ReleaseTheTwoBefore();
  engine_->Release();

  for (size_t i = 0; i < answers.size(); ++i) {
    ASSERT_TRUE(answers[i]->Wait().ok()) << answers[i]->Wait().status();
    EXPECT_EQ(Differences(*answers[i]->Wait(), expected[i]), "") << i;
  }
  const std::vector<RecordedBatch> batches = engine_->batches();
  ASSERT_THAT(batches, SizeIs(3));
  std::vector<std::pair<int64_t, int32_t>> runs;
  for (const HiddenRun& run : batches[2].runs) {
    runs.emplace_back(run.num_rows, run.gpu);
  }
  EXPECT_THAT(runs, ::testing::ElementsAre(std::pair(2, -1), std::pair(1, 1), std::pair(2, 1),
                                           std::pair(1, 1), std::pair(4, -1), std::pair(3, -1)));
}

TEST_F(BatcherInPlaceTest, KeepsThePayloadAndItsChargeUntilTheBatchIsDone) {
  MakeBatcher({.batch_rows_max = 16}, kInPlace);
  engine_->Hold();
  ScoreRequest request = MakeRequest(Pinned(3));
  const std::weak_ptr<void> payload = request.hidden.owner;

  Answer& answer = SubmitRequest(std::move(request));
  engine_->WaitUntilInFlight(1);
  clock_.WaitUntilAsleep();
  EXPECT_FALSE(payload.expired());
  EXPECT_EQ(Metric(R"(logprobd_queue_requests{head="default",priority="normal"})"), 1);
  engine_->Release();
  EXPECT_TRUE(answer.Wait().ok());
  EXPECT_TRUE(payload.expired());
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  clock_.WaitUntilAsleep();

  EXPECT_EQ(Metric(R"(logprobd_queue_requests{head="default",priority="normal"})"), 0);
  EXPECT_EQ(Metric(R"(logprobd_queue_bytes{head="default",priority="normal"})"), 0);
}

TEST_F(BatcherInPlaceTest, KeepsThePayloadOfACancelledRequestUntilTheBatchIsDone) {
  MakeBatcher({.batch_rows_max = 16}, kInPlace);
  engine_->Hold();
  ScoreRequest request = MakeRequest(OnGpu(3));
  const std::weak_ptr<void> payload = request.hidden.owner;
  Answer& answer = SubmitRequest(std::move(request));
  engine_->WaitUntilInFlight(1);
  clock_.WaitUntilAsleep();

  batcher_->Cancel(last_ticket_);

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(payload.expired());
  engine_->Release();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  EXPECT_TRUE(payload.expired());
  clock_.WaitUntilAsleep();
  EXPECT_EQ(Metric(R"(logprobd_queue_requests{head="default",priority="normal"})"), 0);
}

TEST_F(BatcherInPlaceTest, KeepsThePayloadWhileAnyBatchOfTheRequestIsInFlight) {
  MakeBatcher({.batch_rows_max = 4}, kInPlace);
  engine_->Hold();
  ScoreRequest request = MakeRequest(Pinned(8));
  const std::weak_ptr<void> payload = request.hidden.owner;
  const ScoreResult expected = ExpectedResult(request);
  Answer& answer = SubmitRequest(std::move(request));
  engine_->WaitUntilInFlight(1);
  clock_.WaitUntilAsleep();
  clock_.Advance(absl::Seconds(1));
  engine_->WaitUntilInFlight(2);

  engine_->ReleaseOne();
  engine_->WaitUntilInFlight(1);
  EXPECT_FALSE(payload.expired());
  engine_->Release();

  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  EXPECT_EQ(Differences(*answer.Wait(), expected), "");
  EXPECT_TRUE(payload.expired());
}

TEST_F(BatcherInPlaceTest, HalvesABatchThatDoesNotFit) {
  std::vector<ScoreResult> expected;
  std::vector<ScoreRequest> requests;
  for (const RequestSpec& spec : {Message(2), Pinned(4), OnGpu(3)}) {
    requests.push_back(MakeRequest(spec));
    expected.push_back(ExpectedResult(requests.back()));
  }
  const std::vector<Answer*> answers = SubmitTogether(std::move(requests));
  engine_->SetFittingRows(5);

  ReleaseTheTwoBefore();
  engine_->Release();

  for (size_t i = 0; i < answers.size(); ++i) {
    ASSERT_TRUE(answers[i]->Wait().ok()) << answers[i]->Wait().status();
    EXPECT_EQ(Differences(*answers[i]->Wait(), expected[i]), "") << i;
  }
  EXPECT_THAT(BatchRows(), ::testing::ElementsAre(1, 1, 9, 4, 5));
}

TEST_F(BatcherInPlaceTest, ReleasesThePayloadsOfABatchThatFails) {
  MakeBatcher({.batch_rows_max = 16}, kInPlace);
  ScoreRequest request = MakeRequest(Pinned(3));
  const std::weak_ptr<void> payload = request.hidden.owner;
  engine_->FailNext(absl::InternalError("device fault"));

  Answer& answer = SubmitRequest(std::move(request));

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kInternal);
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  EXPECT_TRUE(payload.expired());
}

}  // namespace
}  // namespace logprobd::testing
