#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/app/heads/head_versions.h"
#include "tests/unit/server/app/heads/head_versions_fixture.h"

// Tests of replacing weights in place: the old weights are freed before the new ones are read.

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using HeadVersionsInPlaceTest = HeadVersionsTest;

TEST_F(HeadVersionsInPlaceTest, FreesTheOldEnginesBeforeItMakesNewOnes) {
  Make();
  size_t num_uses = 1;
  on_create_ = [&](const HeadWeights&) {
    num_uses = head_->memory().size();
    return absl::OkStatus();
  };

  const absl::StatusOr<WeightsVersion> loaded = Load({.path = "/m/2", .in_place = true});

  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(num_uses, 0U);
  EXPECT_EQ(ScoredBy(), 2U);
  const HeadWeightsState state = versions_->List();
  EXPECT_EQ(state.live.version, 2U);
  EXPECT_FALSE(state.staged.has_value());
  EXPECT_FALSE(state.previous.has_value());
  EXPECT_EQ(NumSwaps("committed"), "1");
}

TEST_F(HeadVersionsInPlaceTest, VerifiesNothingMeanwhile) {
  Make();
  absl::Notification done;
  absl::Status verified;
  on_create_ = [&](const HeadWeights&) {
    head_->Verify({}, [&](const absl::StatusOr<VerifyReport>& report) {
      verified = report.status();
      done.Notify();
    });
    done.WaitForNotification();
    return absl::OkStatus();
  };

  ASSERT_TRUE(Load({.path = "/m/2", .in_place = true}).ok());

  EXPECT_EQ(verified, absl::UnavailableError("the weights are being replaced"));
}

TEST_F(HeadVersionsInPlaceTest, ScoresRequestsThatArriveMeanwhileWithTheNewVersion) {
  Make();
  absl::Notification done;
  absl::StatusOr<ScoreResult> result;
  on_create_ = [&](const HeadWeights&) {
    EXPECT_TRUE(head_->ready());
    return head_
        ->Submit(RequestOfRows(1),
                 [&](absl::StatusOr<ScoreResult> answer) {
                   result = std::move(answer);
                   done.Notify();
                 })
        .status();
  };

  ASSERT_TRUE(Load({.path = "/m/2", .in_place = true}).ok());

  done.WaitForNotification();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->weights_version, 2U);
}

TEST_F(HeadVersionsInPlaceTest, KeepsTheStagingOfTheOldVersion) {
  staging_bytes_max_ = 0;
  MakeWithSpareStaging();
  int64_t spare_bytes = 0;
  on_create_ = [&](const HeadWeights&) {
    spare_bytes = staging_.spare_bytes();
    return absl::OkStatus();
  };

  ASSERT_TRUE(Load({.path = "/m/2", .in_place = true}).ok());

  EXPECT_EQ(spare_bytes, 2 * kStagingBytes);
  EXPECT_EQ(staging_.spare_bytes(), kStagingBytes);
  EXPECT_EQ(ScoredBy(), 2U);
}

// Regression: staging was counted as freed, and its spare buffers were counted again.
TEST_F(HeadVersionsInPlaceTest, DoesNotCountKeptStagingAsFreed) {
  constexpr int64_t kLoadBytes = int64_t{64} << 20;
  MakeWithSpareStaging();

  available_ = kLoadBytes - 1;
  EXPECT_EQ(Load({.path = "/m/2", .in_place = true}).status().code(),
            absl::StatusCode::kResourceExhausted);
  available_ = kLoadBytes;
  EXPECT_TRUE(Load({.path = "/m/2", .in_place = true}).ok());
}

TEST_F(HeadVersionsInPlaceTest, NeedsMemoryForOneCopyOnly) {
  Make();
  int64_t live_bytes = 0;
  for (const MemoryUse& use : head_->memory()) {
    live_bytes += use.bytes;
  }
  available_ = int64_t{64} << 20;  // the memory that a load itself needs
  ASSERT_EQ(Load({.path = "/m/2"}).status().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_GT(live_bytes, 0);

  EXPECT_TRUE(Load({.path = "/m/2", .in_place = true}).ok());
}

TEST_F(HeadVersionsInPlaceTest, CountsTheMemoryThatTheLiveVersionFrees) {
  Make();
  plan_ = [](int64_t freed_bytes) -> absl::StatusOr<EnginePlan> {
    if (freed_bytes < kWeightBytes) {
      return absl::FailedPreconditionError("gpu0 is full");
    }
    return PlanOf(2);
  };

  EXPECT_TRUE(Load({.path = "/m/2", .in_place = true}).ok());

  EXPECT_EQ(ScoredBy(), 2U);
}

// Regression: a head larger than the live one was found not to fit only after the live one was
// freed.
TEST_F(HeadVersionsInPlaceTest, RefusesAVersionThatDoesNotFitBeforeAnythingIsFreed) {
  Make();
  plan_ = [](int64_t) { return absl::FailedPreconditionError("gpu0 has 80 GiB, needs 90 GiB"); };

  const absl::Status status = Load({.path = "/m/2", .in_place = true}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "no room for the new version: gpu0 has 80 GiB, needs 90 GiB");
  EXPECT_EQ(num_changes_, 0);
  ExpectUnharmed();
}

// Regression: the message advised to load in place.
TEST_F(HeadVersionsInPlaceTest, SaysHowMuchMemoryIsMissingForOneCopy) {
  Make();
  available_ = 0;

  const absl::Status status = Load({.path = "/m/2", .in_place = true}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("no room for the new version: it needs 64.0"), Not(HasSubstr("in_place"))));
  EXPECT_EQ(num_created_, 0);
  ExpectUnharmed();
}

