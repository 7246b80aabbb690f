#include "server/batching/version_switch.h"

#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_engine.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;

constexpr absl::Time kNow = absl::FromUnixSeconds(1);

/// Version 1 is live, and version 2 is ready. Each has one replica; batches are pretended.
class VersionSwitchTest : public ::testing::Test {
 protected:
  using Slot = VersionReplicas::Slot;

  void Make(const std::vector<ShardPlace>& layout = {}) {
    for (uint64_t number = 1; number <= 2; ++number) {
      engines_.push_back(std::make_unique<FakeEngine>(
          FakeEngine::Options{.weights_version = number, .layout = layout}));
      versions_.push_back(*VersionReplicas::Create(
          {.batch_rows_max = 4, .batch_wait_max = absl::Seconds(1)}, {engines_.back().get()}));
    }
    switch_ = std::make_unique<VersionSwitch>(*versions_[0]);
  }

  VersionReplicas& Version(uint64_t number) { return *versions_[number - 1]; }

  std::shared_ptr<PendingRequest> Push(int64_t rows, uint64_t pinned_version = 0) {
    auto pending = std::make_shared<PendingRequest>();
    pending->request = RequestOfRows(rows);
    pending->request.weights_version = pinned_version;
    pending->submitted = kNow;
    pending->CountRows();
    switch_->queue().Push(pending);
    return pending;
  }

  /// Takes the rows of a batch of at most `rows` rows for the slot and marks the slot in flight.
  void Launch(Slot* slot, int64_t rows = 4) {
    ASSERT_NE(slot, nullptr);
    switch_->QueueOf(slot->version).Cut({.rows_max = rows, .bulk_rows_max = rows});
    switch_->CountBatch(slot->version);
    slot->state = VersionReplicas::SlotState::kInFlight;
    slot->replica.NoteBegin(kNow);
  }

  static void End(Slot* slot) {
    slot->state = VersionReplicas::SlotState::kFree;
    slot->replica.NoteEnd(kNow);
  }

  std::vector<std::unique_ptr<FakeEngine>> engines_;
  std::vector<std::unique_ptr<VersionReplicas>> versions_;
  std::unique_ptr<VersionSwitch> switch_;
};

TEST_F(VersionSwitchTest, LeavesBegunAndPinnedRequestsToTheRetiringVersionInTheirOrder) {
  Make();
  const auto begun = Push(6);
  Launch(switch_->FindLaunch(kNow));
  const auto other = Push(1);
  const auto pinned = Push(1, 1);

  switch_->Commit(&Version(2));

  EXPECT_THAT(switch_->retiring_queue().Queued(), ElementsAre(begun, pinned));
  EXPECT_THAT(switch_->queue().Queued(), ElementsAre(other));
  EXPECT_EQ(&switch_->QueueOf(Version(1)), &switch_->retiring_queue());
  EXPECT_EQ(&switch_->QueueOf(*pinned), &switch_->retiring_queue());
  EXPECT_EQ(&switch_->QueueOf(Version(2)), &switch_->queue());
  EXPECT_EQ(switch_->live_number(), 2U);
}

TEST_F(VersionSwitchTest, KeepsAVersionUntilItsRowsBatchesAndHoldHaveEnded) {
  Make();
  const auto pinned = Push(1, 1);
  Slot* const slot = switch_->FindLaunch(kNow);
  switch_->Commit(&Version(2));
  EXPECT_FALSE(switch_->IsRetired());

  switch_->Hold(Version(1));
  Launch(slot);
  EXPECT_FALSE(switch_->IsRetired());
  End(slot);
  EXPECT_FALSE(switch_->IsRetired());
  switch_->Unhold();

  EXPECT_TRUE(switch_->IsRetired());
  switch_->ForgetRetired();
  switch_->Commit(&Version(1));
  EXPECT_EQ(switch_->live_number(), 1U);
}

TEST_F(VersionSwitchTest, LaunchesRowsOfTheRetiringVersionFirst) {
  Make();
  Push(1);
  Push(1, 1);
  switch_->Commit(&Version(2));

  Slot* const first = switch_->FindLaunch(kNow);
  Launch(first);
  Slot* const second = switch_->FindLaunch(kNow);

  EXPECT_EQ(&first->version, &Version(1));
  EXPECT_EQ(&second->version, &Version(2));
}

