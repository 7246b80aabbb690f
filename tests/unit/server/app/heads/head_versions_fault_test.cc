#include <gmock/gmock.h>

#include <optional>
#include <string>
#include <vector>

#include "server/app/heads/head_versions.h"
#include "tests/unit/server/app/heads/head_versions_fixture.h"

// Whatever fails or is given up leaves the live version as it was.

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kCancelled = absl::StatusCode::kCancelled;
constexpr auto kDataLoss = absl::StatusCode::kDataLoss;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

using HeadVersionsFaultTest = HeadVersionsTest;

struct BadFolder {
  FakeFolder folder;
  std::string sha256;
  absl::StatusCode code;
  std::string text;
};

TEST_F(HeadVersionsFaultTest, RefusesBadFoldersBeforeAnyEngineIsMade) {
  Make();
  const std::vector<BadFolder> cases = {
      {{.status = absl::PermissionDeniedError("leads out")},
       "",
       absl::StatusCode::kPermissionDenied,
       "leads out"},
      {{.status = absl::UnimplementedError("quantised")},
       "",
       absl::StatusCode::kUnimplemented,
       "quantised"},
      {{.hidden_size = 8}, "", kInvalid, "hidden_size: the folder's head has 8, the live one 4"},
      {{.vocab_size = 999}, "", kInvalid, "vocab_size: the folder's head has 999"},
      {{}, std::string(64, 'a'), kDataLoss, "asked for was aaaa"},
      {{}, "abc", kInvalid, "64 hexadecimal digits"},
      {{}, std::string(64, 'g'), kInvalid, "64 hexadecimal digits"},
      {{.has_nan = true}, "", kInvalid, "row 0 column 0 is NaN or Inf; allow_nonfinite"},
      {{.read = absl::DataLossError("the file is cut")}, "", kDataLoss, "the file is cut"}};
  for (const BadFolder& bad : cases) {
    folders_["/m/bad"] = bad.folder;

    const absl::Status status = Load({.path = "/m/bad", .sha256 = bad.sha256}).status();

    EXPECT_EQ(status.code(), bad.code) << bad.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.text));
    ExpectUnharmed();
  }
  EXPECT_EQ(Load({.path = "/m/absent"}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(num_created_, 0);
  EXPECT_EQ(NumSwaps("failed"), std::to_string(cases.size() + 1));
}

TEST_F(HeadVersionsFaultTest, LoadsNothingWhereNoRootIsAllowed) {
  load_.model.roots = nullptr;
  Make();

  const absl::Status status = Load({.path = "/m/2"}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("--weights-root"));
  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, TakesTheRightDigestInEitherCase) {
  Make();
  std::string sha256 = Load({.path = "/m/2"})->sha256;
  ASSERT_TRUE(versions_->Discard(true, false).ok());
  for (char& digit : sha256) {
    digit = static_cast<char>(std::toupper(digit));
  }

  EXPECT_TRUE(Load({.path = "/m/2", .sha256 = sha256}).ok());
}

TEST_F(HeadVersionsFaultTest, LoadsWhatIsNotFiniteWhenItIsAllowed) {
  Make();
  folders_["/m/2"].has_nan = true;

  EXPECT_TRUE(Load({.path = "/m/2", .commit = true, .allow_nonfinite = true}).ok());

  EXPECT_EQ(ScoredBy(), 2U);
}

TEST_F(HeadVersionsFaultTest, ACheckThatFailsKeepsThePreviousVersion) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  folders_["/m/3"].has_nan = true;

  ASSERT_EQ(Load({.path = "/m/3"}).status().code(), kInvalid);

  EXPECT_TRUE(versions_->Rollback().ok());
  EXPECT_EQ(ScoredBy(), 1U);
}

TEST_F(HeadVersionsFaultTest, EnginesThatCannotBeMadeChangeNothing) {
  Make();
  on_create_ = [](const HeadWeights&) { return absl::ResourceExhaustedError("gpu0: no memory"); };

  const absl::Status status = Load({.path = "/m/2", .commit = true}).status();

  EXPECT_EQ(status.code(), kExhausted);
  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, StagingMemoryThatIsNotThereChangesNothing) {
  Make();
  staging_bytes_max_ = 0;

  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kExhausted);

  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, ALoadThatIsGivenUpLeavesItsStagingToTheNext) {
  staging_bytes_max_ = 0;
  MakeWithSpareStaging();
  progress_ = [](const WeightsProgress& progress) { return progress.phase != "committing"; };

  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kCancelled);

  EXPECT_EQ(staging_.spare_bytes(), kStagingBytes);
  ExpectUnharmed();
  progress_ = {};
  EXPECT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
}

TEST_F(HeadVersionsFaultTest, StagingOfAnotherDtypeThatIsLeftIsToldOf) {
  MakeWithSpareStaging();
  folders_["/m/2"].dtype = Dtype::kF32;
  progress_ = [](const WeightsProgress& progress) { return progress.phase != "committing"; };

  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kCancelled);

  EXPECT_EQ(staging_.spare_bytes(), 2 * kStagingBytes);
  EXPECT_EQ(num_changes_, 1);
  progress_ = {};
  EXPECT_TRUE(Load({.path = "/m/3"}).ok());
  EXPECT_EQ(staging_.spare_bytes(), 0);
}

