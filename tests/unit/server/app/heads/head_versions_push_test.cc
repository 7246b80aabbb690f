// Pushes of rows to a head that serves.

#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "tests/support/fake_clock.h"
#include "tests/unit/server/app/heads/head_versions_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHalf = 500;

class HeadVersionsPushTest : public HeadVersionsTest {
 protected:
  HeadVersionsPushTest() {
    const auto made = MakeRandomHead({.vocab_size = kVocab, .hidden_size = kHidden, .seed = 7});
    bytes_.assign(made->weight(), made->weight() + kWeightBytes);
    Make();
  }

  /// Returns rows [begin, end) of the pushed weight.
  PushedRows Rows(int64_t begin, int64_t end) const {
    return {.row_begin = begin,
            .num_rows = end - begin,
            .is_bias = false,
            .pieces = {absl::MakeConstSpan(bytes_).subspan(
                static_cast<size_t>(begin * kHidden * 2),
                static_cast<size_t>((end - begin) * kHidden * 2))}};
  }

  /// Pushes `rows` in one call, which then ends with `end`.
  absl::StatusOr<PushedWeightsResult> Push(const WeightsPush& push, std::vector<PushedRows> rows,
                                           const absl::Status& end = absl::OkStatus()) {
    size_t next = 0;
    return versions_->Push(
        push,
        [&]() -> absl::StatusOr<std::optional<PushedRows>> {
          if (next == rows.size()) {
            LOGPROBD_RETURN_IF_ERROR(end);
            return std::nullopt;
          }
          return rows[next++];
        },
        progress_);
  }

  std::vector<std::byte> bytes_;
};

TEST_F(HeadVersionsPushTest, TheCallThatSendsTheLastMissingRowStagesTheVersion) {
  const auto first = Push({.version = 5}, {Rows(0, kHalf)});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->staged.has_value());
  EXPECT_EQ(first->pushed.rows, kHalf);
  EXPECT_EQ(first->pushed.vocab_rows, kVocab);
  EXPECT_EQ(versions_->List().pushed->rows, kHalf);
  EXPECT_EQ(TotalBytes(versions_->memory(), "host"), kWeightBytes);

  const auto last = Push({.version = 5}, {Rows(kHalf, kVocab)});

  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(last->staged->version, 5U);
  EXPECT_EQ(last->staged->source, "pushed");
  EXPECT_EQ(last->staged->weight_bytes, kWeightBytes);
  EXPECT_EQ(ScoredBy(), 1U);
  const HeadWeightsState state = versions_->List();
  EXPECT_FALSE(state.pushed.has_value());
  EXPECT_EQ(state.staged->sha256, last->staged->sha256);
  // The rows and the engine's copy.
  EXPECT_EQ(TotalBytes(versions_->memory(), "host"), 2 * kWeightBytes + kStagingBytes);
  ASSERT_TRUE(versions_->Commit(5).ok());
  EXPECT_EQ(ScoredBy(), 5U);
}

TEST_F(HeadVersionsPushTest, APushedVersionHasTheDigestOfTheSameRowsInAFolder) {
  folders_["/m/7"] = {.seed = 7};
  const auto loaded = Load({.path = "/m/7"});
  ASSERT_TRUE(loaded.ok());
  ASSERT_TRUE(versions_->Discard(true, false).ok());

  const auto pushed = Push({.version = 9, .sha256 = loaded->sha256}, {Rows(0, kVocab)});

  ASSERT_TRUE(pushed.ok()) << pushed.status();
  EXPECT_EQ(pushed->staged->sha256, loaded->sha256);
}

