#include <memory>
#include <string>
#include <thread>
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

constexpr absl::Duration kWait = absl::Microseconds(500);

class BatcherReplicasTest : public BatcherTest {
 protected:
  /// Creates a Batcher on `num_replicas` engines that hold their batches until they are released.
  void MakeReplicas(int num_replicas, const Batcher::Options& options = {},
                    const FakeEngine::Options& engine = {}) {
    for (int i = 0; i < num_replicas; ++i) {
      engines_.push_back(std::make_unique<FakeEngine>(engine));
      engines_.back()->Hold();
    }
    auto batcher = CreateOn(options);
    ASSERT_TRUE(batcher.ok()) << batcher.status();
    batcher_ = *std::move(batcher);
  }

  absl::StatusOr<std::shared_ptr<Batcher>> CreateOn(const Batcher::Options& options) {
    std::vector<ScoringEngine*> replicas;
    for (const std::unique_ptr<FakeEngine>& engine : engines_) {
      replicas.push_back(engine.get());
    }
    return BatcherOn(replicas, options, clock_, metrics_);
  }

  void TearDown() override {
    ReleaseAll();
    batcher_ = nullptr;
  }

  void ReleaseAll() {
    for (const std::unique_ptr<FakeEngine>& engine : engines_) {
      engine->Release();
    }
  }

  /// Submits a row and waits until an engine has it or the batch thread sleeps.
  Answer& SubmitOne() {
    Answer& answer = SubmitRows(1);
    clock_.WaitUntilAsleep();
    return answer;
  }

  /// Puts one batch of one row in flight on each replica.
  void OccupyEach() {
    for (size_t i = 0; i < engines_.size(); ++i) {
      SubmitOne();
    }
  }

  /// Simulates a replica that has lost its devices: its next batch fails.
  void Lose(int replica) {
    FakeEngine& engine = *engines_[static_cast<size_t>(replica)];
    engine.FailNext(absl::InternalError("device lost"));
    engine.SetHealthy(false);
    engine.ReleaseOne();
  }

  std::vector<int64_t> NumBatches() const {
    std::vector<int64_t> result;
    for (const std::unique_ptr<FakeEngine>& engine : engines_) {
      result.push_back(engine->num_batches());
    }
    return result;
  }

  std::vector<std::unique_ptr<FakeEngine>> engines_;
};

TEST_F(BatcherReplicasTest, SendsABatchAtOnceWhileAReplicaIsIdle) {
  MakeReplicas(3, {.batch_wait_max = absl::Hours(1)});

  SubmitOne();
  SubmitOne();
  SubmitOne();

  EXPECT_THAT(NumBatches(), ElementsAre(1, 1, 1));
}

TEST_F(BatcherReplicasTest, WaitsForMoreRowsOnceEachReplicaHasABatch) {
  MakeReplicas(2, {.batch_wait_max = kWait});
  OccupyEach();
  SubmitOne();
  SubmitOne();
  EXPECT_THAT(NumBatches(), ElementsAre(1, 1));

  clock_.Advance(kWait);

  EXPECT_THAT(engines_[0]->WaitForBatches(2), ElementsAre(1, 2));
}

TEST_F(BatcherReplicasTest, KeepsTwoBatchesInFlightOnEachReplica) {
  MakeReplicas(2, {.batch_wait_max = absl::ZeroDuration()});

  for (int i = 0; i < 5; ++i) {
    SubmitOne();
  }
  EXPECT_THAT(NumBatches(), ElementsAre(2, 2));
  engines_[1]->ReleaseOne();

  engines_[1]->WaitForBatches(3);
  EXPECT_THAT(NumBatches(), ElementsAre(2, 3));
}

TEST_F(BatcherReplicasTest, SendsWaitingRowsToTheReplicaThatBecomesIdle) {
  MakeReplicas(3, {.batch_wait_max = absl::Hours(1)});
  OccupyEach();
  SubmitOne();
  EXPECT_THAT(NumBatches(), ElementsAre(1, 1, 1));

  engines_[1]->ReleaseOne();

  engines_[1]->WaitForBatches(2);
  EXPECT_THAT(NumBatches(), ElementsAre(1, 2, 1));
}

TEST_F(BatcherReplicasTest, AnswersACutRequestWhoseBatchesEndInAnotherOrder) {
  MakeReplicas(2, {.batch_rows_max = 8, .batch_wait_max = absl::ZeroDuration()});
  ScoreRequest request = MakeRequest({.rows = 30, .top_k = 2, .ignored_rows = {3}});
  const ScoreResult expected = ExpectedResult(request);

  Answer& answer = SubmitRequest(std::move(request));
  engines_[0]->WaitUntilInFlight(2);
  engines_[1]->WaitUntilInFlight(2);
  engines_[1]->Release();
  engines_[1]->WaitUntilIdle();
  EXPECT_FALSE(answer.is_called());
  engines_[0]->Release();

  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  EXPECT_EQ(Differences(*answer.Wait(), expected), "");
}

