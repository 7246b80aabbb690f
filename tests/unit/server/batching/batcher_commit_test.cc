#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/batching/version_replicas.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A version of the weights: its engine, which holds its batches until they are released, and its
/// replicas.
struct Version {
  std::unique_ptr<FakeEngine> engine;
  std::unique_ptr<VersionReplicas> replicas;
};

std::vector<ShardPlace> OnTwoGpus() {
  return {{.shard = 0, .device = "gpu0"}, {.shard = 1, .device = "gpu1"}};
}

/// Version 1 is live; versions 2 and 3 are ready to be committed.
class BatcherCommitTest : public BatcherTest {
 protected:
  void MakeVersions(const Batcher::Options& options = {}, FakeEngine::Options engine = {}) {
    for (uint64_t version = 1; version <= 3; ++version) {
      engine.weights_version = version;
      auto fake = std::make_unique<FakeEngine>(engine);
      fake->Hold();
      auto replicas = VersionReplicas::Create(options, {fake.get()});
      ASSERT_TRUE(replicas.ok()) << replicas.status();
      versions_.push_back({std::move(fake), *std::move(replicas)});
    }
    auto batcher = Batcher::Create(options, *versions_[0].replicas, clock_, metrics_);
    ASSERT_TRUE(batcher.ok()) << batcher.status();
    batcher_ = *std::move(batcher);
  }

  void TearDown() override {
    for (Version& version : versions_) {
      version.engine->Release();
    }
    batcher_ = nullptr;
  }

  FakeEngine& EngineOf(uint64_t version) { return *versions_[version - 1].engine; }
  void Commit(uint64_t version) {
    batcher_->Commit(version == 0 ? nullptr : versions_[version - 1].replicas.get());
  }

  /// Occupies both slots of version 1 with requests of one row, so that later requests wait.
  void OccupyFirst() {
    for (int i = 0; i < 2; ++i) {
      SubmitRows(1);
      clock_.WaitUntilAsleep();
    }
    EngineOf(1).WaitUntilInFlight(2);
  }

  ScoreRequest Pinned(uint64_t version, int64_t rows = 1) {
    ScoreRequest request = RequestOfRows(rows);
    request.weights_version = version;
    return request;
  }

  absl::Status RefusalOf(ScoreRequest request) {
    answers_.push_back(std::make_unique<Answer>());
    return batcher_->Submit(std::move(request), answers_.back()->Callback()).status();
  }

  std::vector<int64_t> RowsOn(uint64_t version) {
    std::vector<int64_t> rows;
    for (const RecordedBatch& batch : EngineOf(version).batches()) {
      rows.push_back(batch.num_rows);
    }
    return rows;
  }

  std::vector<Version> versions_;
};

const Batcher::Options kAtOnce = {.batch_rows_max = 4, .batch_wait_max = absl::ZeroDuration()};

TEST_F(BatcherCommitTest, ScoresNewRequestsWithTheNewVersion) {
  MakeVersions();
  EngineOf(2).Release();

  Commit(2);
  batcher_->AwaitRetired();

  EXPECT_EQ(SubmitRows(3).Wait()->weights_version, 2U);
  EXPECT_EQ(SubmitRows(0).Wait()->weights_version, 2U);
  EXPECT_EQ(EngineOf(1).num_batches(), 0);
}

TEST_F(BatcherCommitTest, ANewVersionHasTheLongestWaitThatWasSetWhileTheServerRan) {
  MakeVersions({.batch_wait_max = absl::Hours(1)});
  ASSERT_TRUE(batcher_->SetLimits({.batch_wait_max = absl::ZeroDuration()}).ok());
  Commit(2);
  ASSERT_TRUE(batcher_->AwaitRetired());
  SubmitRows(1);
  clock_.WaitUntilAsleep();

  SubmitRows(2);  // beside the batch in flight
  clock_.WaitUntilAsleep();

  EXPECT_THAT(RowsOn(2), ElementsAre(1, 2));
}

