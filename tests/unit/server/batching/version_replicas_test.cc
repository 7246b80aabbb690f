#include "server/batching/version_replicas.h"

#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/fake_engine.h"

namespace logprobd::testing {
namespace {

TEST(StagingStoreTest, ReusesAReturnedBufferAfterItsEngineIsDestroyed) {
  StagingStore store;
  auto first = std::make_unique<FakeEngine>();
  std::unique_ptr<StagingBuffer> buffer = *store.Take(0, *first, 64);
  const std::byte* const data = buffer->data();
  store.Return(0, std::move(buffer));
  first = nullptr;
  FakeEngine second;

  const auto taken = store.Take(0, second, 64);

  ASSERT_TRUE(taken.ok());
  EXPECT_EQ((*taken)->data(), data);
  EXPECT_EQ(second.staging_bytes(), 0);
  EXPECT_EQ(store.spare_bytes(), 0);
}

TEST(StagingStoreTest, AllocatesABufferWhenThereIsNoSpareOfThisReplicaAndSize) {
  StagingStore store;
  FakeEngine engine;
  ASSERT_TRUE(store.Reserve(1, engine, 64, 1).ok());
  EXPECT_EQ(store.spare_bytes(), 64);

  const auto of_other_replica = store.Take(0, engine, 64);
  const auto of_other_size = store.Take(1, engine, 63);

  EXPECT_EQ((*of_other_replica)->size_bytes(), 64);
  EXPECT_EQ((*of_other_size)->size_bytes(), 63);
  EXPECT_EQ(engine.staging_bytes(), 64 + 64 + 63);
  EXPECT_EQ(store.spare_bytes(), 64);
}

TEST(StagingStoreTest, FreesOnlyBuffersThatDoNotFit) {
  StagingStore store;
  FakeEngine engine;
  ASSERT_TRUE(store.Reserve(0, engine, 64, 2).ok());
  ASSERT_TRUE(store.Reserve(0, engine, 10, 1).ok());
  ASSERT_TRUE(store.Reserve(1, engine, 64, 1).ok());

  store.FreeAllBut(/*num_replicas=*/1, 64);

  EXPECT_EQ(store.spare_bytes(), 2 * 64);
}

TEST(StagingStoreTest, FailsToReserveWithoutMemory) {
  StagingStore store;
  FakeEngine engine({.staging_bytes_max = 100});

  EXPECT_EQ(store.Reserve(0, engine, 64, 2).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace

namespace {

class VersionReplicasTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<VersionReplicas>> Make(FakeEngine& first, FakeEngine& second) {
    return VersionReplicas::Create({.batch_rows_max = 8, .staging = &store_}, {&first, &second});
  }

  static constexpr int64_t kBytes = 2 * 2 * 8 * 4 * 2;  // Two replicas in bf16.

  StagingStore store_;
};

TEST_F(VersionReplicasTest, LeavesItsStagingToTheNextVersion) {
  FakeEngine old_first, old_second, first, second;
  auto old = Make(old_first, old_second);
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_EQ(store_.spare_bytes(), 0);
  old->reset();
  EXPECT_EQ(store_.spare_bytes(), kBytes);

  const auto next = Make(first, second);

  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ((*next)->staging_bytes(), kBytes);
  EXPECT_EQ(store_.spare_bytes(), 0);
  EXPECT_EQ(first.staging_bytes() + second.staging_bytes(), 0);
}

TEST_F(VersionReplicasTest, FreesSparesOfAnotherSizeAndAllocatesItsOwn) {
  FakeEngine old_first, old_second;
  *Make(old_first, old_second) = nullptr;
  FakeEngine first({.dtype = Dtype::kF32}), second({.dtype = Dtype::kF32});

  const auto next = Make(first, second);

  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(store_.spare_bytes(), 0);
  EXPECT_EQ(first.staging_bytes() + second.staging_bytes(), 2 * kBytes);
}

// Regression: the next batch waited for the first replica although the second became idle earlier.
TEST_F(VersionReplicasTest, PrefersTheReplicaThatIsIdleFirstAmongThoseWithEquallyManyBatches) {
  FakeEngine first, second;
  const auto replicas = Make(first, second);
  ASSERT_TRUE(replicas.ok()) << replicas.status();
  const absl::Time begin = absl::FromUnixSeconds(0);
  const absl::Duration batches[] = {absl::Milliseconds(9), absl::Milliseconds(2)};
  for (size_t i = 0; i < 2; ++i) {
    VersionReplicas::Replica& replica = *(*replicas)->replicas[i];
    replica.NoteBegin(begin);
    replica.NoteEnd(begin + batches[i]);
    replica.NoteBegin(begin + absl::Seconds(1));
    (*replicas)->slots[2 * i]->state = VersionReplicas::SlotState::kInFlight;
  }

  EXPECT_EQ((*replicas)->FindFreeSlot()->replica.index, 1);
}

TEST_F(VersionReplicasTest, ListsHealthyReplicasWithAFreeSlotByTheirBatchesInFlight) {
  FakeEngine first, second;
  const auto replicas = Make(first, second);
  ASSERT_TRUE(replicas.ok()) << replicas.status();
  EXPECT_EQ((*replicas)->FreeReplicas(), (std::vector<int>{0, 1}));
  VersionReplicas::Slot& taken = (*replicas)->FreeSlotOf(0);
  taken.state = VersionReplicas::SlotState::kInFlight;
  taken.replica.NoteBegin(absl::FromUnixSeconds(0));

  EXPECT_EQ((*replicas)->FreeReplicas(), (std::vector<int>{1, 0}));
  EXPECT_NE(&(*replicas)->FreeSlotOf(0), &taken);
  second.SetHealthy(false);
  EXPECT_EQ((*replicas)->FreeReplicas(), (std::vector<int>{0}));
  (*replicas)->FreeSlotOf(0).state = VersionReplicas::SlotState::kInFlight;
  EXPECT_TRUE((*replicas)->FreeReplicas().empty());
}

TEST_F(VersionReplicasTest, ReturnsItsBuffersWhenItCannotBeCreated) {
  FakeEngine first, second({.staging_bytes_max = 0});
  ASSERT_TRUE(store_.Reserve(0, first, kBytes / 4, 2).ok());

  EXPECT_EQ(Make(first, second).status().code(), absl::StatusCode::kResourceExhausted);

  EXPECT_EQ(store_.spare_bytes(), kBytes / 2);
}

}  // namespace

}  // namespace logprobd::testing