TEST_F(BatcherReplicasTest, ReportsTheLongestWaitOfARequestWhoseBatchesEndInAnotherOrder) {
  MakeReplicas(2, {.batch_rows_max = 1, .batch_wait_max = absl::ZeroDuration()});
  const Answer& answer = SubmitRows(5);
  engines_[0]->WaitUntilInFlight(2);
  engines_[1]->WaitUntilInFlight(2);
  clock_.WaitUntilAsleep();
  clock_.Advance(absl::Seconds(1));
  engines_[1]->ReleaseOne();
  engines_[1]->WaitForBatches(3);  // The fifth row has waited for a second.

  engines_[1]->Release();
  engines_[1]->WaitUntilIdle();
  engines_[0]->Release();

  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  EXPECT_EQ(answer.Wait()->stages.queue, 1);
}

TEST_F(BatcherReplicasTest, AllocatesEachReplicasStagingOnThatReplica) {
  MakeReplicas(3, {.batch_rows_max = 8});

  for (const std::unique_ptr<FakeEngine>& engine : engines_) {
    EXPECT_EQ(engine->staging_bytes(), 2 * 8 * 4 * 2);
  }
  ASSERT_EQ(batcher_->memory().size(), 1U);
  EXPECT_EQ(batcher_->memory()[0].bytes, 3 * 2 * 8 * 4 * 2);
}

