#include "server/app/heads/head_versions.h"

#include <gmock/gmock.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/unit/server/app/heads/head_versions_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kAborted = absl::StatusCode::kAborted;
constexpr auto kFailedPrecondition = absl::StatusCode::kFailedPrecondition;

TEST_F(HeadVersionsTest, StagesAVersionNextToTheLiveOne) {
  Make();

  const absl::StatusOr<WeightsVersion> loaded = Load({.path = "/m/2", .version = 7});

  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->version, 7U);
  EXPECT_EQ(loaded->source, "/m/2");
  EXPECT_EQ(loaded->sha256.size(), 64U);
  EXPECT_EQ(loaded->weight_bytes, kWeightBytes);
  EXPECT_GT(loaded->loaded_unix_seconds, 0);
  EXPECT_EQ(ScoredBy(), 1U);
  const HeadWeightsState state = versions_->List();
  EXPECT_EQ(state.head, "default");
  EXPECT_EQ(state.live.version, 1U);
  EXPECT_EQ(state.staged->version, 7U);
  EXPECT_EQ(state.staged->sha256, loaded->sha256);
  EXPECT_FALSE(state.previous.has_value());
  EXPECT_EQ(num_changes_, 1);
}

TEST_F(HeadVersionsTest, CountsTheMemoryOfVersionsNextToTheLiveOne) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2"}).ok());

  const MemoryPlan memory = versions_->memory();

  ASSERT_EQ(memory.size(), 2U);
  EXPECT_EQ(memory[0].kind, "weights");
  EXPECT_EQ(memory[0].bytes, kWeightBytes);
  EXPECT_EQ(memory[1].kind, "staging");
  EXPECT_GT(memory[1].bytes, 0);
}

TEST_F(HeadVersionsTest, ReusesTheStagingOfTheVersionThatIsDropped) {
  staging_bytes_max_ = 0;
  MakeWithSpareStaging();
  for (const std::string path : {"/m/2", "/m/3", "/m/2"}) {
    ASSERT_TRUE(Load({.path = path, .commit = true}).ok());

    EXPECT_EQ(ScoredBy(), versions_->List().live.version);
    EXPECT_EQ(TotalBytes(head_->memory(), "host") + TotalBytes(versions_->memory(), "host"),
              2 * (kWeightBytes + kStagingBytes));
    EXPECT_EQ(staging_.spare_bytes(), 0);
  }
  ASSERT_TRUE(versions_->Discard(/*staged=*/false, /*previous=*/true).ok());
  EXPECT_EQ(staging_.spare_bytes(), kStagingBytes);
}

TEST_F(HeadVersionsTest, ReportsThePhasesOfALoadInOrder) {
  Make();
  std::vector<std::string> phases;
  progress_ = [&](const WeightsProgress& progress) {
    if (phases.empty() || phases.back() != progress.phase) {
      phases.push_back(progress.phase);
    }
    EXPECT_LE(progress.bytes_done, progress.bytes_total);
    return true;
  };

  ASSERT_TRUE(Load({.path = "/m/2"}).ok());

  EXPECT_THAT(phases, ElementsAre("checking", "verifying", "loading", "committing"));
}

TEST_F(HeadVersionsTest, CommitMakesTheStagedVersionLiveAndKeepsThePreviousOne) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2"}).ok());

  const absl::StatusOr<HeadWeightsState> state = versions_->Commit(2);

  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->live.version, 2U);
  EXPECT_EQ(state->live.source, "/m/2");
  EXPECT_FALSE(state->staged.has_value());
  EXPECT_EQ(state->previous->version, 1U);
  EXPECT_EQ(ScoredBy(), 2U);
  EXPECT_EQ(head_->info()->weights_version, 2U);
  EXPECT_EQ(head_->info()->engine, "fake/2");
  EXPECT_EQ(NumSwaps("committed"), "1");
  EXPECT_THAT(metrics_.Serialize(),
              AllOf(HasSubstr("logprobd_weights_version{head=\"default\"} 2\n"),
                    HasSubstr("logprobd_weights_load_duration_seconds_count{head=\"default\"} 1"),
                    HasSubstr("engine=\"fake/2\"")));
}