TEST_F(HeadVersionsFaultTest, AsksForNoHostMemoryThatSpareStagingHas) {
  constexpr int64_t kLoadBytes = int64_t{64} << 20;
  MakeWithSpareStaging();

  available_ = kLoadBytes + kWeightBytes - 1;
  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kExhausted);
  available_ = kLoadBytes + kWeightBytes;
  EXPECT_TRUE(Load({.path = "/m/2"}).ok());
}

TEST_F(HeadVersionsFaultTest, RowsThatCannotBeReadTheSecondTimeChangeNothing) {
  Make();
  on_create_ = [](const HeadWeights&) { return absl::DataLossError("the file has shrunk"); };

  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kDataLoss);

  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, SaysHowMuchHostMemoryIsMissing) {
  Make();
  available_ = 4'000;

  const absl::Status status = Load({.path = "/m/2"}).status();

  EXPECT_EQ(status.code(), kExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("no room for a second copy: it needs 64.0"), HasSubstr("are missing"),
                    HasSubstr("in_place")));
  EXPECT_EQ(num_created_, 0);
  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, LoadsWithoutACheckWhereTheKernelDoesNotSayWhatIsLeft) {
  Make();
  available_ = absl::UnavailableError("no /proc");

  EXPECT_TRUE(Load({.path = "/m/2"}).ok());
}

TEST_F(HeadVersionsFaultTest, NoRoomOnTheGpusForASecondCopyIsSaid) {
  Make();
  plan_ = [](int64_t freed_bytes) {
    EXPECT_EQ(freed_bytes, 0);
    return absl::FailedPreconditionError("gpu0 has 1 GiB free, needs 2 GiB");
  };

  const absl::Status status = Load({.path = "/m/2"}).status();

  EXPECT_EQ(status.code(), kExhausted);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("no room for a second copy: gpu0 has 1 GiB free"), HasSubstr("in_place")));
  ExpectUnharmed();
}

// Two heads were loaded at once, each into the same free memory.
TEST_F(HeadVersionsFaultTest, WaitsWhileAnotherHeadIsLoadedAndCanBeGivenUpMeanwhile) {
  Make();
  std::optional<LoadTurn::Holder> other = load_turn_.Take(absl::ZeroDuration());
  ASSERT_TRUE(other.has_value());
  int num_told = 0;
  progress_ = [&](const WeightsProgress& progress) {
    EXPECT_EQ(progress.phase, "checking");
    return ++num_told < 2;
  };
  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kCancelled);
  ExpectUnharmed();

  progress_ = [&](const WeightsProgress&) {
    other.reset();  // as the other load ends
    return true;
  };

  EXPECT_TRUE(Load({.path = "/m/2"}).ok());
  EXPECT_TRUE(load_turn_.Take(absl::ZeroDuration()).has_value());
}

TEST_F(HeadVersionsFaultTest, CountsTheRoomThatThePreviousVersionGives) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  plan_ = [](int64_t freed_bytes) -> absl::StatusOr<EnginePlan> {
    if (freed_bytes < kWeightBytes) {
      return absl::FailedPreconditionError("gpu0 is full");
    }
    return PlanOf(3);
  };

  ASSERT_TRUE(Load({.path = "/m/3", .commit = true}).ok());

  EXPECT_EQ(ScoredBy(), 3U);
}

TEST_F(HeadVersionsFaultTest, AnotherDtypeThatTheEngineCannotHaveIsItsOwnError) {
  Make();
  folders_["/m/2"].dtype = Dtype::kF32;
  plan_ = [](int64_t) { return absl::FailedPreconditionError("no engine for f32"); };

  const absl::Status status = Load({.path = "/m/2"}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "no engine for f32");
  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, CancelledInAnyPhaseItChangesNothing) {
  Make();
  int64_t num_cancelled = 0;
  for (const std::string phase : {"checking", "verifying", "loading", "committing"}) {
    progress_ = [&](const WeightsProgress& progress) { return progress.phase != phase; };

    EXPECT_EQ(Load({.path = "/m/2", .commit = true}).status().code(), kCancelled) << phase;

    ExpectUnharmed();
    EXPECT_EQ(NumSwaps("cancelled"), std::to_string(++num_cancelled));
  }
  progress_ = {};
  EXPECT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
}

TEST_F(HeadVersionsFaultTest, CancelledWhileItReadsItStopsReading) {
  Make();
  bool is_reading = false;
  on_create_ = [&](const HeadWeights& weights) {
    std::vector<std::byte> row(kHidden * 2);
    absl::Status read;
    while (read.ok()) {  // for ever, were it not told
      read = weights.ReadRows(0, 1, row.data(), kHidden * 2);
    }
    is_reading = true;
    return read;
  };
  progress_ = [](const WeightsProgress& progress) { return progress.phase != "loading"; };

  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kCancelled);

  EXPECT_TRUE(is_reading);
  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, StoppedInAnyPhaseItChangesNothing) {
  for (const std::string phase : {"checking", "verifying", "loading"}) {
    Make();
    progress_ = [&](const WeightsProgress& progress) {
      if (progress.phase == phase) {
        versions_->Stop();
      }
      return true;
    };

    EXPECT_EQ(Load({.path = "/m/2", .commit = true}).status().code(), kUnavailable) << phase;

    ExpectUnharmed();
    versions_ = nullptr;
  }
  EXPECT_EQ(NumSwaps("cancelled"), "3");
}

}  // namespace
}  // namespace logprobd::testing