TEST_F(BatcherCommitTest, EndsARequestOnTheVersionThatBeganIt) {
  MakeVersions(kAtOnce);
  ScoreRequest request = MakeRequest({.rows = 11, .top_k = 2, .ignored_rows = {9}});
  const ScoreResult expected = ExpectedResult(request);
  Answer& begun = SubmitRequest(std::move(request));
  EngineOf(1).WaitUntilInFlight(2);
  clock_.WaitUntilAsleep();

  Commit(2);
  EngineOf(1).Release();

  ASSERT_TRUE(begun.Wait().ok()) << begun.Wait().status();
  EXPECT_EQ(Differences(*begun.Wait(), expected), "");
  EXPECT_THAT(RowsOn(1), ElementsAre(4, 4, 2));
  EXPECT_EQ(EngineOf(2).num_batches(), 0);
}

TEST_F(BatcherCommitTest, ScoresWaitingRequestsWithTheNewVersionWithoutWaitingForTheOldOne) {
  MakeVersions(kAtOnce);
  OccupyFirst();
  Answer& waiting = SubmitRows(3);
  EngineOf(2).Release();

  Commit(2);

  EXPECT_EQ(waiting.Wait()->weights_version, 2U);
  EXPECT_THAT(RowsOn(2), ElementsAre(3));
}

TEST_F(BatcherCommitTest, ScoresPinnedRequestsOnTheOldVersionInOrder) {
  MakeVersions(kAtOnce);
  OccupyFirst();
  std::vector<Answer*> pinned;
  std::vector<int32_t> targets;
  for (int64_t rows = 1; rows <= 3; ++rows) {
    ScoreRequest request = MakeRequest({.rows = rows, .seed = static_cast<uint32_t>(rows)});
    request.weights_version = 1;
    targets.insert(targets.end(), request.targets.begin(), request.targets.end());
    pinned.push_back(&SubmitRequest(std::move(request)));
  }

  Commit(2);
  EngineOf(1).Release();

  for (Answer* answer : pinned) {
    EXPECT_EQ(answer->Wait()->weights_version, 1U);
  }
  std::vector<int32_t> scored;
  const std::vector<RecordedBatch> batches = EngineOf(1).batches();
  for (size_t i = 2; i < batches.size(); ++i) {
    scored.insert(scored.end(), batches[i].targets.begin(), batches[i].targets.end());
  }
  EXPECT_EQ(scored, targets);
}

TEST_F(BatcherCommitTest, RefusesAPinToAVersionThatIsNotLive) {
  MakeVersions();
  EngineOf(2).Release();
  EXPECT_EQ(RefusalOf(Pinned(2)).code(), absl::StatusCode::kFailedPrecondition);

  Commit(2);

  const absl::Status refusal = RefusalOf(Pinned(1));
  EXPECT_EQ(refusal.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refusal.message(), HasSubstr("weights_version: 1, but version 2 is live"));
  EXPECT_EQ(SubmitRequest(Pinned(2)).Wait()->weights_version, 2U);
}

TEST_F(BatcherCommitTest, WaitsForTheLastBatchOfTheVersionThatRetires) {
  MakeVersions(kAtOnce);
  Answer& begun = SubmitRows(6);
  EngineOf(1).WaitUntilInFlight(2);
  Commit(2);
  std::atomic<bool> is_retired = false;
  std::thread waiting([&] {
    batcher_->AwaitRetired();
    is_retired = true;
  });

  EngineOf(1).ReleaseOne();
  clock_.WaitUntilAsleep();
  EXPECT_FALSE(is_retired);
  EngineOf(1).Release();
  waiting.join();

  EXPECT_TRUE(begun.Wait().ok());
  versions_[0] = {};  // Nothing uses it any more.
  EngineOf(2).Release();
  EXPECT_TRUE(SubmitRows(1).Wait().ok());
  versions_.erase(versions_.begin());
}

