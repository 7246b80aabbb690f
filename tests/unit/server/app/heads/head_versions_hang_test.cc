#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <optional>
#include <string>

#include "absl/synchronization/notification.h"
#include "server/app/heads/head_versions.h"
#include "server/app/heads/version_releaser.h"
#include "tests/support/fake_clock.h"
#include "tests/unit/server/app/heads/head_versions_fixture.h"

// A replica that does not end its work holds up neither the loads of other heads nor, for long, the
// calls of its own head.

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kUnavailable = absl::StatusCode::kUnavailable;

class HeadVersionsHangTest : public HeadVersionsTest {
 protected:
  HeadVersionsHangTest() {
    options_.clock = &clock_;
    head_clock_ = &clock_;
  }
  ~HeadVersionsHangTest() override {
    end_.Notify();
    versions_ = nullptr;  // joins the threads that wait for end_
    head_ = nullptr;
  }

  std::future<absl::Status> LoadSoon(const WeightsLoad& load) {
    return std::async(std::launch::async, [this, load] { return Load(load).status(); });
  }

  /// Waits until a call waits for a version to be destroyed, and lets the time for that pass.
  void LetTheWaitEnd() {
    clock_.WaitForWaiter(clock_.Now() + VersionReleaser::kWaitMax);
    clock_.Advance(VersionReleaser::kWaitMax - absl::Milliseconds(1));
    clock_.WaitUntilAsleep();  // it is still waiting
    clock_.Advance(absl::Milliseconds(1));
  }

  /// Submits a request that stays in flight until Release is called for the engine of version 1.
  void HoldABatch(absl::Notification& answered) {
    engines_[1]->Hold();
    const auto on_answer = [&](const absl::StatusOr<ScoreResult>&) { answered.Notify(); };
    ASSERT_TRUE(head_->Submit(RequestOfRows(1), on_answer).ok());
    engines_[1]->WaitUntilInFlight(1);
  }

  /// Waits until a call waits for the last batch of a version, which keeps the turn to load, and
  /// lets so much time pass that the call gives the turn up. Returns the turn.
  std::optional<LoadTurn::Holder> LetTheBatchTakeLong() {
    clock_.WaitForWaiter(clock_.Now() + InProcessHead::kRetireTimeMax);
    EXPECT_FALSE(IsTurnFree());  // a load of another head would make the requests wait longer
    clock_.Advance(InProcessHead::kRetireTimeMax);
    std::optional<LoadTurn::Holder> turn = load_turn_.Take(absl::Seconds(20));
    EXPECT_TRUE(turn.has_value());
    return turn;
  }

  bool IsTurnFree() { return load_turn_.Take(absl::ZeroDuration()).has_value(); }

  FakeClock clock_;
  absl::Notification end_;  ///< Lets the destructors of engines end.
};