TEST_F(HeadVersionsTest, LoadWithCommitMakesTheVersionLiveAtOnce) {
  Make();

  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());

  EXPECT_EQ(ScoredBy(), 2U);
  EXPECT_FALSE(versions_->List().staged.has_value());
  EXPECT_EQ(versions_->List().previous->version, 1U);
  EXPECT_EQ(NumSwaps("committed"), "1");
}

TEST_F(HeadVersionsTest, RollbackMakesThePreviousVersionLiveAndCanBeUndone) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());

  const absl::StatusOr<HeadWeightsState> back = versions_->Rollback();
  EXPECT_EQ(ScoredBy(), 1U);
  const absl::StatusOr<HeadWeightsState> forth = versions_->Rollback();
  EXPECT_EQ(ScoredBy(), 2U);

  EXPECT_EQ(back->live.version, 1U);
  EXPECT_EQ(back->previous->version, 2U);
  EXPECT_EQ(forth->live.version, 2U);
  EXPECT_EQ(num_created_, 1);
  EXPECT_EQ(NumSwaps("rolled_back"), "2");
}

TEST_F(HeadVersionsTest, NumbersAVersionOneAboveAllExistingOnes) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .version = 9, .commit = true}).ok());
  ASSERT_TRUE(versions_->Rollback().ok());

  EXPECT_EQ(Load({.path = "/m/3"})->version, 10U);
}

// Regression: other weights got the number of a version that had answered requests.
TEST_F(HeadVersionsTest, NeverReusesTheNumberOfADroppedVersion) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  ASSERT_TRUE(versions_->Rollback().ok());
  ASSERT_TRUE(versions_->Discard(false, true).ok());

  EXPECT_EQ(Load({.path = "/m/3"})->version, 3U);
}

// Regression: the number after the largest was 0, which means no version.
TEST_F(HeadVersionsTest, RefusesNumbersWithoutASuccessor) {
  Make();

  const absl::Status refused =
      Load({.path = "/m/2", .version = std::numeric_limits<uint64_t>::max()}).status();

  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("version: 18446744073709551615, must be at most"));
  EXPECT_TRUE(Load({.path = "/m/2", .version = 9'000'000'000'000'000, .commit = true}).ok());
  EXPECT_EQ(Load({.path = "/m/3"})->version, 9'000'000'000'000'001U);
}

TEST_F(HeadVersionsTest, RefusesNumbersThatAreLiveOrKept) {
  Make();
  EXPECT_EQ(Load({.path = "/m/2", .version = 1}).status(),
            absl::AlreadyExistsError("version 1 is already live"));
  ASSERT_TRUE(Load({.path = "/m/2", .version = 2, .commit = true}).ok());

  const absl::Status kept = Load({.path = "/m/3", .version = 1}).status();

  EXPECT_EQ(kept.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(kept.message(), "version 1 is already kept");
  EXPECT_EQ(ScoredBy(), 2U);
}

TEST_F(HeadVersionsTest, RefusesToLoadWhileAVersionIsStaged) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2"}).ok());

  const absl::Status refused = Load({.path = "/m/3"}).status();

  EXPECT_EQ(refused.code(), kFailedPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("version 2 is staged"));
  EXPECT_EQ(versions_->List().staged->source, "/m/2");
}

TEST_F(HeadVersionsTest, RefusesToCommitAVersionThatIsNotStaged) {
  Make();
  EXPECT_THAT(versions_->Commit(0).status().message(), HasSubstr("no version is staged"));
  ASSERT_TRUE(Load({.path = "/m/2"}).ok());

  const absl::Status other = versions_->Commit(3).status();

  EXPECT_EQ(other.code(), kFailedPrecondition);
  EXPECT_EQ(other.message(), "version: 3, but version 2 is staged");
  EXPECT_EQ(ScoredBy(), 1U);
  EXPECT_TRUE(versions_->Commit(0).ok());
}

TEST_F(HeadVersionsTest, RefusesVersionsWhoseEnginesHaveFailed) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2"}).ok());
  engines_[2]->SetHealthy(false);
  EXPECT_EQ(versions_->Commit(0).status().code(), kFailedPrecondition);
  EXPECT_EQ(ScoredBy(), 1U);
  ASSERT_TRUE(versions_->Discard(true, false).ok());
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  engines_[1]->SetHealthy(false);

  const absl::Status refused = versions_->Rollback().status();

  EXPECT_EQ(refused.code(), kFailedPrecondition);
  EXPECT_EQ(ScoredBy(), 3U);
}

TEST_F(HeadVersionsTest, RefusesToRollBackWithoutAPreviousVersion) {
  Make();

  EXPECT_EQ(versions_->Rollback().status().code(), kFailedPrecondition);

  ExpectUnharmed();
}

TEST_F(HeadVersionsTest, DiscardsTheStagedVersionAndItsMemory) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2"}).ok());

  ASSERT_TRUE(versions_->Discard(true, false).ok());

  ExpectUnharmed();
  EXPECT_TRUE(Load({.path = "/m/2"}).ok());
}

TEST_F(HeadVersionsTest, DiscardsThePreviousVersion) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());

  const absl::StatusOr<HeadWeightsState> state = versions_->Discard(false, true);

  EXPECT_FALSE(state->previous.has_value());
  EXPECT_TRUE(versions_->memory().empty());
  EXPECT_EQ(versions_->Rollback().status().code(), kFailedPrecondition);
  EXPECT_EQ(ScoredBy(), 2U);
}