TEST_F(BatcherCommitTest, MakesAnEarlierVersionLiveAgain) {
  MakeVersions();
  EngineOf(1).Release();
  EngineOf(2).Release();
  Commit(2);
  batcher_->AwaitRetired();

  Commit(1);
  batcher_->AwaitRetired();

  EXPECT_EQ(SubmitRows(1).Wait()->weights_version, 1U);
  EXPECT_EQ(RefusalOf(Pinned(2)).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(BatcherCommitTest, CanBeCommittedAgainAndAgain) {
  MakeVersions(kAtOnce);
  for (Version& version : versions_) {
    version.engine->Release();
  }
  for (uint64_t round = 0; round < 30; ++round) {
    const uint64_t version = 1 + (round + 1) % 3;
    Answer& before = SubmitRows(9);
    Commit(version);
    Answer& after = SubmitRows(2);
    batcher_->AwaitRetired();

    EXPECT_TRUE(before.Wait().ok());
    EXPECT_EQ(after.Wait()->weights_version, version);
  }
}

TEST_F(BatcherCommitTest, HoldsTheQueueWhileNoVersionIsLive) {
  MakeVersions(kAtOnce);
  Answer& begun = SubmitRows(9);
  EngineOf(1).WaitUntilInFlight(2);
  Answer& waiting = SubmitRows(2);
  clock_.WaitUntilAsleep();

  Commit(0);
  Answer& later = SubmitRows(1);
  EngineOf(1).Release();
  EXPECT_EQ(begun.Wait()->weights_version, 1U);
  batcher_->AwaitRetired();
  clock_.WaitUntilAsleep();
  EXPECT_FALSE(waiting.is_called());
  EXPECT_FALSE(later.is_called());
  EXPECT_EQ(RefusalOf(Pinned(1)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(RefusalOf(Pinned(1)).message()), HasSubstr("are being replaced"));
  EngineOf(2).Release();
  Commit(2);
  batcher_->AwaitRetired();

  EXPECT_EQ(waiting.Wait()->weights_version, 2U);
  EXPECT_EQ(later.Wait()->weights_version, 2U);
  EXPECT_THAT(RowsOn(1), ElementsAre(4, 4, 1));
}

TEST_F(BatcherCommitTest, EndsExpiredRequestsWhileNoVersionIsLive) {
  MakeVersions();
  Commit(0);
  batcher_->AwaitRetired();
  Answer& late = Submit({.rows = 1, .deadline = clock_.Now() + absl::Milliseconds(5)});
  clock_.WaitForWaiter(clock_.Now() + absl::Milliseconds(5));

  clock_.Advance(absl::Milliseconds(5));

  EXPECT_EQ(late.WaitForCode(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(BatcherCommitTest, RefusesAllRequestsAfterAFailureUntilTheNextCommit) {
  MakeVersions();
  Commit(0);
  batcher_->AwaitRetired();
  Answer& waiting = SubmitRows(2);
  clock_.WaitUntilAsleep();

  batcher_->Fail(absl::UnavailableError("no weights"));

  clock_.WaitUntilAsleep();
  ASSERT_TRUE(waiting.is_called());
  EXPECT_EQ(waiting.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(RefusalOf(RequestOfRows(1)).message(), "no weights");
  EngineOf(3).Release();
  Commit(3);
  EXPECT_EQ(SubmitRows(1).Wait()->weights_version, 3U);
}

TEST_F(BatcherCommitTest, RefusesNothingWhileTheVersionAfterAFailureIsReplaced) {
  MakeVersions();
  Commit(0);
  ASSERT_TRUE(batcher_->AwaitRetired());
  batcher_->Fail(absl::UnavailableError("no weights"));
  Commit(2);
  ASSERT_TRUE(batcher_->AwaitRetired());

  Commit(0);

  EXPECT_TRUE(RefusalOf(RequestOfRows(1)).ok());
}

TEST_F(BatcherCommitTest, DrainsBothVersions) {
  MakeVersions(kAtOnce);
  SubmitRows(9);
  EngineOf(1).WaitUntilInFlight(2);
  Commit(2);
  SubmitRows(2);
  EngineOf(2).WaitUntilInFlight(1);
  std::atomic<bool> is_drained = false;
  std::thread draining([&] { is_drained = batcher_->Drain(absl::InfiniteFuture()); });

  EngineOf(2).Release();
  EngineOf(1).ReleaseOne();
  EngineOf(1).WaitForBatches(3);
  EXPECT_FALSE(is_drained);
  EngineOf(1).Release();
  draining.join();

  EXPECT_TRUE(is_drained);
  for (const auto& answer : answers_) {
    EXPECT_TRUE(answer->Wait().ok());
  }
}

TEST_F(BatcherCommitTest, AnswersAllRequestsWhenStoppedWhileAVersionRetires) {
  MakeVersions(kAtOnce);
  Answer& begun = SubmitRows(12);
  EngineOf(1).WaitUntilInFlight(2);
  Commit(2);
  Answer& with_new = SubmitRows(4);
  EngineOf(2).WaitUntilInFlight(1);
  std::thread stopping([&] { batcher_->Stop(); });

  EXPECT_EQ(begun.WaitForCode(), absl::StatusCode::kUnavailable);
  EngineOf(1).Release();
  EngineOf(2).Release();
  stopping.join();

  EXPECT_TRUE(with_new.Wait().ok());
  batcher_->AwaitRetired();
  Commit(3);  // Has no effect any more.
  batcher_->AwaitRetired();
  EXPECT_EQ(RefusalOf(RequestOfRows(1)).code(), absl::StatusCode::kUnavailable);
}

TEST_F(BatcherCommitTest, EndsRequestsOfARetiringVersionWhoseEngineFails) {
  MakeVersions(kAtOnce);
  Answer& begun = SubmitRows(12);
  EngineOf(1).WaitUntilInFlight(2);
  Commit(2);
  EngineOf(2).Release();

  EngineOf(1).SetHealthy(false);
  Answer& other = SubmitRows(1);

  EXPECT_EQ(begun.WaitForCode(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(other.Wait().ok());
  EngineOf(1).Release();
  batcher_->AwaitRetired();
}

TEST_F(BatcherCommitTest, FinishesTheRetiringVersionWhenTheNewEngineFails) {
  MakeVersions(kAtOnce);
  Answer& begun = SubmitRows(12);
  EngineOf(1).WaitUntilInFlight(2);
  Answer& waiting = SubmitRows(1);
  EngineOf(2).SetHealthy(false);

  Commit(2);

  EXPECT_EQ(waiting.WaitForCode(), absl::StatusCode::kUnavailable);
  EngineOf(1).Release();
  EXPECT_TRUE(begun.Wait().ok());
  batcher_->AwaitRetired();
  EXPECT_EQ(RefusalOf(RequestOfRows(1)).code(), absl::StatusCode::kUnavailable);
}

TEST_F(BatcherCommitTest, DropsACancelledRequestOfTheVersionThatRetires) {
  MakeVersions(kAtOnce);
  OccupyFirst();
  Answer& pinned = SubmitRequest(Pinned(1));
  const RequestTicket ticket = last_ticket_;
  Commit(2);

  batcher_->Cancel(ticket);

  EXPECT_EQ(pinned.WaitForCode(), absl::StatusCode::kCancelled);
  EngineOf(1).Release();
  batcher_->AwaitRetired();
  EXPECT_THAT(RowsOn(1), ElementsAre(1, 1));
}

TEST_F(BatcherCommitTest, TriesHalvesOfABatchOfTheVersionThatRetires) {
  MakeVersions(kAtOnce);
  EngineOf(1).SetFittingRows(2);
  Answer& begun = SubmitRows(4);
  EngineOf(1).WaitUntilInFlight(1);
  Commit(2);

  EngineOf(1).Release();

  ASSERT_TRUE(begun.Wait().ok()) << begun.Wait().status();
  EXPECT_EQ(begun.Wait()->weights_version, 1U);
  EXPECT_THAT(RowsOn(1), ElementsAre(4, 2, 2));
  batcher_->AwaitRetired();
}

TEST_F(BatcherCommitTest, StartsNoBatchWhileOneOfTheOtherVersionCouldWaitOnTheSameGpus) {
  MakeVersions(kAtOnce, {.layout = OnTwoGpus()});
  Answer& begun = SubmitRows(9);
  EngineOf(1).WaitUntilInFlight(2);
  clock_.WaitUntilAsleep();

  Commit(2);
  Answer& next = SubmitRows(1);
  clock_.WaitUntilAsleep();
  EXPECT_EQ(EngineOf(2).num_batches(), 0);
  EngineOf(1).ReleaseOne();
  clock_.WaitUntilAsleep();
  EXPECT_EQ(EngineOf(2).num_batches(), 0);
  EngineOf(1).Release();  // Ends its turn of two batches.
  EngineOf(2).WaitUntilInFlight(1);
  clock_.WaitUntilAsleep();
  EXPECT_FALSE(begun.is_called());
  EXPECT_THAT(RowsOn(1), ElementsAre(4, 4));
  EngineOf(2).Release();

  EXPECT_EQ(begun.Wait()->weights_version, 1U);
  EXPECT_EQ(next.Wait()->weights_version, 2U);
  EXPECT_THAT(RowsOn(1), ElementsAre(4, 4, 1));
  batcher_->AwaitRetired();
}

TEST_F(BatcherCommitTest, GivesBothVersionsTheirTurnsOnTheSameGpus) {
  MakeVersions(kAtOnce, {.layout = OnTwoGpus()});
  Answer& begun = SubmitRows(30);
  EngineOf(1).WaitUntilInFlight(2);
  Commit(2);
  Answer& next = SubmitRows(30);

  EngineOf(1).Release();
  EngineOf(2).Release();

  EXPECT_EQ(begun.Wait()->weights_version, 1U);
  EXPECT_EQ(next.Wait()->weights_version, 2U);
  batcher_->AwaitRetired();
}

TEST_F(BatcherCommitTest, ForgetsTheRateOfAnEngineOfAnotherKind) {
  MakeVersions(kAtOnce);
  Answer& slow = SubmitRows(4);
  EngineOf(1).WaitUntilInFlight(1);
  clock_.WaitUntilAsleep();
  clock_.Advance(absl::Seconds(1));  // A row takes at least 250 ms.
  EngineOf(1).Release();
  EXPECT_TRUE(slow.Wait().ok());
  EngineOf(1).Hold();
  OccupyFirst();
  const RequestSpec soon = {.rows = 4, .deadline = clock_.Now() + absl::Milliseconds(10)};
  EXPECT_EQ(Refusal(soon).code(), absl::StatusCode::kDeadlineExceeded);
  FakeEngine other({.dtype = Dtype::kF16, .weights_version = 4});
  auto replicas = VersionReplicas::Create(kAtOnce, {&other});
  ASSERT_TRUE(replicas.ok());

  batcher_->Commit(replicas->get());

  other.Hold();
  SubmitRows(1);  // An idle engine gets every request.
  other.WaitUntilInFlight(1);
  clock_.WaitUntilAsleep();
  EXPECT_TRUE(Refusal(soon).ok());
  other.Release();
  EngineOf(1).Release();
  batcher_->AwaitRetired();
  batcher_ = nullptr;
}

TEST_F(BatcherCommitTest, ReportsTheStagingMemoryOfTheLiveVersion) {
  MakeVersions({.batch_rows_max = 8});
  EXPECT_EQ(batcher_->memory()[0].bytes, versions_[0].replicas->staging_bytes());

  Commit(0);

  EXPECT_EQ(batcher_->memory()[0].bytes, 0);
}

}  // namespace
}  // namespace logprobd::testing
