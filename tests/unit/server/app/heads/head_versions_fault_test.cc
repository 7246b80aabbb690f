#include <gmock/gmock.h>

#include <optional>
#include <string>
#include <vector>

#include "server/app/heads/head_versions.h"
#include "tests/unit/server/app/heads/head_versions_fixture.h"

// A change that fails or is cancelled leaves the live version unchanged.

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
      {{.hidden_size = 8},
       "",
       kInvalid,
       "hidden_size: the folder's head has 8, but the live one has 4"},
      {{.vocab_size = 999}, "", kInvalid, "vocab_size: the folder's head has 999"},
      // Regression: fp32 weights were replaced by bf16 ones as if they had the same shape.
      {{.dtype = Dtype::kF32},
       "",
       kInvalid,
       "dtype: the folder's head has f32, but the live one has bf16; only a restart can change it"},
      {{}, std::string(64, 'a'), kDataLoss, "expects aaaa"},
      {{}, "abc", kInvalid, "64 hexadecimal digits"},
      {{}, std::string(64, 'g'), kInvalid, "64 hexadecimal digits"},
      {{.has_nan = true}, "", kInvalid, "row 0 column 0 is NaN or Inf; set allow_nonfinite"},
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

TEST_F(HeadVersionsFaultTest, LoadsNothingWithoutAnAllowedRoot) {
  load_.model.roots = nullptr;
  Make();

  const absl::Status status = Load({.path = "/m/2"}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("--weights-root"));
  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, AcceptsADigestInUpperCase) {
  Make();
  std::string sha256 = Load({.path = "/m/2"})->sha256;
  ASSERT_TRUE(versions_->Discard(true, false).ok());
  for (char& digit : sha256) {
    digit = static_cast<char>(std::toupper(digit));
  }

  EXPECT_TRUE(Load({.path = "/m/2", .sha256 = sha256}).ok());
}

TEST_F(HeadVersionsFaultTest, LoadsNonfiniteWeightsIfThatIsAllowed) {
  Make();
  folders_["/m/2"].has_nan = true;

  EXPECT_TRUE(Load({.path = "/m/2", .commit = true, .allow_nonfinite = true}).ok());

  EXPECT_EQ(ScoredBy(), 2U);
}

TEST_F(HeadVersionsFaultTest, KeepsThePreviousVersionWhenACheckFails) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  folders_["/m/3"].has_nan = true;

  ASSERT_EQ(Load({.path = "/m/3"}).status().code(), kInvalid);

  EXPECT_TRUE(versions_->Rollback().ok());
  EXPECT_EQ(ScoredBy(), 1U);
}

TEST_F(HeadVersionsFaultTest, ChangesNothingWhenEnginesCannotBeMade) {
  Make();
  on_create_ = [](const HeadWeights&) { return absl::ResourceExhaustedError("gpu0: no memory"); };

  const absl::Status status = Load({.path = "/m/2", .commit = true}).status();

  EXPECT_EQ(status.code(), kExhausted);
  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, ChangesNothingWhenStagingMemoryIsMissing) {
  Make();
  staging_bytes_max_ = 0;

  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kExhausted);

  ExpectUnharmed();
}

TEST_F(HeadVersionsFaultTest, ReusesTheStagingOfACancelledLoad) {
  staging_bytes_max_ = 0;
  MakeWithSpareStaging();
  progress_ = [](const WeightsProgress& progress) { return progress.phase != "committing"; };

  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kCancelled);

  EXPECT_EQ(staging_.spare_bytes(), kStagingBytes);
  ExpectUnharmed();
  progress_ = {};
  EXPECT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
}

TEST_F(HeadVersionsFaultTest, NeedsNoHostMemoryThatSpareStagingProvides) {
  constexpr int64_t kLoadBytes = int64_t{64} << 20;
  MakeWithSpareStaging();

  available_ = kLoadBytes + kWeightBytes - 1;
  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kExhausted);
  available_ = kLoadBytes + kWeightBytes;
  EXPECT_TRUE(Load({.path = "/m/2"}).ok());
}

TEST_F(HeadVersionsFaultTest, ChangesNothingWhenRowsCannotBeReadAgain) {
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

TEST_F(HeadVersionsFaultTest, LoadsWithoutACheckIfFreeHostMemoryIsUnknown) {
  Make();
  available_ = absl::UnavailableError("no /proc");

  EXPECT_TRUE(Load({.path = "/m/2"}).ok());
}

TEST_F(HeadVersionsFaultTest, SaysThatTheGpusHaveNoRoomForASecondCopy) {
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

// Regression: two heads were loaded at the same time, each into the same free memory.
TEST_F(HeadVersionsFaultTest, WaitsWhileAnotherHeadIsLoadedAndCanBeCancelledMeanwhile) {
  Make();
  std::optional<LoadTurn::Holder> other = load_turn_.Take(absl::ZeroDuration());
  ASSERT_TRUE(other.has_value());
  int num_reports = 0;
  progress_ = [&](const WeightsProgress& progress) {
    EXPECT_EQ(progress.phase, "checking");
    return ++num_reports < 2;
  };
  EXPECT_EQ(Load({.path = "/m/2"}).status().code(), kCancelled);
  ExpectUnharmed();

  progress_ = [&](const WeightsProgress&) {
    other.reset();  // the other load ends
    return true;
  };

  EXPECT_TRUE(Load({.path = "/m/2"}).ok());
  EXPECT_TRUE(load_turn_.Take(absl::ZeroDuration()).has_value());
}

TEST_F(HeadVersionsFaultTest, CountsTheMemoryThatThePreviousVersionFrees) {
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

TEST_F(HeadVersionsFaultTest, ChangesNothingWhenCancelledInAnyPhase) {
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

TEST_F(HeadVersionsFaultTest, StopsReadingWhenCancelled) {
  Make();
  bool is_reading = false;
  on_create_ = [&](const HeadWeights& weights) {
    std::vector<std::byte> row(kHidden * 2);
    absl::Status read;
    while (read.ok()) {  // ends only because the load is cancelled
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

TEST_F(HeadVersionsFaultTest, ChangesNothingWhenStoppedInAnyPhase) {
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