// Regression: the commit of a load kept the turn to load of all heads until the last batch ended.
TEST_F(HeadVersionsHangTest, ACommitThatWaitsForABatchLeavesTheTurnToOthers) {
  Make();
  absl::Notification answered;
  HoldABatch(answered);
  absl::Notification has_turn;
  on_create_ = [&](const HeadWeights&) {
    has_turn.Notify();
    return absl::OkStatus();
  };

  std::future<absl::Status> loaded = LoadSoon({.path = "/m/2", .commit = true});
  has_turn.WaitForNotification();
  EXPECT_TRUE(load_turn_.Take(absl::Seconds(20)).has_value());

  EXPECT_FALSE(answered.HasBeenNotified());
  EXPECT_EQ(loaded.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  engines_[1]->Release();
  EXPECT_TRUE(loaded.get().ok());
  EXPECT_EQ(ScoredBy(), 2U);
}

// Regression: a replacement in place kept the turn during that wait, however long.
TEST_F(HeadVersionsHangTest, AReplacementInPlaceThatWaitsLongForABatchLeavesTheTurnToOthers) {
  Make();
  absl::Notification answered;
  HoldABatch(answered);

  std::future<absl::Status> loaded = LoadSoon({.path = "/m/2", .in_place = true});
  LetTheBatchTakeLong();

  EXPECT_FALSE(answered.HasBeenNotified());
  EXPECT_EQ(num_created_, 0);
  engines_[1]->Release();
  EXPECT_TRUE(loaded.get().ok());
  EXPECT_EQ(ScoredBy(), 2U);
}

// Regression: no version was live until the load of the other head had ended.
TEST_F(HeadVersionsHangTest, AReplacementInPlaceKeepsTheOldVersionIfOthersLoadMeanwhile) {
  Make();
  absl::Notification answered;
  HoldABatch(answered);

  std::future<absl::Status> loaded = LoadSoon({.path = "/m/2", .in_place = true});
  std::optional<LoadTurn::Holder> turn_of_another = LetTheBatchTakeLong();
  engines_[1]->Release();
  const absl::Status status = loaded.get();

  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the old version is live again"));
  EXPECT_EQ(num_created_, 0);
  ExpectUnharmed();
  turn_of_another.reset();
  EXPECT_TRUE(Load({.path = "/m/2", .in_place = true}).ok());
}

TEST_F(HeadVersionsHangTest, AReplacementInPlaceKeepsTheOldVersionIfOthersTookTheMemoryMeanwhile) {
  Make();
  absl::Notification answered;
  HoldABatch(answered);
  std::atomic<int> num_plans = 0;
  plan_ = [&](int64_t freed_bytes) -> absl::StatusOr<EnginePlan> {
    EXPECT_GE(freed_bytes, kWeightBytes);
    if (++num_plans == 2) {
      return absl::FailedPreconditionError("gpu0 is full");
    }
    return PlanOf(2);
  };

  std::future<absl::Status> loaded = LoadSoon({.path = "/m/2", .in_place = true});
  LetTheBatchTakeLong();
  engines_[1]->Release();
  const absl::Status status = loaded.get();

  EXPECT_EQ(num_plans, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(num_created_, 0);
  ExpectUnharmed();
}

// Regression: a load waited without end, with the turn, for the engines of the previous version.
TEST_F(HeadVersionsHangTest, ALoadWaitsABoundedTimeForThePreviousVersion) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  engines_[1]->BlockDestructor(end_);

  std::future<absl::Status> loaded = LoadSoon({.path = "/m/3"});
  LetTheWaitEnd();
  const absl::Status status = loaded.get();

  EXPECT_EQ(status.code(), kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("does not end its work"), HasSubstr("restart the server")));
  EXPECT_TRUE(IsTurnFree());
  EXPECT_EQ(TotalBytes(versions_->memory(), "host"), kWeightBytes + kStagingBytes);
  EXPECT_EQ(ScoredBy(), 2U);
  EXPECT_FALSE(versions_->List().previous.has_value());
  // There is room for a third version, so that another load does not need the memory.
  EXPECT_TRUE(Load({.path = "/m/3", .commit = true}).ok());
  EXPECT_EQ(ScoredBy(), 3U);
}

TEST_F(HeadVersionsHangTest, AReplacementInPlaceFailsIfTheOldVersionIsNotReleased) {
  Make();
  engines_[1]->BlockDestructor(end_);

  std::future<absl::Status> loaded = LoadSoon({.path = "/m/2", .in_place = true});
  LetTheWaitEnd();

  EXPECT_EQ(loaded.get().code(), kUnavailable);
  EXPECT_TRUE(IsTurnFree());
  EXPECT_EQ(num_created_, 0);
  EXPECT_FALSE(head_->ready());
  EXPECT_THAT(head_->failure(), HasSubstr("restart the server"));
  EXPECT_EQ(ScoredBy(), 0U);
  EXPECT_EQ(refusal_.code(), kUnavailable);
  EXPECT_TRUE(Load({.path = "/m/2", .in_place = true}).ok());  // if there is room after all
  EXPECT_EQ(ScoredBy(), 2U);
}

TEST_F(HeadVersionsHangTest, AReplacementInPlaceKeepsTheLiveVersionIfThePreviousOneIsNotReleased) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2", .commit = true}).ok());
  engines_[1]->BlockDestructor(end_);
  num_created_ = 0;

  std::future<absl::Status> loaded = LoadSoon({.path = "/m/3", .in_place = true});
  LetTheWaitEnd();

  EXPECT_EQ(loaded.get().code(), kUnavailable);
  EXPECT_TRUE(IsTurnFree());
  EXPECT_EQ(num_created_, 0);
  EXPECT_TRUE(head_->ready());
  EXPECT_EQ(ScoredBy(), 2U);
  EXPECT_EQ(versions_->List().live.version, 2U);
}

TEST_F(HeadVersionsHangTest, ADiscardWaitsABoundedTime) {
  Make();
  ASSERT_TRUE(Load({.path = "/m/2"}).ok());
  engines_[2]->BlockDestructor(end_);
  EXPECT_FALSE(versions_->is_releasing());

  std::future<bool> discarded = std::async(std::launch::async, [this] {
    return versions_->Discard(/*staged=*/true, /*previous=*/false).ok();
  });
  LetTheWaitEnd();

  EXPECT_TRUE(discarded.get());
  EXPECT_TRUE(versions_->is_releasing());  // so that a stop does not wait for the destructor
  EXPECT_EQ(TotalBytes(versions_->memory(), "host"), kWeightBytes + kStagingBytes);
  EXPECT_EQ(ScoredBy(), 1U);
}

}  // namespace
}  // namespace logprobd::testing