TEST_F(HeadVersionsTest, DiscardsNothingIfNothingIsThereButRequiresAChoice) {
  Make();

  EXPECT_TRUE(versions_->Discard(true, true).ok());
  EXPECT_EQ(versions_->Discard(false, false).status().code(), absl::StatusCode::kInvalidArgument);

  ExpectUnharmed();
}

TEST_F(HeadVersionsTest, DropsThePreviousVersionBeforeAThirdOneIsMade) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  size_t num_uses = 1;
  on_create_ = [&](const HeadWeights&) {
    num_uses = versions_->memory().size();
    return absl::OkStatus();
  };

  ASSERT_TRUE(Load({.path = "/m/3", .commit = true}).ok());

  EXPECT_EQ(num_uses, 0U);
  EXPECT_EQ(ScoredBy(), 3U);
  EXPECT_EQ(versions_->List().previous->version, 2U);
}

TEST_F(HeadVersionsTest, AllowsOneChangeAtATime) {
  Make();
  std::vector<absl::StatusCode> codes;
  progress_ = [&](const WeightsProgress&) {
    if (codes.empty()) {
      codes = {versions_->Load({.path = "/m/3"}, {}).status().code(),
               versions_->Commit(0).status().code(), versions_->Rollback().status().code(),
               versions_->Discard(true, true).status().code()};
    }
    return true;
  };

  ASSERT_TRUE(Load({.path = "/m/2"}).ok());

  EXPECT_THAT(codes, ElementsAre(kAborted, kAborted, kAborted, kAborted));
  EXPECT_TRUE(versions_->Commit(2).ok());
}

TEST_F(HeadVersionsTest, ListComputesTheFirstDigestOnceAndKeepsItAcrossACommit) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());

  const HeadWeightsState state = versions_->List();
  ASSERT_TRUE(versions_->Rollback().ok());

  EXPECT_EQ(state.previous->sha256.size(), 64U);
  EXPECT_NE(state.previous->sha256, state.live.sha256);
  EXPECT_EQ(versions_->List().live.sha256, state.previous->sha256);
}

// Regression: the log of a rollback to the first version had no digest, although List showed it.
TEST_F(HeadVersionsTest, LogsTheDigestOfTheFirstVersionOnceItIsKnown) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(versions_->Rollback().ok());
  ASSERT_TRUE(versions_->Rollback().ok());
  const std::string sha256 = versions_->List().previous->sha256;
  ASSERT_TRUE(versions_->Rollback().ok());

  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("version=1 source=/m/1 sha256=unknown"));
  EXPECT_THAT(log, HasSubstr(absl::StrCat("version=1 source=/m/1 sha256=", sha256)));
}