TEST_F(VersionSwitchTest, KeepsTheRowsAndTheNumberWhileNoVersionIsLive) {
  Make();
  Push(1);

  switch_->Commit(nullptr);

  EXPECT_EQ(switch_->live(), nullptr);
  EXPECT_EQ(switch_->live_number(), 1U);
  EXPECT_TRUE(switch_->has_rows());
  EXPECT_EQ(switch_->FindLaunch(kNow), nullptr);
  EXPECT_EQ(switch_->FindUnservable(), nullptr);
  EXPECT_EQ(switch_->LaunchTime(kNow), absl::InfiniteFuture());
}

TEST_F(VersionSwitchTest, WaitsForCompanyOnlyBesideABatchInFlight) {
  Make();
  Push(1);
  EXPECT_EQ(switch_->LaunchTime(kNow), kNow);
  Launch(switch_->FindLaunch(kNow));
  Push(1);

  EXPECT_EQ(switch_->FindLaunch(kNow), nullptr);
  EXPECT_EQ(switch_->LaunchTime(kNow), kNow + absl::Seconds(1));
  EXPECT_NE(switch_->FindLaunch(kNow + absl::Seconds(1)), nullptr);
}

TEST_F(VersionSwitchTest, FindsTheQueueWhoseVersionHasFailed) {
  Make();
  Push(1);
  Push(1, 1);
  switch_->Commit(&Version(2));
  EXPECT_EQ(switch_->FindUnservable(), nullptr);

  engines_[0]->SetHealthy(false);
  EXPECT_EQ(switch_->FindUnservable(), &switch_->retiring_queue());

  engines_[1]->SetHealthy(false);
  EXPECT_EQ(switch_->FindUnservable(), &switch_->queue());
}

TEST_F(VersionSwitchTest, StartsNoBatchWhileTheOtherVersionHasOneOnTheSamePeers) {
  Make({{.shard = 0, .device = "gpu0"}, {.shard = 1, .device = "gpu1"}});
  Push(1);
  Slot* const old_slot = switch_->FindLaunch(kNow);
  Launch(old_slot);
  switch_->Commit(&Version(2));
  Push(1);

  EXPECT_FALSE(switch_->MayLaunch(Version(2)));
  EXPECT_EQ(switch_->FindLaunch(kNow), nullptr);
  End(old_slot);

  EXPECT_TRUE(switch_->MayLaunch(Version(2)));
  EXPECT_EQ(&switch_->FindLaunch(kNow)->version, &Version(2));
}

TEST_F(VersionSwitchTest, EndsATurnAfterAFewBatchesIfTheOtherVersionHasRows) {
  Make({{.shard = 0, .device = "gpu0"}, {.shard = 1, .device = "gpu1"}});
  Push(100, 1);
  Push(1);
  switch_->Commit(&Version(2));

  for (int64_t batch = 0; batch < VersionSwitch::kTurnBatches; ++batch) {
    Slot* const slot = switch_->FindLaunch(kNow);
    EXPECT_EQ(&slot->version, &Version(1));
    Launch(slot);
    End(slot);
  }
  Slot* const other = switch_->FindLaunch(kNow);
  ASSERT_NE(other, nullptr);
  EXPECT_EQ(&other->version, &Version(2));
  Launch(other);
  End(other);

  EXPECT_EQ(&switch_->FindLaunch(kNow)->version, &Version(1));
}

TEST_F(VersionSwitchTest, ContinuesATurnIfTheOtherVersionHasRowsButNoHealthyReplica) {
  Make({{.shard = 0, .device = "gpu0"}, {.shard = 1, .device = "gpu1"}});
  Push(100, 1);
  Push(1);
  switch_->Commit(&Version(2));
  engines_[1]->SetHealthy(false);

  for (int64_t batch = 0; batch <= VersionSwitch::kTurnBatches; ++batch) {
    Slot* const slot = switch_->FindLaunch(kNow);
    ASSERT_NE(slot, nullptr) << batch;
    EXPECT_EQ(&slot->version, &Version(1));
    Launch(slot);
    End(slot);
  }
}

TEST_F(VersionSwitchTest, FindsASlotOfEitherVersionToRelaunch) {
  Make();
  switch_->Commit(&Version(2));
  EXPECT_EQ(switch_->FindRelaunch(), nullptr);

  for (VersionReplicas* version : {&Version(2), &Version(1)}) {
    Slot& slot = *version->slots[1];
    slot.state = VersionReplicas::SlotState::kRelaunch;
    EXPECT_EQ(switch_->FindRelaunch(), &slot);
  }
}

}  // namespace
}  // namespace logprobd::testing
