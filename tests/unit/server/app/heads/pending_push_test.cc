#include "server/app/heads/pending_push.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace logprobd {
namespace {

constexpr int64_t kRows = 2;

class PendingPushTest : public ::testing::Test {
 protected:
  static std::shared_ptr<PushedWeights> MakeRows(uint64_t version) {
    HeadInfo info;
    info.hidden_size = 1;
    info.vocab_size = info.vocab_rows = kRows;
    info.dtype = Dtype::kF32;
    info.weights_version = version;
    info.weight_bytes = kRows * 4;
    return *PushedWeights::Create(info);
  }

  /// Begins a version, whose first call has joined.
  std::shared_ptr<PendingPush::Version> Begin(uint64_t version) {
    auto begun = *push_.Join({.version = version});
    EXPECT_TRUE(push_.EndOpen(begun, MakeRows(version)).ok());
    return begun;
  }

  static void AddAllRows(PendingPush::Version& version) {
    const std::vector<std::byte> bytes(kRows * 4);
    ASSERT_TRUE(version.rows->Add({.row_begin = 0, .num_rows = kRows, .pieces = {bytes}}).ok());
  }

  const absl::Time start_ = absl::UnixEpoch();
  PendingPush push_;
};

TEST_F(PendingPushTest, TheFirstCallTakesTheMemoryWhileOthersWait) {
  const auto first = push_.Join({.version = 2});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ((*first)->rows, nullptr);
  EXPECT_TRUE(push_.is_busy());
  EXPECT_EQ(*push_.Join({.version = 2}), nullptr);
  EXPECT_EQ(push_.Join({.version = 3}).status().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(push_.state().has_value());
  EXPECT_EQ(push_.memory_bytes(), 0);

  ASSERT_TRUE(push_.EndOpen(*first, MakeRows(2)).ok());

  EXPECT_FALSE(push_.is_busy());
  EXPECT_EQ(*push_.Join({.version = 2}), *first);
  EXPECT_EQ(push_.state()->version, 2U);
  EXPECT_EQ(push_.memory_bytes(), kRows * 4);
}

TEST_F(PendingPushTest, AVersionWithoutMemoryIsDropped) {
  EXPECT_EQ(push_.EndOpen(*push_.Join({.version = 2}), absl::ResourceExhaustedError("1 B")).code(),
            absl::StatusCode::kResourceExhausted);

  EXPECT_FALSE(push_.is_busy());
  EXPECT_EQ(push_.Drop(), nullptr);
  EXPECT_EQ((*push_.Join({.version = 3}))->replaced, nullptr);
}

TEST_F(PendingPushTest, AVersionThatIsDroppedBeforeItHasMemoryIsAborted) {
  const auto version = *push_.Join({.version = 2});
  EXPECT_EQ(push_.Drop(), version);
  const auto next = *push_.Join({.version = 3});

  EXPECT_EQ(push_.EndOpen(version, MakeRows(2)).code(), absl::StatusCode::kAborted);

  EXPECT_EQ(version->rows, nullptr);
  EXPECT_EQ(push_.Drop(), next);
}

TEST_F(PendingPushTest, OneCallStagesTheCompleteRows) {
  const auto version = Begin(2);
  ASSERT_EQ(*push_.Join({.version = 2}), version);
  ASSERT_EQ(*push_.Join({.version = 2}), version);
  EXPECT_FALSE(*push_.Leave(version, true, start_));  // rows are missing
  AddAllRows(*version);

  EXPECT_TRUE(*push_.Leave(version, true, start_));
  EXPECT_FALSE(*push_.Leave(version, true, start_));
  EXPECT_EQ(*push_.Join({.version = 2}), nullptr);  // waits

  push_.EndStaging(version, absl::OkStatus(), start_);
  EXPECT_EQ(push_.Drop(), nullptr);
}

TEST_F(PendingPushTest, ACallThatFailsDoesNotStage) {
  const auto version = Begin(2);
  AddAllRows(*version);

  EXPECT_FALSE(*push_.Leave(version, false, start_));

  ASSERT_EQ(*push_.Join({.version = 2}), version);
  EXPECT_TRUE(*push_.Leave(version, true, start_));
}

TEST_F(PendingPushTest, KeepsRowsWhoseStagingMaySucceedLater) {
  using Code = absl::StatusCode;
  for (const auto& [code, keeps] :
       std::vector<std::pair<Code, bool>>{{Code::kResourceExhausted, true},
                                          {Code::kAborted, true},
                                          {Code::kFailedPrecondition, true},
                                          {Code::kCancelled, true},
                                          {Code::kDataLoss, false},
                                          {Code::kInvalidArgument, false},
                                          {Code::kAlreadyExists, false}}) {
    const auto version = Begin(2);
    AddAllRows(*version);
    ASSERT_TRUE(*push_.Leave(version, true, start_));

    push_.EndStaging(version, absl::Status(code, "failed"), start_);

    EXPECT_EQ(push_.Drop(), keeps ? version : nullptr) << code;
  }
}

TEST_F(PendingPushTest, CallsOfADroppedVersionAreAborted) {
  const auto version = Begin(2);
  ASSERT_EQ(*push_.Join({.version = 2}), version);
  EXPECT_EQ(push_.Drop(), version);
  EXPECT_EQ(push_.Leave(version, true, start_).status().code(), absl::StatusCode::kAborted);
  AddAllRows(*version);

  EXPECT_EQ(push_.Leave(version, true, start_).status().code(), absl::StatusCode::kAborted);
}

TEST_F(PendingPushTest, TellsWhetherAVersionWasDroppedBeforeItsStaging) {
  const auto version = Begin(2);
  AddAllRows(*version);
  ASSERT_TRUE(*push_.Leave(version, true, start_));
  EXPECT_TRUE(push_.CheckNotDropped(version).ok());

  EXPECT_EQ(push_.Drop(), version);

  EXPECT_EQ(push_.CheckNotDropped(version).code(), absl::StatusCode::kAborted);
}

TEST_F(PendingPushTest, ACallThatEndsAfterTheStagingSucceeds) {
  const auto version = Begin(2);
  ASSERT_EQ(*push_.Join({.version = 2}), version);
  AddAllRows(*version);
  ASSERT_TRUE(*push_.Leave(version, true, start_));
  push_.EndStaging(version, absl::OkStatus(), start_);

  EXPECT_FALSE(*push_.Leave(version, true, start_));
}

TEST_F(PendingPushTest, AnotherVersionReplacesOneWithoutCalls) {
  const auto version = Begin(2);
  EXPECT_EQ(push_.Join({.version = 3}).status().code(), absl::StatusCode::kAborted);
  ASSERT_FALSE(*push_.Leave(version, true, start_));

  const auto next = push_.Join({.version = 3});

  ASSERT_TRUE(next.ok());
  EXPECT_EQ((*next)->replaced, version);
}

TEST_F(PendingPushTest, RefusesAnotherHeaderOfTheVersion) {
  Begin(2);
  for (const WeightsPush& other :
       std::vector<WeightsPush>{{.version = 2, .dtype = Dtype::kF32},
                                {.version = 2, .vocab_rows = 5},
                                {.version = 2, .sha256 = "0"},
                                {.version = 2, .allow_nonfinite = true}}) {
    EXPECT_EQ(push_.Join(other).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(PendingPushTest, DropsRowsOnlyIfNoCallSendsOrHasSentAnySince) {
  EXPECT_EQ(push_.DropUnusedSince(absl::InfiniteFuture()), nullptr);
  const auto version = Begin(2);
  EXPECT_EQ(push_.DropUnusedSince(absl::InfiniteFuture()), nullptr);
  ASSERT_FALSE(*push_.Leave(version, true, start_ + absl::Seconds(5)));

  EXPECT_EQ(push_.DropUnusedSince(start_ + absl::Seconds(4)), nullptr);

  EXPECT_EQ(push_.DropUnusedSince(start_ + absl::Seconds(5)), version);
  EXPECT_EQ(push_.Drop(), nullptr);
}

TEST_F(PendingPushTest, TheTimeWithoutUseBeginsWithTheEndOfAStaging) {
  const auto version = Begin(2);
  AddAllRows(*version);
  ASSERT_TRUE(*push_.Leave(version, true, start_));

  push_.EndStaging(version, absl::ResourceExhaustedError("full"), start_ + absl::Minutes(5));

  EXPECT_EQ(push_.DropUnusedSince(start_ + absl::Minutes(4)), nullptr);
  EXPECT_EQ(push_.DropUnusedSince(start_ + absl::Minutes(5)), version);
}

TEST_F(PendingPushTest, KeepsRowsThatAreBeingStaged) {
  const auto version = Begin(2);
  AddAllRows(*version);
  ASSERT_TRUE(*push_.Leave(version, true, start_));
  EXPECT_EQ(push_.DropUnusedSince(absl::InfiniteFuture()), nullptr);

  push_.EndStaging(version, absl::AbortedError("another call"), start_);

  EXPECT_EQ(push_.DropUnusedSince(start_), version);
}

}  // namespace
}  // namespace logprobd