TEST_F(HeadVersionsPushTest, KeepsTheRowsOfACallThatFails) {
  EXPECT_EQ(Push({.version = 2}, {Rows(0, kHalf)}, absl::CancelledError("gone")).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(versions_->List().pushed->rows, kHalf);

  EXPECT_EQ(Push({.version = 2}, {Rows(kHalf, kVocab)})->staged->version, 2U);
}

TEST_F(HeadVersionsPushTest, ACallThatFailsAfterTheLastRowLeavesTheStagingToTheNext) {
  EXPECT_FALSE(Push({.version = 2}, {Rows(0, kVocab)}, absl::CancelledError("gone")).ok());
  EXPECT_FALSE(versions_->List().staged.has_value());

  EXPECT_EQ(Push({.version = 2}, {})->staged->version, 2U);
}

TEST_F(HeadVersionsPushTest, DropsRowsOfWhichTheContentIsRefused) {
  EXPECT_EQ(Push({.version = 2, .sha256 = std::string(64, '0')}, {Rows(0, kVocab)}).status().code(),
            absl::StatusCode::kDataLoss);
  ExpectUnharmed();
  bytes_[10] = bytes_[11] = std::byte{0xFF};
  const auto nan = Push({.version = 2}, {Rows(0, kVocab)});
  EXPECT_EQ(nan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(nan.status().message(), HasSubstr("row 1 column 1 is NaN or Inf"));
  ExpectUnharmed();
  EXPECT_EQ(NumSwaps("failed"), "2");

  EXPECT_TRUE(Push({.version = 2, .allow_nonfinite = true}, {Rows(0, kVocab)}).ok());
}

TEST_F(HeadVersionsPushTest, StagingIsTriedAgainWhenItsCauseHasEnded) {
  plan_ = [](int64_t) { return absl::ResourceExhaustedError("1 KiB is missing"); };
  EXPECT_EQ(Push({.version = 2}, {Rows(0, kVocab)}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(versions_->List().pushed->rows, kVocab);
  plan_ = nullptr;

  EXPECT_EQ(Push({.version = 2}, {})->staged->version, 2U);
}

TEST_F(HeadVersionsPushTest, AnotherVersionReplacesRowsThatNobodyIsSending) {
  ASSERT_TRUE(Push({.version = 2}, {Rows(0, kHalf)}).ok());

  const auto next = Push({.version = 3}, {Rows(0, 1)});

  EXPECT_EQ(next->pushed.rows, 1);
  EXPECT_EQ(versions_->List().pushed->version, 3U);
  EXPECT_EQ(TotalBytes(versions_->memory(), "host"), kWeightBytes);
}

TEST_F(HeadVersionsPushTest, AnotherVersionWaitsWhileRowsAreBeingSent) {
  absl::Status refused;
  const auto next = [&]() -> absl::StatusOr<std::optional<PushedRows>> {
    refused = Push({.version = 3}, {Rows(0, 1)}).status();
    return std::nullopt;
  };

  ASSERT_TRUE(versions_->Push({.version = 2}, next, progress_).ok());

  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(refused.message(), HasSubstr("rows of version 2 are being received"));
}

TEST_F(HeadVersionsPushTest, DiscardDropsTheRowsAndEndsTheCallsThatSendThem) {
  ASSERT_TRUE(Push({.version = 2}, {Rows(0, kHalf)}).ok());
  const auto next = [&]() -> absl::StatusOr<std::optional<PushedRows>> {
    EXPECT_TRUE(versions_->Discard(true, false).ok());
    return std::nullopt;
  };

  EXPECT_EQ(versions_->Push({.version = 2}, next, progress_).status().code(),
            absl::StatusCode::kAborted);

  ExpectUnharmed();
}

// Regression: the rows were staged although the discard had returned OK.
TEST_F(HeadVersionsPushTest, RowsThatAreDiscardedBeforeTheirStagingBeginsAreNotStaged) {
  bool is_received = false;
  bool is_discarded = false;
  const auto next = [&]() -> absl::StatusOr<std::optional<PushedRows>> {
    if (std::exchange(is_received, true)) {
      return std::nullopt;
    }
    return Rows(0, kVocab);
  };
  const LoadTicker::Progress progress = [&](const WeightsProgress&) {
    if (is_received && !std::exchange(is_discarded, true)) {
      EXPECT_TRUE(versions_->Discard(true, false).ok());
    }
    return true;
  };

  const absl::Status pushed = versions_->Push({.version = 2}, next, progress).status();

  EXPECT_TRUE(is_discarded);
  EXPECT_EQ(pushed.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(pushed.message(), HasSubstr("were discarded"));
  EXPECT_EQ(num_created_, 0);
  ExpectUnharmed();
  EXPECT_EQ(Push({.version = 2}, {Rows(0, kVocab)})->staged->version, 2U);
}

TEST_F(HeadVersionsPushTest, ACallThatIsCancelledBeforeTheStagingLeavesItToTheNext) {
  bool is_received = false;
  const auto next = [&]() -> absl::StatusOr<std::optional<PushedRows>> {
    if (std::exchange(is_received, true)) {
      return std::nullopt;
    }
    return Rows(0, kVocab);
  };
  const LoadTicker::Progress progress = [&](const WeightsProgress&) { return !is_received; };

  EXPECT_EQ(versions_->Push({.version = 2}, next, progress).status().code(),
            absl::StatusCode::kCancelled);

  EXPECT_EQ(Push({.version = 2}, {})->staged->version, 2U);
}

// Regression: errors and logs named a path "the pushed rows".
TEST_F(HeadVersionsPushTest, ErrorsNameTheSourceOfTheRows) {
  const absl::Status refused =
      Push({.version = 2, .sha256 = std::string(64, '0')}, {Rows(0, kVocab)}).status();

  EXPECT_THAT(refused.message(), HasSubstr("sha256: the head (source: pushed) has "));
}

TEST_F(HeadVersionsPushTest, RefusesHeadersThatDoNotFit) {
  const auto code_of = [&](const WeightsPush& push) { return Push(push, {}).status().code(); };
  EXPECT_EQ(code_of({.version = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({.version = 1}), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(code_of({.version = 2, .sha256 = "00"}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({.version = 2, .dtype = Dtype::kF16}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({.version = 2, .vocab_rows = kVocab - 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of({.version = 2, .vocab_rows = kVocab + (1 << 16) + 1}),
            absl::StatusCode::kInvalidArgument);
  ExpectUnharmed();
  ASSERT_TRUE(Push({.version = 2, .vocab_rows = kVocab + (1 << 16)}, {}).ok());
  EXPECT_EQ(code_of({.version = 2}), absl::StatusCode::kInvalidArgument);  // not the first's
  ASSERT_TRUE(Push({.version = 3}, {Rows(0, kVocab)}).ok());
  EXPECT_EQ(code_of({.version = 4}), absl::StatusCode::kFailedPrecondition);  // 3 is staged
}

// Regression: rows in fp32 made a bf16 head an fp32 head, of twice the size.
TEST_F(HeadVersionsPushTest, RefusesRowsOfAnotherDtypeThanThatOfTheLiveVersion) {
  const absl::Status refused = Push({.version = 2, .dtype = Dtype::kF32}, {}).status();

  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("dtype: f32, must be bf16"));
  ExpectUnharmed();
}

// Regression: a number below the live one was accepted, so that a newer version had a lower number.
TEST_F(HeadVersionsPushTest, RefusesANumberBelowTheLiveOneBeforeItTakesMemory) {
  ASSERT_TRUE(Load({.path = "/m/2", .version = 7, .commit = true}).ok());
  available_ = 0;

  const absl::Status refused = Push({.version = 3}, {}).status();

  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(refused.message(), HasSubstr("version: 3, must be above 7, which is live"));
}

TEST_F(HeadVersionsPushTest, DropsTheRowsIfAHigherNumberIsLiveBeforeTheirLast) {
  ASSERT_TRUE(Push({.version = 3}, {Rows(0, kHalf)}).ok());
  ASSERT_TRUE(Load({.path = "/m/2", .version = 7, .commit = true}).ok());
  ASSERT_TRUE(versions_->List().pushed.has_value());

  const absl::Status refused = Push({.version = 3}, {Rows(kHalf, kVocab)}).status();

  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ScoredBy(), 7U);
}

TEST_F(HeadVersionsPushTest, RefusesPushesIfLoadingIsOffOrMemoryIsMissing) {
  available_ = kWeightBytes - 1;
  const auto full = Push({.version = 2}, {});
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(full.status().message(), HasSubstr("1 B are missing"));
  load_.model.roots = nullptr;
  Make();
  EXPECT_EQ(Push({.version = 2}, {}).status().code(), absl::StatusCode::kPermissionDenied);
  versions_->Stop();
  EXPECT_EQ(Push({.version = 2}, {}).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(HeadVersionsPushTest, RowsOfTheStagedVersionSentAgainAreAnsweredWithIt) {
  const auto staged = Push({.version = 2}, {Rows(0, kVocab)});
  ASSERT_TRUE(staged.ok());

  for (const auto& [push, rows] : std::vector<std::pair<WeightsPush, std::vector<PushedRows>>>{
           {{.version = 2}, {Rows(0, kVocab)}},
           {{.version = 2}, {Rows(kHalf, kVocab)}},
           {{.version = 2, .vocab_rows = kVocab, .sha256 = staged->staged->sha256}, {}}}) {
    const auto again = Push(push, rows);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->staged->sha256, staged->staged->sha256);
    EXPECT_EQ(again->pushed.rows, kVocab);
  }
  EXPECT_EQ(num_created_, 1);
  EXPECT_FALSE(versions_->List().pushed.has_value());
  EXPECT_TRUE(versions_->Commit(2).ok());
}

TEST_F(HeadVersionsPushTest, OtherRowsOfTheStagedVersionAreRefused) {
  ASSERT_TRUE(Push({.version = 2}, {Rows(0, kVocab)}).ok());
  bytes_[0] ^= std::byte{1};

  for (const auto& [push, text] : std::vector<std::pair<WeightsPush, std::string>>{
           {{.version = 2}, "rows 0 to 1000 differ"},
           {{.version = 2, .vocab_rows = kVocab + 1}, "vocab_rows differs"},
           {{.version = 2, .sha256 = std::string(64, '0')}, "sha256 differs"}}) {
    const absl::Status refused = Push(push, {Rows(0, kVocab)}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(refused.message(), HasSubstr("version 2 is staged with other weights"));
    EXPECT_THAT(refused.message(), HasSubstr(text));
  }
  EXPECT_EQ(Push({.version = 2}, {Rows(1, kVocab)})->staged->version, 2U);
}

TEST_F(HeadVersionsPushTest, AStagedVersionOfAFolderAcceptsNoRows) {
  ASSERT_TRUE(Load({.path = "/m/2", .version = 2}).ok());

  EXPECT_EQ(Push({.version = 2}, {Rows(0, kVocab)}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(HeadVersionsPushTest, ACallThatBeginsDuringTheStagingIsAnsweredWithItsResult) {
  absl::StatusOr<PushedWeightsResult> late;
  std::thread call;
  on_create_ = [&](const HeadWeights&) {
    absl::Notification has_begun;
    const LoadTicker::Progress progress = [&](const WeightsProgress&) {
      if (!has_begun.HasBeenNotified()) {
        has_begun.Notify();
      }
      return true;
    };
    call = std::thread([&, progress] {
      late = versions_->Push(
          {.version = 2}, [] { return std::nullopt; }, progress);
    });
    has_begun.WaitForNotification();
    on_create_ = nullptr;
    return absl::OkStatus();
  };

  const auto staged = Push({.version = 2}, {Rows(0, kVocab)});

  call.join();
  ASSERT_TRUE(staged.ok()) << staged.status();
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_EQ(late->staged->sha256, staged->staged->sha256);
}

TEST_F(HeadVersionsPushTest, ANumberThatWasLiveIsRefusedBeforeRowsAreSent) {
  const auto first = Push({.version = 2}, {Rows(0, kVocab)});
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(versions_->Commit(2).ok());
  ASSERT_TRUE(versions_->Rollback().ok());
  ASSERT_TRUE(versions_->Discard(false, true).ok());  // version 2 is nowhere any more
  const auto next = []() -> absl::StatusOr<std::optional<PushedRows>> {
    ADD_FAILURE() << "rows were asked for";
    return std::nullopt;
  };

  for (const std::string& sha256 : {std::string(), std::string(64, '0')}) {
    const absl::Status refused =
        versions_->Push({.version = 2, .sha256 = sha256}, next, progress_).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(refused.message(), HasSubstr("the next free number is 3"));
  }

  ExpectUnharmed();
  EXPECT_EQ(versions_->List().highest_version, 2U);
  const std::string sha256 = absl::AsciiStrToUpper(first->staged->sha256);
  EXPECT_TRUE(Push({.version = 2, .sha256 = sha256}, {Rows(0, kVocab)}).ok());
}

TEST_F(HeadVersionsPushTest, DropsTheRowsIfTheirNumberIsTakenMeanwhile) {
  ASSERT_FALSE(Push({.version = 2}, {Rows(0, kVocab)}, absl::CancelledError("gone")).ok());
  const auto next = [&]() -> absl::StatusOr<std::optional<PushedRows>> {
    EXPECT_TRUE(Load({.path = "/m/2", .version = 2, .commit = true}).ok());
    return std::nullopt;
  };

  EXPECT_EQ(versions_->Push({.version = 2}, next, progress_).status().code(),
            absl::StatusCode::kAlreadyExists);

  EXPECT_FALSE(versions_->List().pushed.has_value());
  EXPECT_EQ(versions_->List().live.source, "/m/2");
}

TEST_F(HeadVersionsPushTest, DropsRowsToWhichNoCallAddsForTheIdleTime) {
  FakeClock clock;
  options_.clock = &clock;
  options_.push_idle_max = absl::Minutes(10);
  Make();
  ASSERT_TRUE(Push({.version = 2}, {Rows(0, kHalf)}).ok());
  clock.Advance(absl::Minutes(9));
  const auto next = [&]() -> absl::StatusOr<std::optional<PushedRows>> {
    clock.Advance(absl::Minutes(60));
    versions_->DropIdlePush();
    return std::nullopt;
  };
  EXPECT_EQ(versions_->Push({.version = 2}, next, progress_)->pushed.rows, kHalf);
  clock.Advance(absl::Minutes(10) - absl::Nanoseconds(1));
  versions_->DropIdlePush();
  EXPECT_EQ(versions_->List().pushed->rows, kHalf);
  EXPECT_EQ(NumSwaps("discarded"), "0");
  const int num_changes = num_changes_;

  clock.Advance(absl::Nanoseconds(1));
  versions_->DropIdlePush();

  ExpectUnharmed();
  EXPECT_FALSE(versions_->List().pushed.has_value());
  EXPECT_EQ(NumSwaps("discarded"), "1");
  EXPECT_EQ(num_changes_, num_changes + 1);
}

TEST_F(HeadVersionsPushTest, CountsRowsThatAreReplacedOrDiscarded) {
  ASSERT_TRUE(Push({.version = 2}, {Rows(0, kHalf)}).ok());
  ASSERT_TRUE(Push({.version = 3}, {Rows(0, kHalf)}).ok());
  EXPECT_EQ(NumSwaps("discarded"), "1");

  ASSERT_TRUE(versions_->Discard(true, false).ok());

  EXPECT_EQ(NumSwaps("discarded"), "2");
  ASSERT_TRUE(versions_->Discard(true, false).ok());
  EXPECT_EQ(NumSwaps("discarded"), "2");
}

TEST_F(HeadVersionsPushTest, TakesMemoryInTurnWithLoadsOfOtherHeads) {
  std::optional<LoadTurn::Holder> other = load_turn_.Take(absl::ZeroDuration());
  ASSERT_TRUE(other.has_value());
  progress_ = [](const WeightsProgress&) { return false; };  // the client gives up
  EXPECT_EQ(Push({.version = 2}, {}).status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(versions_->memory().empty());
  progress_ = [&](const WeightsProgress&) {
    other.reset();
    return true;
  };

  EXPECT_EQ(Push({.version = 2}, {Rows(0, kHalf)})->pushed.rows, kHalf);
}

TEST_F(HeadVersionsPushTest, OtherCallsGoOnWhileMemoryIsTaken) {
  parts_.available_host_bytes = [&]() -> absl::StatusOr<int64_t> {
    EXPECT_FALSE(load_turn_.Take(absl::ZeroDuration()).has_value());  // two never take at once
    EXPECT_FALSE(versions_->List().pushed.has_value());
    EXPECT_EQ(Push({.version = 3}, {}).status().code(), absl::StatusCode::kAborted);
    return available_;
  };
  Make();

  EXPECT_EQ(Push({.version = 2}, {Rows(0, kHalf)})->pushed.rows, kHalf);
}

TEST_F(HeadVersionsPushTest, ABadHeaderLeavesTheRowsOfAnotherVersion) {
  ASSERT_TRUE(Push({.version = 2}, {Rows(0, kHalf)}).ok());

  EXPECT_FALSE(Push({.version = 3, .vocab_rows = 1}, {}).ok());

  EXPECT_EQ(versions_->List().pushed->rows, kHalf);
}

TEST_F(HeadVersionsPushTest, CallsAtOnceStageTheVersionOnce) {
  for (uint64_t version = 2; version < 12; ++version) {
    std::vector<std::thread> calls;
    std::atomic<int> num_staged = 0;
    for (int64_t begin = 0; begin < kVocab; begin += 100) {
      calls.emplace_back([&, begin] {
        const auto pushed = Push({.version = version}, {Rows(begin, begin + 100)});
        EXPECT_TRUE(pushed.ok()) << pushed.status();
        num_staged += static_cast<int>(pushed.ok() && pushed->staged.has_value());
      });
    }
    for (std::thread& call : calls) {
      call.join();
    }
    EXPECT_EQ(num_staged, 1);
    ASSERT_TRUE(versions_->Commit(version).ok());
    EXPECT_EQ(ScoredBy(), version);
  }
}

TEST_F(HeadVersionsPushTest, ReplacementInPlaceCountsTheRowsOfTheLiveVersionAsKept) {
  ASSERT_TRUE(Push({.version = 2}, {Rows(0, kVocab)}).ok());
  ASSERT_TRUE(versions_->Commit(2).ok());
  ASSERT_TRUE(versions_->Discard(false, true).ok());
  int64_t freed = 0;
  plan_ = [&](int64_t bytes) {
    freed = bytes;
    return PlanOf(3);
  };

  ASSERT_TRUE(Load({.path = "/m/3", .in_place = true}).ok());

  EXPECT_EQ(freed, kWeightBytes + kStagingBytes);
  EXPECT_EQ(ScoredBy(), 3U);
}

}  // namespace
}  // namespace logprobd::testing