TEST_F(HeadVersionsInPlaceTest, ChecksTheFolderBeforeAnythingIsFreed) {
  Make();
  folders_["/m/2"].has_nan = true;

  EXPECT_EQ(Load({.path = "/m/2", .in_place = true}).status().code(),
            absl::StatusCode::kInvalidArgument);

  EXPECT_EQ(num_created_, 0);
  EXPECT_EQ(num_changes_, 0);
  ExpectUnharmed();
}

TEST_F(HeadVersionsInPlaceTest, ChangesNothingIfItIsCancelledBeforeTheOldVersionIsTakenOut) {
  Make();
  progress_ = [](const WeightsProgress& progress) { return progress.phase != "loading"; };

  EXPECT_EQ(Load({.path = "/m/2", .in_place = true}).status().code(), absl::StatusCode::kCancelled);

  EXPECT_EQ(num_created_, 0);
  EXPECT_EQ(num_changes_, 0);
  ExpectUnharmed();
  EXPECT_TRUE(load_turn_.Take(absl::ZeroDuration()).has_value());
}

TEST_F(HeadVersionsInPlaceTest, LoadsTheOldVersionAgainWhenTheNewOneFails) {
  Make();
  const std::string sha256 = versions_->List().live.sha256;
  on_create_ = [this](const HeadWeights& weights) {
    return weights.info().weights_version == 1 ? absl::OkStatus()
                                               : absl::ResourceExhaustedError("no memory");
  };

  const absl::Status status = Load({.path = "/m/2", .in_place = true}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(num_created_, 2);
  ExpectUnharmed();
  EXPECT_EQ(versions_->List().live.sha256, sha256);
  EXPECT_EQ(NumSwaps("failed"), "1");
}

TEST_F(HeadVersionsInPlaceTest, LoadsTheOldVersionAgainWhenCancelled) {
  Make();
  int num_reports = 0;
  progress_ = [&](const WeightsProgress& progress) {
    // When this phase is reported for the second time, the old version has been freed.
    num_reports += progress.phase == "loading" ? 1 : 0;
    return num_reports < 2;
  };
  on_create_ = [](const HeadWeights& weights) {
    std::vector<std::byte> row(kHidden * 2);
    absl::Status read;
    while (read.ok() && weights.info().weights_version == 2) {
      read = weights.ReadRows(0, 1, row.data(), kHidden * 2);
    }
    return read;
  };

  EXPECT_EQ(Load({.path = "/m/2", .in_place = true}).status().code(), absl::StatusCode::kCancelled);

  EXPECT_EQ(num_created_, 2);
  ExpectUnharmed();
}

TEST_F(HeadVersionsInPlaceTest, IsNotReadyAfterBothVersionsFailUntilOneIsLoaded) {
  Make();
  on_create_ = [](const HeadWeights&) { return absl::ResourceExhaustedError("no memory"); };

  ASSERT_FALSE(Load({.path = "/m/2", .in_place = true}).ok());

  EXPECT_FALSE(head_->ready());
  EXPECT_EQ(ScoredBy(), 0U);
  EXPECT_EQ(refusal_.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(head_->failure(), HasSubstr("load a version or restart"));
  EXPECT_EQ(versions_->List().live.version, 0U);
  EXPECT_EQ(Load({.path = "/m/3"}).status().code(), absl::StatusCode::kResourceExhausted);
  on_create_ = nullptr;
  EXPECT_TRUE(Load({.path = "/m/3", .commit = true}).ok());
  EXPECT_TRUE(head_->ready());
  EXPECT_EQ(head_->failure(), "");
  EXPECT_EQ(ScoredBy(), versions_->List().live.version);
}

// Regression: waiting requests and the log got the message that the weights were lost.
TEST_F(HeadVersionsInPlaceTest, SaysThatItIsShuttingDownWhenStoppedMeanwhile) {
  Make();
  absl::Notification done;
  absl::StatusOr<ScoreResult> result;
  on_create_ = [&](const HeadWeights& weights) {
    if (weights.info().weights_version == 1) {
      return absl::OkStatus();
    }
    EXPECT_TRUE(head_
                    ->Submit(RequestOfRows(1),
                             [&](absl::StatusOr<ScoreResult> answer) {
                               result = std::move(answer);
                               done.Notify();
                             })
                    .ok());
    versions_->Stop();
    std::vector<std::byte> row(kHidden * 2);
    absl::Status read;
    while (read.ok()) {
      read = weights.ReadRows(0, 1, row.data(), kHidden * 2);
    }
    return read;
  };

  EXPECT_EQ(Load({.path = "/m/2", .in_place = true}).status().code(),
            absl::StatusCode::kUnavailable);

  done.WaitForNotification();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("shutting down"));
}

TEST_F(HeadVersionsInPlaceTest, StaysNotReadyWhenALoadFailsAgain) {
  Make();
  on_create_ = [](const HeadWeights&) { return absl::ResourceExhaustedError("no memory"); };
  ASSERT_FALSE(Load({.path = "/m/2", .in_place = true}).ok());

  EXPECT_FALSE(Load({.path = "/m/3", .in_place = true}).ok());

  EXPECT_FALSE(head_->ready());
  EXPECT_EQ(head_->failure(), "no version of the weights could be loaded");
  EXPECT_EQ(ScoredBy(), 0U);
}

}  // namespace
}  // namespace logprobd::testing