TEST_F(BatcherReplicasTest, FailsToBeCreatedWhenOneReplicaHasNoStagingMemory) {
  engines_.push_back(std::make_unique<FakeEngine>());
  engines_.push_back(std::make_unique<FakeEngine>(FakeEngine::Options{.staging_bytes_max = 100}));

  const auto batcher = CreateOn({});

  EXPECT_EQ(batcher.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(BatcherReplicasTest, RefusesReplicasOfDifferentHeads) {
  const std::vector<FakeEngine::Options> others = {
      {.batch_rows_max = 16}, {.hidden_size = 8},     {.vocab_size = 999},
      {.dtype = Dtype::kF16}, {.weights_version = 2},
  };
  for (const FakeEngine::Options& other : others) {
    engines_.clear();
    engines_.push_back(std::make_unique<FakeEngine>());
    engines_.push_back(std::make_unique<FakeEngine>(other));

    const auto batcher = CreateOn({.batch_rows_max = 16});

    EXPECT_EQ(batcher.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(batcher.status().message(), HasSubstr("replica 1 has a different head"));
  }
}

TEST_F(BatcherReplicasTest, RefusesToServeWithoutAReplica) {
  const auto batcher = CreateOn({});

  EXPECT_EQ(batcher.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(BatcherReplicasTest, FailsOnlyTheBatchesOfAReplicaThatIsLost) {
  MakeReplicas(2, {.batch_wait_max = absl::ZeroDuration()});
  Answer& on_lost = SubmitOne();
  Answer& on_other = SubmitOne();

  Lose(0);

  EXPECT_EQ(on_lost.WaitForCode(), absl::StatusCode::kInternal);
  EXPECT_FALSE(on_other.is_called());
  engines_[1]->Release();
  EXPECT_TRUE(on_other.Wait().ok());
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(SubmitOne().Wait().ok());
  }
  EXPECT_THAT(NumBatches(), ElementsAre(1, 6));
}

TEST_F(BatcherReplicasTest, KeepsWaitingRequestsForTheRemainingReplicas) {
  MakeReplicas(2, {.batch_wait_max = absl::ZeroDuration()});
  for (int i = 0; i < 4; ++i) {
    SubmitOne();
  }
  Answer& waiting = SubmitOne();

  Lose(0);
  answers_[0]->Wait();
  clock_.WaitUntilAsleep();
  EXPECT_FALSE(waiting.is_called());
  engines_[1]->Release();

  EXPECT_TRUE(waiting.Wait().ok());
  EXPECT_THAT(NumBatches(), ElementsAre(2, 3));
}

TEST_F(BatcherReplicasTest, EndsWaitingRequestsWhenNoReplicaIsLeft) {
  MakeReplicas(2, {.batch_wait_max = absl::ZeroDuration()});
  for (int i = 0; i < 4; ++i) {
    SubmitOne();
  }
  Answer& waiting = SubmitOne();

  Lose(0);
  answers_[0]->Wait();
  clock_.WaitUntilAsleep();
  EXPECT_FALSE(waiting.is_called());
  Lose(1);

  EXPECT_EQ(waiting.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Refusal({.rows = 1}).code(), absl::StatusCode::kUnavailable);
}

TEST_F(BatcherReplicasTest, EndsACutRequestWithTheFirstErrorOfAnyReplica) {
  MakeReplicas(2, {.batch_rows_max = 4});
  Answer& cut = SubmitRows(100);
  engines_[0]->WaitUntilInFlight(2);
  engines_[1]->WaitUntilInFlight(2);

  Lose(1);

  EXPECT_EQ(cut.WaitForCode(), absl::StatusCode::kInternal);
  ReleaseAll();
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  EXPECT_THAT(NumBatches(), ElementsAre(2, 2));
}

TEST_F(BatcherReplicasTest, RetriesHalvesOnTheReplicaThatHasTheRows) {
  MakeReplicas(2);
  engines_[0]->SetFittingRows(4);
  ScoreRequest request = MakeRequest({.rows = 7});
  const ScoreResult expected = ExpectedResult(request);

  Answer& answer = SubmitRequest(std::move(request));
  engines_[0]->Release();

  ASSERT_TRUE(answer.Wait().ok()) << answer.Wait().status();
  EXPECT_EQ(Differences(*answer.Wait(), expected), "");
  EXPECT_THAT(NumBatches(), ElementsAre(3, 0));
}

TEST_F(BatcherReplicasTest, EndsTheHalfThatALostReplicaHasNotScored) {
  MakeReplicas(2, {.batch_wait_max = kWait});
  OccupyEach();
  Answer& first = SubmitRows(3);
  Answer& second = SubmitRows(3);
  clock_.WaitUntilAsleep();
  clock_.Advance(kWait);
  EXPECT_THAT(engines_[0]->WaitForBatches(2), ElementsAre(1, 6));
  engines_[0]->ReleaseOne();
  answers_[0]->Wait();
  engines_[0]->FailNext(absl::ResourceExhaustedError("does not fit"));
  engines_[0]->ReleaseOne();
  EXPECT_THAT(engines_[0]->WaitForBatches(3), ElementsAre(1, 6, 3));

  engines_[0]->SetHealthy(false);
  engines_[0]->ReleaseOne();

  EXPECT_TRUE(first.Wait().ok()) << first.Wait().status();
  EXPECT_EQ(second.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.Wait().status().message(), HasSubstr("retry"));
  EXPECT_EQ(engines_[0]->num_batches(), 3);
}

TEST_F(BatcherReplicasTest, StartsNoHalfOnAReplicaThatIsLost) {
  MakeReplicas(2);
  Answer& answer = SubmitRows(6);
  engines_[0]->WaitUntilInFlight(1);

  engines_[0]->FailNext(absl::ResourceExhaustedError("does not fit"));
  engines_[0]->SetHealthy(false);
  engines_[0]->Release();

  EXPECT_EQ(answer.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engines_[0]->num_batches(), 1);
  EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
}

TEST_F(BatcherReplicasTest, DrainsEveryReplica) {
  MakeReplicas(2);
  Answer& first = SubmitOne();
  Answer& second = SubmitOne();
  std::thread drain([this] { EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture())); });
  clock_.WaitUntilAsleep(2);

  engines_[0]->Release();
  EXPECT_TRUE(first.Wait().ok());
  clock_.WaitUntilAsleep(2);  // Drain still waits.
  engines_[1]->Release();

  drain.join();
  EXPECT_TRUE(second.is_called());
}

TEST_F(BatcherReplicasTest, MeasuresTheRateOfTheRemainingReplicas) {
  MakeReplicas(2, {.batch_rows_max = 100});
  SubmitRows(100);
  SubmitRows(100);
  engines_[0]->WaitUntilInFlight(1);
  engines_[1]->WaitUntilInFlight(1);
  clock_.Advance(absl::Milliseconds(200));  // 500 rows per second and replica.
  for (const std::unique_ptr<FakeEngine>& engine : engines_) {
    engine->ReleaseOne();
    engine->WaitUntilIdle();
  }
  OccupyEach();

  const absl::Status with_two =
      Refusal({.rows = 100, .deadline = clock_.Now() + absl::Milliseconds(90)});
  Lose(1);
  answers_[3]->Wait();
  const absl::Status with_one =
      Refusal({.rows = 100, .deadline = clock_.Now() + absl::Milliseconds(190)});

  EXPECT_THAT(with_two.message(), HasSubstr("take at least 100ms"));
  EXPECT_THAT(with_one.message(), HasSubstr("take at least 200ms"));
}

TEST_F(BatcherReplicasTest, RefusesNoRequestForItsDeadlineWhileAReplicaIsIdle) {
  MakeReplicas(2, {.batch_rows_max = 100});
  SubmitRows(100);
  engines_[0]->WaitUntilInFlight(1);
  clock_.Advance(absl::Seconds(3));
  engines_[0]->ReleaseOne();
  engines_[0]->WaitUntilIdle();
  SubmitOne();

  const absl::Status status =
      Refusal({.rows = 100, .deadline = clock_.Now() + absl::Milliseconds(500)});

  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace logprobd::testing