// Regression: after its version was dropped, a number was accepted for other weights, which changed
// the weights of clients that had pinned it.
TEST_F(HeadVersionsTest, ANumberThatHasBeenLiveNamesTheSameWeightsAlways) {
  Make();
  folders_["/m/1"] = {.seed = 1};
  for (const uint64_t version : {2, 3}) {
    const std::string path = absl::StrCat("/m/", version);
    ASSERT_TRUE(Load({.path = path, .version = version, .commit = true}).ok());
    ASSERT_TRUE(versions_->Discard(false, true).ok());
  }

  const absl::Status other = Load({.path = "/m/3", .version = 2}).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(other.message(), HasSubstr("the next free number is 4"));
  // The digest of the first version was never computed, so that its number is not free either.
  EXPECT_EQ(Load({.path = "/m/1", .version = 1}).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Load({.path = "/m/2", .version = 2, .commit = true}).ok());
}

TEST_F(HeadVersionsTest, ANumberThatWasOnlyStagedCanNameOtherWeights) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .version = 2}).ok());
  ASSERT_TRUE(versions_->Discard(true, false).ok());

  EXPECT_TRUE(Load({.path = "/m/3", .version = 2}).ok());
}

TEST_F(HeadVersionsTest, RefusesAllNumbersUpToThoseThatItHasForgotten) {
  Make();
  constexpr uint64_t kRemembered = 4'096;
  for (uint64_t version = 2; version <= kRemembered + 2; ++version) {
    ASSERT_TRUE(Load({.path = "/m/2", .version = version, .commit = true}).ok());
  }

  EXPECT_EQ(Load({.path = "/m/2", .version = 2}).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Load({.path = "/m/2", .version = 3}).ok());
}

// Regression: a number below the live one was accepted, so that a newer version had a lower number.
TEST_F(HeadVersionsTest, RefusesNumbersBelowOneThatHasBeenLive) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .version = 7, .commit = true}).ok());

  const absl::Status below = Load({.path = "/m/3", .version = 3}).status();
  ASSERT_TRUE(versions_->Rollback().ok());
  const absl::Status after_rollback =
      Load({.path = "/m/3", .version = 3, .in_place = true}).status();

  EXPECT_EQ(below.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(below.message(), HasSubstr("version: 3, must be above 7, which is live"));
  EXPECT_THAT(below.message(), HasSubstr("the next free number is 8"));
  EXPECT_EQ(after_rollback.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(after_rollback.message(), HasSubstr("must be above 7, which has been live"));
  EXPECT_EQ(ScoredBy(), 1U);
  EXPECT_TRUE(Load({.path = "/m/3", .version = 8, .commit = true}).ok());
}

// Regression: "already kept" hid that the folder did not exist.
TEST_F(HeadVersionsTest, AMissingFolderIsReportedBeforeANumberThatIsTaken) {
  Make();

  EXPECT_EQ(Load({.path = "/m/9", .version = 1}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(HeadVersionsTest, RefusesEverythingOnceItIsStopped) {
  Make();
  versions_->Stop();

  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(versions_->Commit(0).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(versions_->Rollback().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(versions_->Discard(true, true).status().code(), absl::StatusCode::kUnavailable);
  ExpectUnharmed();
}

TEST_F(HeadVersionsTest, ScoresWithTheVersionThatTheAnswerNamesWhileVersionsChange) {
  Make();
  std::atomic<bool> is_over = false;
  std::atomic<int> num_refused = 0;
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  std::thread client([&] {
    while (!is_over) {
      num_refused += ScoredBy() == 0 ? 1 : 0;  // ScoredBy checks that the answer names the version
    }
  });

  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(versions_->Rollback().ok());
  }
  is_over = true;
  client.join();

  EXPECT_EQ(num_refused, 0);
}

}  // namespace
}  // namespace logprobd::testing
